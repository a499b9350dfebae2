"""Every fitted step computes the same, inside its budget, with its recomputations in the program.

One problem of each kind at half of keep-all on the CPU, and some at 35% on an absent H200. Those
marked wide take longest: `make test-spread`, which .ci/run uses on its second Python, leaves them
out. The other problems are in `make test-slow`. LLVM optimises the code of a few as for users. The
whole cross product of problems, budgets and targets is `python benchmarks/acceptance.py`.
"""

from __future__ import annotations

import jax
import pytest

import jaxmem
from tests.fitted_steps import optimising_less
from tests.laws import Verdict, judge
from tests.problems import PROBLEMS, assert_same
from tests.problems.rules import DEPTH, LOG

pytestmark = pytest.mark.default_code

# One problem for each way a program can be written: every case compiles about six programs. Not
# "adversarial", of two gradients in one step: it is searched for two minutes.
ON_CPU = (
    *("transformer_scan", "transformer_unrolled", "transformer_scan_reverse"),
    *("transformer_dropout_unrolled", "transformer_scan_checkpoint"),
    *("conv_linen", "unet_nnx", "lstm_nested", "scan_many_carries", "experts"),
    *("data_parallel", "custom_vjp", "mixed_leaves", "accumulation"),
    *("branches", "map", "graph", "whitening", "transformer_nnx_scan"),
    *("mlp_equinox_callables", "per_example", "effects"),
)
AS_USERS_RUN_IT = ("transformer_scan", "conv_linen", "custom_vjp")
# Not "effects": JAX itself cannot compile a callback for a GPU that is not there, so there is no
# reference; jaxmem leaves callbacks out of such programs (tests/rewrite/test_standin.py).
ON_H200 = ("transformer_scan", "mixed_leaves")
# Left to one Python; what they have in particular, others of ON_CPU have in part.
WIDE = (
    *("transformer_dropout_unrolled", "transformer_scan_reverse", "transformer_scan_checkpoint"),
    *("unet_nnx", "branches", "map", "lstm_nested", "graph"),
    *("transformer_nnx_scan", "effects"),
)
WIDE_ON_H200 = ("mixed_leaves",)
# Their activations are inside a shard_map with collectives, which is never recomputed.
OPAQUE = ("experts", "data_parallel")
SLOW_ON_H200 = (
    *("transformer_unrolled", "transformer_dropout_unrolled", "unet_nnx", "experts"),
    *("lstm", "custom_vjp"),
)


def marked(names, chosen, wide):
    """Those not chosen are slow; of those chosen, some are wide."""
    assert set(wide) < set(chosen) <= set(names)
    marks = {n: [pytest.mark.wide] if n in wide else [] for n in chosen}
    return [pytest.param(n, marks=marks.get(n, [pytest.mark.slow])) for n in names]


def check(verdict: Verdict) -> None:
    assert not verdict.broken, "\n".join(verdict.broken)
    if verdict.problem in OPAQUE:
        assert verdict.compiled_bytes <= verdict.keep_all_bytes
    else:
        assert verdict.compiled_bytes < verdict.keep_all_bytes


@pytest.mark.parametrize("name", marked(PROBLEMS, ON_CPU, WIDE))
def test_half_of_keep_all_on_the_cpu(name: str):
    with optimising_less(name not in AS_USERS_RUN_IT):
        check(judge(name, 0.5, "cpu"))


@pytest.mark.parametrize("name", marked((*ON_H200, *SLOW_ON_H200), ON_H200, WIDE_ON_H200))
def test_a_third_of_keep_all_on_an_absent_h200(name: str):
    check(judge(name, 0.35, "h200"))


def test_effects_happen_once_and_in_order_when_values_are_recomputed():
    step, args = PROBLEMS["effects"].make()
    fitted = jaxmem.fit(step, budget="16MiB", progress=False)
    assert fitted.plan(*args).recomputed()
    LOG.clear()
    outputs = fitted(*args)
    jax.effects_barrier()
    found = list(LOG)
    LOG.clear()
    reference = jax.jit(step)(*args)
    jax.effects_barrier()
    # JAX orders debug callbacks among themselves, and io_callbacks among themselves.
    for kinds in (("hidden", "loss"), ("scale", "update")):
        expected, got = ([(n, v) for n, v in log if n in kinds] for log in (LOG, found))
        assert [name for name, _ in got] == [name for name, _ in expected]
        assert [value for _, value in got] == pytest.approx([v for _, v in expected], rel=1e-5)
    assert len(found) == DEPTH + 3
    assert_same(reference, outputs)


def test_a_broken_law_is_found(monkeypatch):
    """The judge is not taken in by a plan that fits only in its own words."""
    step, args = PROBLEMS["mlp"].make()
    wide = jaxmem.fit(step, budget="40MiB", donate_argnums=(0, 1), progress=False)
    real = wide.plan(*args).compiled_bytes

    monkeypatch.setattr(jaxmem, "fit", lambda fun, **options: wide)
    verdict = judge("mlp", 0.5, "cpu")
    assert f"{real} compiled bytes, {verdict.budget_bytes} allowed" in verdict.broken
    assert verdict.word == "BROKEN"
