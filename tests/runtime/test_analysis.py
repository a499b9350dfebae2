"""Reports: every byte at the peak has a buffer, and every buffer a place people know."""

from __future__ import annotations

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from jaxmem.planner.report import MemoryReport
from jaxmem.program import nnx
from jaxmem.program.calling import Caller
from jaxmem.program.ir import Program
from jaxmem.runtime.analysis import predicted_report
from jaxmem.targets import Target
from tests.fitted_steps import tanh_chain
from tests.problems import PROBLEMS

NAMES = ("mlp", "transformer_scan", "lstm_nested", "mixed_leaves", "transformer_nnx", "branches")


@pytest.fixture(scope="module", params=NAMES)
def both(request) -> MemoryReport:
    problem = PROBLEMS[request.param]
    step, args = problem.make()
    return jaxmem.analyze(step, *args, donate_argnums=problem.donate)


@pytest.fixture(scope="module", params=("compiled", "predicted"))
def report(request, both: MemoryReport) -> MemoryReport:
    """The compiler's report, and the simulator's, which comes with it."""
    assert both.source == "compiled"
    found = both if request.param == "compiled" else both.predicted
    assert found is not None
    assert found.source == request.param
    return found


def test_the_peak_is_where_the_timeline_is_highest(report: MemoryReport):
    assert report.peak_bytes == max(report.timeline) == report.timeline[report.peak_index]
    fixed = report.argument_bytes + report.output_bytes - report.aliased_bytes
    assert min(report.timeline) >= fixed
    if report.source == "predicted":
        assert len(report.timeline) <= report.equations
    else:
        assert len(report.timeline) == len(report.operations)
        assert report.peak_bytes == report.compiled_bytes


def test_the_buffers_at_the_peak_explain_it(report: MemoryReport):
    explained = sum(b.nbytes for b in report.at_peak())
    assert explained == report.peak_bytes
    for sums in (report.by_category(), report.by_source(), report.by_module()):
        assert sum(sums.values()) == explained
        assert list(sums.values()) == sorted(sums.values(), reverse=True)


def test_arguments_add_up_and_have_paths(report: MemoryReport):
    counted = [b for b in report.buffers if b.memory == "device"]
    constants = sum(b.nbytes for b in counted if b.category == "constant")
    assert sum(report.by_argument().values()) + constants == report.argument_bytes
    assert all(b.path for b in report.buffers if b.category == "argument")


def test_lifetimes_are_inside_the_schedule(report: MemoryReport):
    assert all(0 <= b.start <= b.end < len(report.timeline) for b in report.buffers)
    assert all(b.nbytes >= 0 for b in report.buffers)
    assert {b.category for b in report.buffers} >= {"argument", "residual"}
    starts = [start for _, start in report.phases]
    assert starts == sorted(starts)
    assert [name for name, _ in report.phases][:2] == ["forward", "backward"]


def test_the_compilers_figure_is_its_own(report: MemoryReport):
    assert report.compiled_bytes > report.compiled_temp_bytes > 0
    assert report.compiled_bytes >= report.argument_bytes


def test_a_report_is_plain_data(report: MemoryReport):
    data = json.loads(report.to_json())
    assert data["peak_bytes"] == report.peak_bytes
    assert len(data["buffers"]) == len(report.buffers)
    assert MemoryReport.from_json(report.to_json()) == report


def test_modules_lines_and_checkpoint_names_are_found():
    def step(w, x):
        def loss(w):
            with jax.named_scope("encoder"):
                y = checkpoint_name(jnp.sin(x @ w), "hidden")
            with jax.named_scope("decoder"):
                return ((y @ w) ** 2).sum()

        return jax.grad(loss)(w)

    report = jaxmem.analyze(step, jnp.eye(64), jnp.ones((4096, 64)))
    assert any(module.startswith("encoder") for module in report.by_module())
    line = step.__code__.co_firstlineno + 3
    assert any(source.startswith(f"test_analysis.py:{line} ") for source in report.by_source())
    assert sum(report.by_checkpoint_name().values()) == report.by_checkpoint_name()["hidden"]
    assert report.by_checkpoint_name()["hidden"] >= 4096 * 64 * 4


def test_a_step_with_many_results_is_counted_once(monkeypatch):
    """Each count goes through all results: one for each of them would be quadratic."""
    counted, real = [], Program.result_bytes.fget
    monkeypatch.setattr(
        Program, "result_bytes", property(lambda self: counted.append(1) or real(self))
    )

    def counts(results: int) -> int:
        counted.clear()
        jaxmem.analyze(lambda x: tuple(x * n for n in range(results)), jnp.ones(8))
        return len(counted)

    assert counts(3) == counts(30) > 0


def test_a_planned_step_reports_the_planned_program():
    step = jax.grad(tanh_chain)
    args = jnp.eye(128), jnp.ones((1024, 128))
    plain = jaxmem.analyze(step, *args)
    fitted = jaxmem.fit(step, budget="4.5MiB", progress=False)
    planned = fitted.report(*args)
    assert planned.peak_bytes < plain.peak_bytes
    assert planned.compiled_bytes == fitted.plan(*args).compiled_bytes
    assert planned.peak_bytes == planned.compiled_bytes
    simulated, before = planned.predicted, plain.predicted
    assert simulated is not None
    assert before is not None
    assert simulated.peak_bytes < before.peak_bytes
    assert len(simulated.timeline) > len(before.timeline), "recomputations are operations too"


@pytest.mark.wide
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_byte_at_the_predicted_peak_has_a_buffer(name: str):
    """Also what lives inside nested loops, branches and checkpointed regions."""
    problem = PROBLEMS[name]
    step, args = problem.make()
    caller = Caller(step, problem.donate)
    with nnx.context((args, {})):
        program = caller.trace(caller.take(args, {})).program
    compiled = SimpleNamespace(memory=SimpleNamespace(total_bytes=0, temp_bytes=0))
    report = predicted_report(program, Target("h200"), program.block, compiled)
    assert sum(b.nbytes for b in report.at_peak()) == report.peak_bytes
