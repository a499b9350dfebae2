"""What was measured is kept, found again, and never the reason for an error."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.targets import Target, local, measured
from jaxmem.targets.measured import cache_folder, key_of, load, rates_of, store
from tests.targets import made
from tests.targets.test_local import gpu

CPU = jax.devices("cpu")[0]
MADE = dataclasses.replace(made.MADE, notes=("int8 could not be measured: no",))


@pytest.fixture
def counted(cache, monkeypatch):
    """The number of times that something was measured; each finds the device faster."""
    times = []

    def measure(device, fields):
        times.append(device)
        return dataclasses.replace(MADE, hbm_bytes_per_second=4e12 + len(times))

    monkeypatch.setattr(measured, "measure", measure)
    return times


def forget(monkeypatch):
    """What a new process knows."""
    monkeypatch.setattr(measured, "_known", measured._Known())


def the_file(cache: Path) -> Path:
    (path,) = cache.iterdir()
    return path


def test_a_machine_is_measured_once(counted, monkeypatch):
    first = rates_of(CPU, {})
    assert first.how == "measured" and rates_of(CPU, {}) is first
    forget(monkeypatch)
    again = rates_of(CPU, {})
    assert again.how == "cached" and again.measurement == first.measurement
    assert again.path == first.path and len(counted) == 1


def test_measuring_again_replaces_what_was_kept(counted, monkeypatch):
    rates_of(CPU, {})
    newer = rates_of(CPU, {}, again=True)
    assert newer.how == "measured" and rates_of(CPU, {}) is newer and len(counted) == 2
    forget(monkeypatch)
    assert rates_of(CPU, {}).measurement == newer.measurement


def with_value(text: str, place: str, value: object) -> str:
    content = json.loads(text)
    within = content if place in content else content["measured"]
    within[place] = value
    return json.dumps(content)


DAMAGES = {
    "empty": lambda text: "",
    "cut off": lambda text: text[: len(text) // 2],
    "a list": lambda text: "[]",
    "not text": lambda text: "\udcff\ud800",
    "another schema": lambda text: with_value(text, "schema", measured.SCHEMA + 1),
    "another machine": lambda text: with_value(text, "key", {"device_kind": "abacus"}),
    "a field less": lambda text: text.replace('"hbm_bytes_per_second"', '"hbm"'),
    "a rate of nothing": lambda text: with_value(text, "hbm_bytes_per_second", 0.0),
    "a rate that is none": lambda text: with_value(text, "h2d_bytes_per_second", float("nan")),
    "a rate in words": lambda text: with_value(text, "d2h_bytes_per_second", "fast"),
    "rates in a list": lambda text: with_value(text, "flops", [1.0]),
    "no notes": lambda text: with_value(text, "notes", None),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_measured_again_and_mended(damage, cache, counted, monkeypatch):
    rates_of(CPU, {})
    path = the_file(cache)
    whole = path.read_text()
    path.write_text(DAMAGES[damage](whole), errors="surrogatepass")
    forget(monkeypatch)
    assert rates_of(CPU, {}).how == "measured" and len(counted) == 2
    assert load(the_file(cache), key_of(CPU)) is not None


def test_a_cache_that_cannot_be_written_is_said(cache, counted):
    cache.write_text("a file where a directory should be")
    found = rates_of(CPU, {})
    assert found.how == "measured" and found.why.startswith("not kept for the next process: ")
    assert found.path == "" and rates_of(CPU, {}) is found


@pytest.mark.parametrize("free_mib", [4, 60])
def test_what_a_crowded_device_does_is_not_kept(free_mib, cache, monkeypatch):
    """What fits beside a full device's state runs slower than what the device can do."""
    monkeypatch.setattr(measured.measuring, "free_bytes", lambda *_: free_mib * 2**20)
    found = rates_of(CPU, local.processor())
    told = "; ".join(measured.applied(local.processor(), found)["sources"])
    assert (
        f"device memory was not measured: {free_mib} MiB of cpu are free, and it takes 192" in told
    )
    assert "jaxmem doctor --measure, while the device is free" in told
    assert ("float32 was not measured" in told) == (free_mib == 4) == (found.measurement is None)
    assert not cache.exists()
    forget(monkeypatch)
    monkeypatch.setattr(measured.measuring, "free_bytes", lambda *_: 2**33)
    assert rates_of(CPU, local.processor()).how == "measured", "and by the next process it is"
    assert cache.exists()


@pytest.mark.parametrize("rates", [{}, {"flops": {}, **dict.fromkeys(measured._BYTES)}])
def test_who_is_crowded_takes_what_another_process_kept_meanwhile(
    rates, cache, counted, monkeypatch
):
    rates_of(CPU, {})
    path = the_file(cache)
    path.unlink()
    forget(monkeypatch)

    def measure(device, fields):
        store(path, key_of(device), MADE)
        return dataclasses.replace(MADE, **{"hbm_bytes_per_second": 1.0, "crowded": True, **rates})

    monkeypatch.setattr(measured, "measure", measure)
    found = rates_of(CPU, {})
    assert found.how == "cached" and found.measurement == MADE


def test_a_write_that_fails_leaves_the_old_file_whole(cache, monkeypatch):
    path = cache / "rates.json"
    store(path, {"n": 1}, MADE)

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(json, "dump", fail)
    with pytest.raises(OSError, match="disk full"):
        store(path, {"n": 2}, MADE)
    assert load(path, {"n": 1}) == MADE and list(cache.iterdir()) == [path]


def test_of_two_processes_the_first_to_finish_counts(cache, monkeypatch):
    other = dataclasses.replace(MADE, seconds=9.0)

    def measure(device, fields):
        digest = measured.hashlib.sha256(repr(key_of(device)).encode()).hexdigest()[:16]
        store(cache / f"rates-{digest}.json", key_of(device), other)
        return MADE

    monkeypatch.setattr(measured, "measure", measure)
    assert rates_of(CPU, {}).measurement == other


def test_another_driver_or_library_is_measured_anew(monkeypatch, tmp_path):
    before = key_of(CPU)
    monkeypatch.setattr(measured, "jaxlib_version", "9.9.9")
    assert key_of(CPU) != before
    card = gpu()
    monkeypatch.setattr(measured, "_DRIVER", tmp_path / "version")
    without = key_of(card)
    (tmp_path / "version").write_text("NVRM version: 580.1\nGCC version: 13")
    assert key_of(card) == {**without, "driver": "NVRM version: 580.1"} != without


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"JAXMEM_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"JAXMEM_CACHE_DIR": "", "XDG_CACHE_HOME": "/b"}, "/b/jaxmem"),
        ({"JAXMEM_CACHE_DIR": "", "XDG_CACHE_HOME": "", "HOME": "/c"}, "/c/.cache/jaxmem"),
    ],
)
def test_where_it_is_kept(variables, folder, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(measured.sys, "platform", "linux")
    assert cache_folder() == Path(folder)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the local device is a GPU")
def test_measuring_the_processor_for_real(cache, monkeypatch):
    for name in ("_CPU_MEMORY_BYTES", "_LINK_BYTES"):
        monkeypatch.setattr(measured.measuring, name, 2**20)
    monkeypatch.setattr(measured.measuring, "_LARGEST_PRODUCT", 256)
    target, assumed = Target.local(measure=True), Target.local()
    assert target.sources[0].startswith("rates measured 20")
    assert target.flops["float32"] != assumed.flops["float32"]
    assert target.flops["int8"] == assumed.flops["int8"], "assumed, as nobody measured it"
    assert target.h2d_bytes_per_second == assumed.h2d_bytes_per_second, "there is no link"
    assert Target.local(measure=True) == target


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU is measured")
def test_on_a_processor_nothing_is_measured_unless_asked_for(cache, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("measured")

    monkeypatch.setattr(measured, "measure", fail)
    assert Target.local() == Target.local(measure=False) == Target.resolve(None) == Target("cpu")
    jaxmem.plan(lambda x: jnp.sin(x) * 2, jnp.ones(8), progress=False)
    assert not cache.exists()


@pytest.fixture
def h200(monkeypatch):
    """A process that finds one H200."""
    card = gpu()
    monkeypatch.setattr(jax, "devices", lambda *_: [card])
    monkeypatch.setattr(jax, "local_devices", lambda *_, **__: [card])
    monkeypatch.setattr(jax, "local_device_count", lambda *_: 1)
    return card


def test_a_gpu_has_the_rates_that_were_measured(h200, counted, monkeypatch):
    target, table = Target.local(), Target.local(measure=False)
    assert counted == [h200] and table.flops == Target("h200").flops
    assert target.flops == {**table.flops, **MADE.flops}
    assert target.h2d_bytes_per_second == 54e9 and target.duplex_bytes_per_second == 46e9
    assert target.d2d_bytes_per_second == table.d2d_bytes_per_second
    assert target.device_bytes == table.device_bytes and target.model == "h200"
    assert target.sources[:3] == (MADE.summary, *MADE.notes, "the rest:")
    forget(monkeypatch)
    assert Target.local() == target, "another process plans by the same rates"


@pytest.mark.parametrize("error", [ValueError("no such device"), RuntimeError("CUDA: busy\n")])
def test_where_measuring_fails_the_table_is_used_and_it_is_said(h200, cache, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(measured, "measure", fail)
    target = Target.local()
    assert target.flops == Target("h200").flops
    reason = str(error).strip()
    assert target.sources[0] == f"rates assumed: measuring failed: {reason}"
    assert not cache.exists()


def test_nothing_that_could_be_measured_is_said_too(h200, cache, monkeypatch):
    nothing = dict.fromkeys(measured._BYTES)
    nothing = dataclasses.replace(MADE, flops={}, notes=("float32 ...: no",), **nothing)
    monkeypatch.setattr(measured, "measure", lambda *_: nothing)
    assert Target.local().sources[0] == "rates assumed: float32 ...: no"
    assert not cache.exists()


def test_processes_of_one_program_plan_by_the_table(h200, counted, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda *_: 4)
    assert "4 processes have to plan alike" in Target.local().sources[0]
    assert Target.local().flops == Target("h200").flops and counted == []
    assert Target.local(measure=True).flops["bfloat16"] == 6e14


def test_devices_made_of_one_processor_share_its_rates(cache):
    fields = {**local.processor(), "devices_per_host": 4}
    shared = measured.applied(fields, measured.Found("measured", MADE))
    assert shared["flops"]["float32"] == MADE.flops["float32"] / 4
    assert shared["hbm_bytes_per_second"] == 1e12
