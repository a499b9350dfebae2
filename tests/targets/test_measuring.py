"""Measuring: what is run is what is meant, it leaves nothing behind, and what fails is said."""

from __future__ import annotations

import gc
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxmem.targets import Target, compile_for, measuring
from jaxmem.targets.measuring import GPU_OPTIONS, Gauge, product, scaled, timed, undisturbed

pytestmark = pytest.mark.default_code

CPU = jax.devices("cpu")[0]


@pytest.fixture
def small(monkeypatch):
    """Sizes that take no time."""
    for name in ("_CPU_MEMORY_BYTES", "_LINK_BYTES"):
        monkeypatch.setattr(measuring, name, 2**18)
    monkeypatch.setattr(measuring, "_LARGEST_PRODUCT", 256)


@pytest.mark.parametrize("dtype", measuring._GPU_DTYPES)
def test_a_product_is_one_call_of_cublas(dtype: str):
    with jax.enable_x64(dtype == "float64"):
        matrix = jax.ShapeDtypeStruct((1024, 1024), jnp.dtype(dtype))
        told = measuring.options_of(dtype)
        compiled = compile_for("h200", product(dtype), [matrix] * 2, options=told)
    text = compiled.hlo_text()
    assert text.count('custom_call_target="__cublas$lt$matmul"') == 1
    assert "dot(" not in text and "triton" not in text


def test_memory_is_measured_by_one_kernel_that_writes_where_it_reads():
    array = jax.ShapeDtypeStruct((2**20,), jnp.float32)
    compiled = compile_for("h200", scaled, [array], donate=[0], options=GPU_OPTIONS)
    entry = compiled.hlo_text().split("ENTRY")[1]
    assert entry.count(" fusion(") == 1 and entry.count(" = ") == 2, "a parameter and a kernel"
    assert compiled.memory.total_bytes == array.size * 4


@pytest.mark.parametrize("dtype", measuring._GPU_DTYPES)
@pytest.mark.parametrize("expected", [1e9, 1e12, 1e18])
def test_products_take_milliseconds_on_any_device_and_little_memory(dtype: str, expected: float):
    gauge = Gauge(CPU, 2**33)
    size = gauge._product_size(dtype, {dtype: expected})
    assert size % 256 == 0 and 256 <= size <= 8192
    taken = size**2 * (2 * jnp.dtype(dtype).itemsize + measuring.result_of(dtype).itemsize)
    assert taken <= gauge.allowed_bytes == 2**32
    if size not in (256, 8192):
        assert 0.3 * 0.05 <= 2 * size**3 / expected <= 0.05


@pytest.mark.parametrize("free_gib", [0.5, 1, 2, 4, 8])
def test_a_product_is_large_enough_to_tell_or_not_measured(free_gib: float):
    """Measured on what little was free, an H200 seemed to do less than a third of what it does."""
    card = SimpleNamespace(platform="gpu", device_kind="an H200")
    expected = {"bfloat16": 1e15}
    largest = 2 * 8192**3 / expected["bfloat16"]
    gauge = Gauge(card, int(free_gib * 2**30))
    try:
        size = gauge._product_size("bfloat16", expected)
    except RuntimeError as error:
        assert free_gib < 1 and str(error) == "512 MiB of an H200 are free, and it takes 720"
    else:
        assert free_gib >= 1 and 0.4 * largest < 2 * size**3 / expected["bfloat16"] <= largest
        assert (2 + measuring._RESULTS) * 2 * size**2 <= free_gib * 2**29


def test_a_rate_is_work_over_the_median(small, monkeypatch):
    monkeypatch.setattr(measuring, "timed", lambda run: run() and 0.5)
    gauge = Gauge(CPU, 2**32)
    assert gauge.flops({"float32": 1e12})["float32"] == 2 * 256**3 / 0.5
    assert gauge.memory() == 2 * 2**18 * 2 / 0.5, "read and written by each of two kernels"
    assert gauge.links() == (2**20 / 0.5,) * 3, "four copies of a quarter of a MiB each way"
    assert gauge.notes == []


def test_links_are_measured_while_those_of_the_other_devices_are_as_busy(small, monkeypatch):
    """Four H200 of one host have 20 GB/s each both ways at once, and 45 alone."""
    copies: list[int] = []
    monkeypatch.setattr(
        measuring, "timed", lambda run: copies.append(len(jax.tree.leaves(run()))) or 0.5
    )
    alone, beside = Gauge(CPU, 2**32).links(), Gauge(CPU, 2**32, [CPU, CPU]).links()
    assert copies == [4, 4, 8, 12, 12, 24]
    assert alone == beside, "a rate is that of each device"


def test_the_median_leaves_out_what_comes_first(monkeypatch):
    durations = [100.0, 50.0, 3.0, 1.0, 2.0, 9.0, 2.5]
    ticks = itertools.accumulate(itertools.chain([0.0], *((d, 0.0) for d in durations)))
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: next(ticks))
    assert timed(list) == 2.5


def test_real_rates_are_plausible_and_nothing_stays_behind(small):
    gc.collect()
    before = len(jax.live_arrays())
    with undisturbed():
        gauge = Gauge(CPU, 2**32)
        flops, memory, links = gauge.flops({"float32": 1e10}), gauge.memory(), gauge.links()
    assert gauge.notes == [] and set(flops) == set(measuring._CPU_DTYPES)
    assert all(1e7 < rate < 1e14 for rate in flops.values())
    assert memory is not None and 1e7 < memory < 1e13
    assert links is not None and all(1e5 < rate < 1e13 for rate in links)
    gc.collect()
    assert len(jax.live_arrays()) == before
    assert not jax.config.read("jax_enable_x64")


def test_only_what_is_timed_is_compiled(small):
    compiled = []

    def listen(event, _seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with undisturbed():
            gauge = Gauge(CPU, 2**32)
            gauge.flops({"float32": 1e10}), gauge.memory(), gauge.links()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    parts = {*measuring._CPU_DTYPES, "device memory"}
    assert len(compiled) <= len(parts), "fewer where an earlier test compiled the same"
    assert {p for p in gauge.seconds if p.endswith("compile")} == {f"{p}: compile" for p in parts}
    assert {p for p in gauge.seconds if ":" not in p} == {*parts, "host link"}
    assert all(gauge.seconds[p.partition(":")[0]] >= s >= 0 for p, s in gauge.seconds.items())


def test_measuring_inside_a_trace_measures_arrays(small):
    seen = []

    @jax.jit
    def step(x):
        with undisturbed():
            seen.append(Gauge(CPU, 2**32).memory())
        return x

    step(1.0)
    assert isinstance(seen[0], float)


def test_what_fails_is_said_and_the_rest_is_measured(small, monkeypatch):
    real = Gauge._product

    def failing(self, dtype, expected):
        if dtype == "bfloat16":
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore")
        return real(self, dtype, expected)

    monkeypatch.setattr(Gauge, "_product", failing)
    gauge = Gauge(CPU, 2**32)
    assert set(gauge.flops(Target("cpu").flops)) == {"float32", "float64"}
    assert gauge.notes == [
        "bfloat16 could not be measured: RESOURCE_EXHAUSTED: out of memory",
    ]
    assert gauge.crowded, "another process had taken it"


@pytest.mark.parametrize("why", ["INVALID_ARGUMENT: no such memory", "RESOURCE_EXHAUSTED: pinned"])
def test_a_host_that_pins_nothing_is_no_crowded_device(why: str, monkeypatch):
    def failing(self):
        raise RuntimeError(why)

    monkeypatch.setattr(Gauge, "_links", failing)
    gauge = Gauge(CPU, 2**32)
    assert gauge.links() is None and gauge.notes and not gauge.crowded


def test_a_device_that_is_full_is_left_alone():
    gauge = Gauge(CPU, 2**20)
    assert gauge.flops({"float32": 1e12}) == {} and gauge.memory() is None and gauge.crowded
    assert gauge.notes[-1] == (
        "device memory was not measured: 1 MiB of cpu are free, and it takes 192"
    )


@pytest.mark.gpu
def test_a_real_gpu_is_measured_in_seconds_near_its_table():
    target = Target.local()
    assert target.sources[0].startswith("rates measured 20")
    table = Target.local(measure=False)
    for dtype in ("bfloat16", "float32"):
        assert 0.2 < target.flops[dtype] / table.flops[dtype] < 1.3
    assert 0.4 < target.hbm_bytes_per_second / table.hbm_bytes_per_second < 1.1
    assert target.duplex_bytes_per_second < 1.1 * target.h2d_bytes_per_second
