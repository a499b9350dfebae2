"""Tracking tells what is in use, what each figure stands on, and what has grown."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.errors import ArgumentError, MissingExtraError, TrackError
from jaxmem.monitor import duty, figures, marks, track
from jaxmem.monitor.arrays import live_now
from jaxmem.monitor.figures import Figure
from jaxmem.monitor.sampling import SAMPLER, Sampler
from jaxmem.units import MIB

KEPT: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_kept():
    yield
    KEPT.clear()


class Allocator:
    """What an allocator says; its peak never falls."""

    def __init__(self, monkeypatch, **more: int):
        self.more, self.used, self.peak = more, 0, 0
        monkeypatch.setattr(figures, "stats_of", lambda device: self.stats())

    def uses(self, nbytes: int) -> None:
        self.used, self.peak = nbytes, max(self.peak, nbytes)

    def stats(self) -> dict[str, int]:
        return {"bytes_in_use": self.used, "peak_bytes_in_use": self.peak, **self.more}


# --- what is in use ------------------------------------------------------------------------------


def test_a_device_that_says_nothing_has_estimates_and_no_more():
    with jaxmem.track("block", publish=False) as t:
        KEPT.append(jnp.ones((512, 512)))
    for memory in t.summary().devices:
        assert memory.in_use.how == "estimated"
        assert memory.peak is not None and memory.peak.how == "sampled"
        assert memory.reserved is memory.largest_free is memory.limit is None
    text = str(t.summary())
    assert "(estimated)" in text and "(sampled)" in text and "not told" in text
    assert "allocator" not in text


def test_a_peak_that_is_set_inside_is_the_allocators_own(monkeypatch):
    allocator = Allocator(monkeypatch)
    allocator.uses(3 * MIB)
    with jaxmem.track("block", publish=False) as t:
        allocator.uses(9 * MIB)  # Between two samples.
        allocator.uses(1 * MIB)
    (memory,) = t.summary().devices
    assert memory.peak == Figure(9 * MIB, "allocator peak")
    assert memory.in_use == Figure(1 * MIB, "allocator")


def test_a_peak_from_before_is_not_taken_for_one_from_inside(monkeypatch):
    allocator = Allocator(monkeypatch)
    allocator.uses(9 * MIB)
    allocator.uses(1 * MIB)
    with jaxmem.track("block", publish=False) as t:
        allocator.uses(5 * MIB)
        t.point("fullest")
        allocator.uses(2 * MIB)
    (memory,) = t.summary().devices
    assert memory.peak == Figure(5 * MIB, "sampled")


def test_a_peak_between_two_calls_is_not_theirs(monkeypatch):
    allocator = Allocator(monkeypatch)

    @jaxmem.track
    def step(nbytes: int) -> None:
        allocator.uses(nbytes)

    step(4 * MIB)
    allocator.uses(20 * MIB)
    allocator.uses(0)
    step(2 * MIB)
    (memory,) = step.track.summary().devices
    assert memory.peak == Figure(4 * MIB, "allocator peak")


def test_where_nothing_was_looked_at_the_peak_is_not_known(monkeypatch):
    allocator = Allocator(monkeypatch)
    t = jaxmem.track("step", publish=False)
    with t:
        allocator.uses(2 * MIB)
    monkeypatch.setattr(track, "AT_POINTS", duty.Duty(share=0.0, most=0.0))
    with t:
        allocator.uses(7 * MIB)
    summary = t.summary()
    assert summary.devices[0].peak == Figure(2 * MIB, "allocator peak")
    assert any("at 2 of 4 beginnings and ends nothing was looked at" in n for n in summary.notes)


def test_what_allocators_call_zero_is_not_told(monkeypatch):
    Allocator(
        monkeypatch, bytes_limit=0, largest_free_block_bytes=0, bytes_reserved=0, pool_bytes=8
    )
    (memory,) = figures.devices_now([0], jax.local_devices()[:1])
    assert memory.largest_free is memory.limit is memory.free_bytes is None
    assert memory.reserved == Figure(8, "allocator")


def test_every_device_is_told_with_its_own_bytes():
    counts = live_now(arrays=[jnp.ones((8, 8)), jnp.ones(4)])
    (device,) = {name for kind in counts.counts for name in kind.devices}
    assert counts.on(device) == counts.nbytes == 8 * 8 * 4 + 4 * 4
    assert counts.on("cuda:7") == 0


def test_pinned_arrays_are_host_memory():
    device = jax.local_devices()[0]
    there = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    array = jax.device_put(jnp.ones((64, 64)), there)
    found = live_now(arrays=[array])
    assert found.pinned == Figure(64 * 64 * 4, "estimated")
    assert found.on(figures.name_of(device)) == 0


def test_the_sampler_sees_what_comes_and_goes():
    with jaxmem.track("block", every=0.01, publish=False) as t:
        SAMPLER._looked = -1e9
        KEPT.append(jnp.ones((1024, 1024)))
        until = time.monotonic() + 20
        while t._samples < 4 and time.monotonic() < until:
            time.sleep(0.01)
        KEPT.clear()
    assert t._samples >= 4
    assert t.summary().seconds > 0


def test_the_sampler_rests_when_nothing_is_tracked(monkeypatch):
    monkeypatch.setattr("jaxmem.monitor.sampling._IDLE_SECONDS", 0.01)
    sampler = Sampler()

    class Watcher:
        every = 0.001

        def look(self, devices: Any, host: Any) -> None:
            looked.set()

    looked, watcher = threading.Event(), Watcher()
    sampler.add(watcher)
    assert looked.wait(20)
    thread = sampler._thread
    sampler.remove(watcher)
    assert thread is not None
    thread.join(20)
    assert not thread.is_alive()
    looked.clear()
    sampler.add(watcher)
    assert looked.wait(20)
    sampler.remove(watcher)


def test_looking_does_not_start_jax():
    code = (
        "import jaxmem, time\nfrom jaxmem import _compat\n"
        "with jaxmem.track('early', every=0.01, publish=False) as t: time.sleep(0.1)\n"
        "str(t.summary())\nassert not _compat.has_started()"
    )
    import subprocess

    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


# --- blocks and functions -------------------------------------------------------------------------


def test_a_tracked_function_is_like_the_function():
    @jaxmem.track
    def plain(x, *, by=2):
        """Doubles."""
        return x * by

    assert (plain(3), plain(3, by=3), plain.__name__, plain.__doc__) == (6, 9, "plain", "Doubles.")
    assert plain.track.calls == 2 and plain.track.name == "plain"

    class Thing:
        size = 4

        @jaxmem.track("method", publish=False)
        def area(self, by):
            return self.size * by

    assert Thing().area(3) == 12


def test_a_fitted_step_keeps_its_methods():
    @jaxmem.track("step", publish=False)
    @jaxmem.fit(budget="8MiB", progress=False)
    def step(x):
        return x + 1

    assert step(jnp.ones(3))[0] == 2
    assert step.plan(jnp.ones(3)).solver == "keep-all"
    with pytest.raises(AttributeError, match="no_such"):
        step.no_such  # noqa: B018


def test_it_may_be_entered_again_and_from_other_threads():
    t = jaxmem.track("shared", publish=False)

    @t
    def down(n: int) -> int:
        return n and down(n - 1)

    down(3)
    threads = [threading.Thread(target=down, args=(2,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert t.calls == 4 + 4 * 3
    assert t._depth == 0


def test_an_exception_passes_and_ends_it():
    t = jaxmem.track("failing", publish=False)
    with pytest.raises(ZeroDivisionError):
        with t:
            1 / 0  # noqa: B018
    assert t._depth == 0
    assert not SAMPLER._watchers


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jaxmem.track(5), r"track\(5\): it takes a name"),
        (lambda: jaxmem.track("x", every=0), "every is 0: it takes a number of seconds above 0"),
        (lambda: jaxmem.track("x", every=float("nan")), "every is nan"),
        (lambda: jaxmem.track("x", every="often"), "every is 'often'"),
        (lambda: jaxmem.track("x")(5), "track decorates functions, got int"),
        (lambda: jaxmem.track("x").point(5), r"point\(5\): it takes a name"),
        (lambda: jaxmem.track("x", tensorboard=5), "it takes a folder, or a writer"),
    ],
)
def test_wrong_arguments_are_named(make: Any, message: str):
    with pytest.raises(ArgumentError, match=message):
        make()


def test_what_runs_after_the_call_is_refused():
    async def later():
        pass

    def parts():
        yield 1

    with pytest.raises(ArgumentError, match="later makes a coroutine"):
        jaxmem.track(later)
    with pytest.raises(ArgumentError, match="parts makes a generator"):
        jaxmem.track("x")(parts)


# --- where samples go ----------------------------------------------------------------------------


def test_samples_are_lines_of_json_that_say_what_they_are(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text('{"before": 1}\n')
    with jaxmem.track("epoch", jsonl=path, publish=False) as t:
        t.point("mid")
    first, *lines = path.read_text().splitlines()
    assert json.loads(first) == {"before": 1}
    assert len(lines) >= 3
    for line in map(json.loads, lines):
        assert line["name"] == "epoch" and line["calls"] == 1
        assert line["devices"][0]["in_use"]["how"] == "estimated"
        assert line["rss"]["bytes"] > 2**20 and line["rss"]["how"] == "process"


def test_a_file_that_cannot_be_written_is_named_at_once(tmp_path):
    with pytest.raises(TrackError, match=r"nowhere/s\.jsonl.*No such file"):
        jaxmem.track("x", jsonl=tmp_path / "nowhere" / "s.jsonl")
    with pytest.raises(TrackError, match="cannot be written"):
        jaxmem.track("x", jsonl=tmp_path)


def test_a_disk_that_fills_up_ends_the_samples_and_not_the_run(tmp_path):
    t = jaxmem.track("x", jsonl=tmp_path / "s.jsonl", publish=False)

    t._writers[0].path = Path("/dev/full")  # pyright: ignore[reportAttributeAccessIssue]
    with t:
        pass
    assert any("No space left on device" in note for note in t.summary().notes)


def test_a_writer_for_tensorboard_gets_scalars_named_by_what_they_are(monkeypatch):
    Allocator(monkeypatch).uses(5 * MIB)
    scalars: list[tuple[str, int, int]] = []

    class Summaries:
        def add_scalar(self, tag: str, value: int, step: int) -> None:
            scalars.append((tag, value, step))

    with jaxmem.track("epoch", tensorboard=Summaries(), publish=False):
        pass
    device = figures.name_of(jax.local_devices()[0])
    assert (f"epoch/{device}/in_use_bytes_allocator", 5 * MIB, 1) in scalars
    assert any(tag == f"epoch/{device}/peak_bytes_allocator_peak" for tag, *_ in scalars)
    assert any(tag == "epoch/host/rss_bytes_process" for tag, *_ in scalars)


def test_a_folder_for_tensorboard_has_the_scalars_in_its_own_format(tmp_path, monkeypatch):
    pytest.importorskip("tensorboardX", reason="needs the extra tracking")
    from tensorboardX.proto.event_pb2 import Event

    Allocator(monkeypatch).uses(5 * MIB)
    t = jaxmem.track("epoch", tensorboard=tmp_path / "logs", publish=False)
    with t:
        pass
    t.close()
    (file,) = (tmp_path / "logs").iterdir()
    rest, found = file.read_bytes(), {}
    while rest:  # Records: their length, its checksum, the event, and that of the event.
        length = int.from_bytes(rest[:8], "little")
        for value in Event.FromString(rest[12 : 12 + length]).summary.value:
            found[value.tag] = value.simple_value
        rest = rest[16 + length :]
    # TensorBoard's tags have no colon; its library puts a line in the place of each.
    device = figures.name_of(jax.local_devices()[0]).replace(":", "_")
    assert found[f"epoch/{device}/in_use_bytes_allocator"] == 5 * MIB
    assert found["epoch/host/rss_bytes_process"] > 0


def test_a_range_without_nvtx_is_that_of_jax_alone():
    """Each tracked call makes one: what holds several together costs as much as all the rest."""
    assert type(marks.mark("epoch", None)) is jax.profiler.TraceAnnotation


def test_ranges_of_the_real_nvtx_open_and_close():
    """Without Nsight Systems they go nowhere; that they can be set and nest is seen here."""
    pytest.importorskip("nvtx", reason="needs the extra tracking")
    with jaxmem.track("outer", nvtx=True, publish=False) as outer, outer:
        pass
    assert outer.calls == 2


@pytest.mark.parametrize("library", ["tensorboardX", "nvtx"])
def test_a_library_that_is_missing_is_named_with_its_extra(library: str, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, library, None)
    options: dict[str, Any] = {"tensorboard": tmp_path} if library != "nvtx" else {"nvtx": True}
    with pytest.raises(MissingExtraError, match=rf"{library}.*jaxmem\[tracking\]"):
        jaxmem.track("x", **options)
    jaxmem.track("x", publish=False)


def test_marks_are_set_for_profilers(monkeypatch):
    ranges: list[str] = []

    class Range:
        def __init__(self, name: str, domain: str = ""):
            self.name = f"{domain}/{name}" if domain else name

        def __enter__(self):
            ranges.append(f"+{self.name}")

        def __exit__(self, *error: Any):
            ranges.append(f"-{self.name}")

    class Nvtx:
        annotate = Range

    monkeypatch.setitem(sys.modules, "nvtx", Nvtx)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(marks.jax.profiler, "TraceAnnotation", Range)
    with jaxmem.track("epoch", publish=False):
        ranges.append("body")
    assert ranges == ["+epoch", "+jaxmem/epoch", "body", "-jaxmem/epoch", "-epoch"]
    ranges.clear()
    with jaxmem.track("epoch", nvtx=False, publish=False):
        pass
    assert ranges == ["+epoch", "-epoch"]


# --- what it costs -------------------------------------------------------------------------------


def test_looking_stays_within_its_share():
    bounded = duty.Duty(share=0.01, most=0.05)
    assert bounded.may()
    bounded.spend(0.06)
    assert not bounded.may()
    bounded._at -= 4.0  # Four seconds later.
    assert bounded.may()
    assert bounded.left <= 0.05


def test_a_call_beyond_the_share_looks_at_nothing(monkeypatch):
    monkeypatch.setattr(track, "AT_POINTS", duty.Duty(share=0.0, most=0.0))

    def unwanted(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("went through the arrays")

    monkeypatch.setattr(track, "live_now", unwanted)
    t = jaxmem.track("step", publish=False, every=1000.0)
    for _ in range(50):
        with t:
            pass
    assert t._skipped == 100


def test_a_child_process_has_a_tracker_of_its_own(tmp_path):
    with jaxmem.track("parent") as t:
        t.point("mid")
    assert (tmp_path / "cache" / "tracked" / f"{os.getpid()}.json").is_file()
