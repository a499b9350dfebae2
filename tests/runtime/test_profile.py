"""What a profile of a step tells, from the events of a trace."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxmem
from jaxmem.errors import ArgumentError
from jaxmem.program.calling import Caller
from jaxmem.program.ir import Hosting
from jaxmem.runtime.bench import Bench
from jaxmem.runtime.compiler import Compiler
from jaxmem.runtime.planned import Chosen
from jaxmem.runtime.profile import StepProfile, covered, profiled, read
from jaxmem.targets import Target
from tests.fitted_steps import DEEP_ARGS, deep

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=8)


def events(kernels, copies, gpu=7):
    """A trace of two streams of a GPU, of its host, and of another GPU."""
    yield {"ph": "M", "name": "thread_name", "pid": gpu, "tid": 1, "args": {"name": "Stream #1"}}
    yield {"ph": "M", "name": "thread_name", "pid": gpu, "tid": 2, "args": {"name": "Stream #2"}}
    yield {"ph": "M", "name": "thread_name", "pid": gpu, "tid": 3, "args": {"name": "XLA Ops"}}
    yield {"ph": "M", "name": "thread_name", "pid": 9, "tid": 1, "args": {"name": "Stream #1"}}
    for tid, name, spans in ((1, "gemm_fusion", kernels), (2, "MemcpyD2H", copies)):
        for start, length in spans:
            yield {"ph": "X", "name": name, "pid": gpu, "tid": tid, "ts": start, "dur": length}
    yield {"ph": "X", "name": "gemm_fusion", "pid": gpu, "tid": 3, "ts": 0, "dur": 1000}
    yield {"ph": "X", "name": "gemm_fusion", "pid": 9, "tid": 1, "ts": 0, "dur": 1000}
    yield {"ph": "X", "name": "python", "pid": 1, "tid": 1, "ts": 0, "dur": 1000}


@given(SPANS, SPANS)
def test_every_moment_of_a_step_is_told_once(kernels, copies):
    told = read(events(kernels, copies))
    computing = {t for start, length in kernels for t in range(start, start + length)}
    copying = {t for start, length in copies for t in range(start, start + length)}
    whole = max(computing | copying) + 1 - min(computing | copying)
    expected = StepProfile(
        *(
            len(ticks) * 1e-6
            for ticks in (
                range(whole),
                computing,
                copying,
                copying - computing,
                range(whole - len(computing | copying)),
            )
        )
    )
    assert dataclasses.astuple(told) == pytest.approx(dataclasses.astuple(expected), abs=1e-12)


def test_a_profile_is_one_line():
    told = str(StepProfile(0.25, 0.2, 0.1, 0.05, 0.0))
    assert told == "step 250ms, computing 200ms, copying 100ms, exposed 50.0ms, idle 0s"
    assert covered([]) == 0


def test_a_trace_without_a_gpu_is_refused():
    with pytest.raises(ArgumentError, match="nothing that ran on a GPU"):
        read([{"ph": "X", "name": "python", "pid": 1, "tid": 1, "ts": 0, "dur": 1000}])


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there a profile can be made")
def test_nothing_is_run_where_no_profile_can_be_made():
    step = jaxmem.fit(deep, donate_argnums=0, progress=False)
    with pytest.raises(ArgumentError, match=r"is none. Plan.exposed_seconds says"):
        step.profile(*DEEP_ARGS)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(DEEP_ARGS))
    with pytest.raises(ArgumentError, match="a profile tells"):
        profiled(lambda: pytest.fail("ran"))


def test_the_program_that_was_timed_is_profiled_on_copies():
    cpu = Target("cpu")
    caller = Caller(deep)
    call = caller.take(DEEP_ARGS, {})
    compiler = Compiler(caller.trace(call).program, cpu)
    ran = []

    def profiler(run):
        ran.append(run())
        return StepProfile(1.0, 0.5, 0.5, 0.25, 0.25)

    bench = Bench(call, cpu, profiler=profiler)
    chosen = Chosen(None, compiler.keep_all(), 0)
    assert bench.exposed_seconds(compiler.program, chosen, Hosting()) == 0.25
    assert len(ran) == 1
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(DEEP_ARGS))


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
def test_a_step_on_a_gpu_is_profiled():
    @jaxmem.fit(donate_argnums=0, progress=False)
    def step(w, x):
        return w - jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)

    w, x = jnp.eye(1024), jnp.ones((4096, 1024))
    w = step(w, x)
    found, profile = step.profile(w, x)
    assert w.is_deleted() and found.shape == w.shape
    assert 0 < profile.computing_seconds <= profile.step_seconds
    assert profile.exposed_seconds == 0
