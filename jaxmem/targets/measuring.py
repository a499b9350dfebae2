"""Measure a device with JAX alone: matrix products, device memory, links to the host and peers.

Every rate is the median of a few runs after two that are thrown away, on random data: products
of zeros draw less power and run faster than any that matter. Only what is timed is compiled: a
product for each dtype and one kernel for device memory.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

# cuBLAS knows a good kernel for a large square product. Tuning would run all that can do it, and
# compile Triton's for that.
GPU_OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
# But not of TF32: untuned an H200 made 203 TFLOP/s, and makes 371 in any program of its user's.
_TUNED_OPTIONS = {"xla_gpu_enable_triton_gemm": False}
_GPU_DTYPES = ("bfloat16", "float16", "float32", "float64", "int8")
_CPU_DTYPES = ("float32", "float64", "bfloat16")
_RUNS = 5
# Of the bytes that are free on the device, at most this share is used.
_SHARE = 1 / 2
# What is measured on less than its size is slower than the device: a product of 1280 in bfloat16
# ran at 214 TFLOP/s on an H200 that does 735, and a train step was predicted 2.5 times too long.
# With this much of the size it is still what the device does.
_ENOUGH = 3 / 4
_LARGEST_PRODUCT, _SMALLEST_PRODUCT, _STEP = 8192, 256, 256
# A B200 has 126 MB of L2; of the L3 of a server's processor, one process seldom has as much.
_GPU_MEMORY_BYTES, _CPU_MEMORY_BYTES = 512 * 2**20, 64 * 2**20
_LINK_BYTES, _LINK_COPIES = 64 * 2**20, 4
# So many that starting them and waiting for the last takes no part of the time that shows: with 8
# kernels of 0.28 ms an H200's memory was measured at 3.57 to 3.87 TB/s, with 64 at 4.12.
_GPU_KERNELS, _CPU_KERNELS = 64, 2
_GPU_PRODUCTS = 8
# Of the results of products that are started one after another, so many are there at a time.
_RESULTS = 3
_HOST_LINK = "host link"
# Random numbers are drawn once for so many elements, and then repeated.
_DRAWN = 2**20


class _Crowded(RuntimeError):
    """So little of the device is free that what would be measured is not what it can do."""


class Gauge:
    """Measures one device and leaves nothing on it.

    Attributes:
        notes: what could not be measured, and why.
        crowded: whether something was left out, or failed, as too little of the device is free.
        seconds: how long each part took, such as ``"bfloat16"``, and of that what went before
            its runs: ``"bfloat16: data"`` and ``"bfloat16: compile"``.
    """

    def __init__(self, device: Any, free_bytes: int, beside: Sequence[Any] = ()):
        """Take a device of which ``free_bytes`` are free; part of them is used.

        Links are measured while those of the devices ``beside`` it, as free as it is, are as busy:
        a step over all of them copies in all of them at the same time.
        """
        self.device, self.beside = device, tuple(beside)
        self.on_device = SingleDeviceSharding(device)
        self.free_bytes = free_bytes
        self.allowed_bytes = int(free_bytes * _SHARE)
        self.notes: list[str] = []
        self.crowded = False
        self.seconds: dict[str, float] = {}
        self._part = ""

    def flops(self, expected: Mapping[str, float]) -> dict[str, float]:
        """FLOP/s of square matrix products by dtype, of those that work.

        Args:
            expected: rates by dtype, by which the size is chosen so that one product takes some
                milliseconds whatever the device is.
        """
        dtypes = _CPU_DTYPES if self.device.platform == "cpu" else _GPU_DTYPES
        found = {d: self._attempt(d, lambda d=d: self._product(d, expected)) for d in dtypes}
        return {dtype: rate for dtype, rate in found.items() if rate is not None}

    def memory(self) -> float | None:
        """Bytes a second of one element-wise kernel that reads and writes all of an array."""
        return self._attempt("device memory", self._memory)

    def links(self) -> tuple[float, float, float] | None:
        """Bytes a second to pinned host memory, from it, and each way while both run."""
        return self._attempt(_HOST_LINK, self._links)

    def peer(self, other: Any) -> float | None:
        """Bytes a second to another device of this process."""
        return self._attempt("peer link", lambda: self._peer(other))

    def _attempt(self, what: str, measure: Callable[[], Any]) -> Any:
        self._part = what
        try:
            with self._clocked(what):
                return measure()
        except _Crowded as error:
            self.notes.append(f"{what} was not measured: {error}")
            self.crowded = True
            return None
        except (RuntimeError, ValueError) as error:
            # What XLA and JAX say of a dtype, a kind of memory or a copy that a device lacks; the
            # target's sources and the doctor pass it on, and the table's rate is used.
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            self.notes.append(f"{what} could not be measured: {reason[:200]}")
            # Other processes have what this one's allocator takes for free. What may be pinned of
            # the host's memory is the same tomorrow.
            self.crowded |= what != _HOST_LINK and "RESOURCE_EXHAUSTED" in str(error)
            return None

    @contextlib.contextmanager
    def _clocked(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            passed = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + passed

    def _within(self, size: float, bytes_of: Callable[[float], float]) -> float:
        """``size``, or as much of it as is enough; ``bytes_of`` says what a size takes.

        Raises:
            _Crowded: not even that may be used.
        """
        if bytes_of(size) <= self.allowed_bytes:
            return size
        least = _ENOUGH * size
        if (needed := bytes_of(least)) > self.allowed_bytes:
            raise _Crowded(
                f"{self.free_bytes >> 20} MiB of {self.device.device_kind} are free, and it takes "
                f"{math.ceil(needed / _SHARE / 2**20)}"
            )
        return least

    def _product(self, dtype: str, expected: Mapping[str, float]) -> float:
        with jax.enable_x64(dtype == "float64"):
            size = self._product_size(dtype, expected)
            left, right = self._random((size, size), dtype, 2)
            multiply = self._compiled(
                product(dtype), left, right, compiler_options=options_of(dtype)
            )
            count = self._products

            def run() -> list[Any]:
                made = multiply(left, right)
                for _ in range(count - 1):
                    made = multiply(left, right)
                return [made]

            seconds = timed(run)
        return 2.0 * size**3 * count / seconds

    def _product_size(self, dtype: str, expected: Mapping[str, float]) -> int:
        wanted_seconds = 0.05 if self.device.platform == "cpu" else 0.005
        rate = expected.get(dtype) or expected["float32"]
        wanted = min((rate * wanted_seconds / 2) ** (1 / 3), _LARGEST_PRODUCT)
        wanted = max(wanted, _SMALLEST_PRODUCT)
        # Two operands, and results.
        results = min(_RESULTS, self._products)
        each = 2 * jnp.dtype(dtype).itemsize + results * result_of(dtype).itemsize
        size = self._within(wanted, lambda size: each * size**2)
        return max(_SMALLEST_PRODUCT, int(size) // _STEP * _STEP)

    @property
    def _products(self) -> int:
        """How many are started before any is waited for."""
        return 1 if self.device.platform == "cpu" else _GPU_PRODUCTS

    def _memory(self) -> float:
        on_cpu = self.device.platform == "cpu"
        most = _CPU_MEMORY_BYTES if on_cpu else _GPU_MEMORY_BYTES
        kernels = _CPU_KERNELS if on_cpu else _GPU_KERNELS
        # Until a kernel has written where it reads, its result may be beside it.
        count = int(self._within(most, lambda size: 2 * size)) // 4
        held = self._random((count,), "float32")
        scale = self._compiled(scaled, held[0], donate_argnums=0)

        def run() -> list[Any]:
            for _ in range(kernels):
                held.append(scale(held.pop()))
            return held

        return 2.0 * 4 * count * kernels / timed(run)

    def _links(self) -> tuple[float, float, float]:
        devices = (self.device, *self.beside)
        on_device = [SingleDeviceSharding(d) for d in devices]
        on_host = [SingleDeviceSharding(d, memory_kind="pinned_host") for d in devices]
        (first,) = self._random((self._link_bytes() // 4,), "float32")
        near = jax.block_until_ready([jax.device_put(first, there) for there in on_device])
        far = jax.block_until_ready(jax.device_put(near, on_host))

        def down() -> list[Any]:
            return [jax.device_put(near, on_host) for _ in range(_LINK_COPIES)]

        def up() -> list[Any]:
            return [jax.device_put(far, on_device) for _ in range(_LINK_COPIES)]

        def both() -> list[Any]:
            given, there = [*near, *far], [*on_host, *on_device]
            return [jax.device_put(given, there) for _ in range(_LINK_COPIES)]

        moved = first.nbytes * _LINK_COPIES
        return moved / timed(down), moved / timed(up), moved / timed(both)

    def _peer(self, other: Any) -> float:
        there = SingleDeviceSharding(other)
        (here,) = self._random((self._link_bytes() // 4,), "float32")

        def across() -> list[Any]:
            return [jax.device_put(here, there) for _ in range(_LINK_COPIES)]

        return here.nbytes * _LINK_COPIES / timed(across)

    def _link_bytes(self) -> int:
        # What is sent, and what comes back in a run and in the one before.
        return int(self._within(_LINK_BYTES, lambda size: (1 + 2 * _LINK_COPIES) * size))

    def _random(self, shape: tuple[int, ...], dtype: str, count: int = 1) -> list[Any]:
        """Random arrays on the device, drawn on the host: that needs no compile.

        A program that makes them would be slow to compile: within :func:`undisturbed` what depends
        on no argument is evaluated while tracing, and is then a constant of the program. With an
        iota of 256 MiB a compile for a CPU took 6 s.
        """
        with self._clocked(f"{self._part}: data"):
            made = []
            for seed in range(count):
                generator = np.random.default_rng(seed)
                if dtype == "int8":
                    drawn = generator.integers(-8, 9, _DRAWN, np.int8)
                else:
                    drawn = generator.standard_normal(_DRAWN).astype(jnp.dtype(dtype))
                made.append(jax.device_put(np.resize(drawn, shape), self.on_device))
            return jax.block_until_ready(made)

    def _compiled(
        self,
        fun: Callable,
        *args: Any,
        compiler_options: dict[str, Any] = GPU_OPTIONS,
        **options: Any,
    ) -> Callable:
        told = compiler_options if self.device.platform == "gpu" else None
        made = jax.jit(fun, out_shardings=self.on_device, compiler_options=told, **options)
        with self._clocked(f"{self._part}: compile"):
            return made.lower(*args).compile()


def result_of(dtype: str) -> np.dtype:
    """What a product of such numbers is kept in."""
    return jnp.dtype("int32" if dtype == "int8" else dtype)


def options_of(dtype: str) -> dict[str, Any]:
    """How the product that is measured is compiled for a GPU."""
    return _TUNED_OPTIONS if dtype == "float32" else GPU_OPTIONS


def product(dtype: str) -> Callable[[Any, Any], Any]:
    """The matrix product that is measured, at JAX's default precision: TF32 where a GPU has it."""
    wide = result_of(dtype)
    return lambda a, b: lax.dot(a, b, precision=lax.Precision.DEFAULT, preferred_element_type=wide)


def scaled(x: Any) -> Any:
    """The element-wise kernel that is measured: one multiplication, hidden behind its traffic."""
    return x * 1.0001


def timed(run: Callable[[], list[Any]]) -> float:
    """Median seconds of ``run``, from its start until the arrays that it returns are there.

    They are gone before the next run starts, so that its copies find the same memory again.
    """
    seconds = []
    for _ in range(2 + _RUNS):
        started = time.perf_counter()
        made = jax.block_until_ready(run())
        seconds.append(time.perf_counter() - started)
        del made
    return statistics.median(seconds[2:])


def free_bytes(device: Any, known: int) -> int:
    """Bytes that are free on a device; where its allocator does not tell, those it has."""
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit") or known
    return limit - stats.get("bytes_in_use", 0)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Within, what is measured is run at once and as written, whatever the caller has set."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.ensure_compile_time_eval())
        stack.enter_context(jax.disable_jit(False))
        stack.enter_context(jax.transfer_guard("allow"))
        stack.enter_context(jax.debug_nans(False))
        yield
