"""The laws every fitted step must keep, judged on one problem, budget and target.

The judge trusts nothing of jaxmem but its public face: keep-all bytes, compiled bytes and results
are JAX's own, read from programs that JAX compiled.
"""

from __future__ import annotations

import functools
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxmem
from jaxmem.runtime.describe import ONLY_FUSED
from jaxmem.runtime.tries import MOST_COMPILES
from jaxmem.targets import compile_for
from tests.problems import PROBLEMS, Problem, assert_same, pure
from tests.problems.compare import relative_error

# Kernels that a compiled program cannot do without: products, convolutions, loops and library
# calls. Element-wise work is fused here and there and says nothing.
_KERNEL = re.compile(r" = [^=]*? (dot|convolution|while|custom-call)\(")
_TAGGED = re.compile(r'op_name="[^"]*jaxmem\.recompute\.')


@dataclass
class Verdict:
    """What became of one problem at one budget on one target.

    Attributes:
        problem: its name; ``target`` and ``share`` of keep-all are what was asked for.
        budget_bytes: the budget; ``keep_all_bytes`` what ``jax.jit`` needs.
        predicted_bytes: what the plan predicts; ``compiled_bytes`` what JAX says of the program.
        smallest_bytes: what the error named where the budget was infeasible, else 0.
        compiles: rounds of the plan; ``seconds`` of planning, compiling and the first run.
        solver: how the plan came about.
        error: largest relative error of a float leaf against the step under ``jax.jit``.
        broken: the laws that were broken, in words; empty for a good verdict.
    """

    problem: str
    target: str
    share: float
    budget_bytes: int = 0
    keep_all_bytes: int = 0
    predicted_bytes: int = 0
    compiled_bytes: int = 0
    smallest_bytes: int = 0
    compiles: int = 0
    seconds: float = 0.0
    solver: str = ""
    error: float = 0.0
    broken: list[str] = field(default_factory=list)

    @property
    def word(self) -> str:
        """``kept``, ``infeasible`` (and the smallest budget works) or ``BROKEN``."""
        if self.broken:
            return "BROKEN"
        return "infeasible" if self.smallest_bytes else "kept"


def judge(name: str, share: float, target: str) -> Verdict:
    """Fit one problem into a share of its keep-all bytes and run it once.

    Args:
        name: key in ``PROBLEMS``.
        share: budget as a share of what ``jax.jit`` needs on the target.
        target: ``"cpu"`` or the name of an absent GPU; the step is run here all the same.
    """
    problem, verdict = PROBLEMS[name], Verdict(name, target, share)
    started = time.perf_counter()
    try:
        verdict.keep_all_bytes, reference = _reference(name, target)
        verdict.budget_bytes = int(share * verdict.keep_all_bytes)
        try:
            _fit(problem, verdict.budget_bytes, target, reference, verdict)
        except jaxmem.BudgetInfeasibleError as error:
            verdict.smallest_bytes = error.smallest_bytes
            if error.smallest_bytes <= verdict.budget_bytes:
                verdict.broken.append("the smallest budget named is not above the one refused")
            _fit(problem, error.smallest_bytes, target, reference, verdict)
    except Exception as error:  # the verdict of a whole table must not end with the first failure
        text = str(error).strip().splitlines() or [""]
        verdict.broken.append(f"{type(error).__name__}: {text[0]}")
        if isinstance(error, AssertionError):
            verdict.broken.extend(line.strip() for line in text[1:6])
    verdict.seconds = time.perf_counter() - started
    return verdict


def _fit(problem: Problem, budget: int, target: str, reference: Any, verdict: Verdict) -> None:
    step, args = problem.make()
    fitted = jaxmem.fit(
        step, budget=budget, target=target, donate_argnums=problem.donate, progress=False
    )
    plan = fitted.plan(*args)
    compiled = fitted.lower(*args).compile()
    verdict.predicted_bytes = plan.predicted_bytes
    verdict.compiled_bytes = total_bytes(compiled)
    verdict.compiles, verdict.solver = len(plan.rounds), plan.solver
    if verdict.compiled_bytes > budget:
        verdict.broken.append(f"{verdict.compiled_bytes} compiled bytes, {budget} allowed")
    if verdict.compiled_bytes != plan.compiled_bytes:
        verdict.broken.append(f"the plan claims {plan.compiled_bytes} compiled bytes")
    if len(plan.rounds) > MOST_COMPILES:
        verdict.broken.append(f"{len(plan.rounds)} compiles")
    verdict.broken.extend(_recomputation(plan, compiled))
    outputs = outcome(problem, fitted, args)
    verdict.error = max(verdict.error, largest_error(reference, outputs))
    assert_same(reference, outputs)


def _recomputation(plan: jaxmem.Plan, compiled: jax.stages.Compiled) -> list[str]:
    """Whether the compiled program contains recomputations exactly where the plan says so."""
    found = bool(_TAGGED.search(compiled.as_text() or ""))
    if plan.recomputed() and not found:
        return ["the plan recomputes and the compiled program does not"]
    if found and not plan.recomputed() and ONLY_FUSED not in plan.notes:
        return ["the compiled program recomputes and the plan does not say so"]
    return []


@functools.lru_cache(maxsize=2)
def _reference(name: str, target: str) -> tuple[int, Any]:
    """Keep-all bytes on the target, and what the step returns under ``jax.jit``."""
    keep_all_bytes, reference = _run_plain(name)
    if target != "cpu":
        function, args, donate = _as_jax_takes_it(PROBLEMS[name])
        keep_all_bytes = compile_for(target, function, args, donate=donate).memory.total_bytes
    return keep_all_bytes, reference


@functools.lru_cache(maxsize=2)
def _run_plain(name: str) -> tuple[int, Any]:
    function, args, donate = _as_jax_takes_it(PROBLEMS[name])
    compiled = jax.jit(function, donate_argnums=donate).lower(*args).compile()
    return total_bytes(compiled), compiled(*args)


def _as_jax_takes_it(problem: Problem) -> tuple[Any, tuple, tuple[int, ...]]:
    """The step as a function that returns what ``outcome`` returns, arguments, and donation."""
    if problem.tags & {"nnx", "equinox"}:
        plain = pure(problem)
        return plain.function, plain.args, plain.donate
    step, args = problem.make()
    return (lambda *args: (step(*args), None)), args, problem.donate


def total_bytes(compiled: jax.stages.Compiled) -> int:
    """Arguments + outputs + temporaries, what donation shares counted once."""
    memory: Any = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return held + memory.temp_size_in_bytes - memory.alias_size_in_bytes


def kernels(compiled: jax.stages.Compiled) -> Counter[str]:
    """How many products, convolutions, loops and library calls a compiled program has."""
    return Counter(_KERNEL.findall(compiled.as_text() or ""))


def outcome(problem: Problem, step: Any, args: tuple) -> tuple[Any, Any]:
    """What a step returned, and the new state of its NNX objects."""
    outputs = step(*args)
    if "nnx" in problem.tags:
        return outputs, nnx.state(args[: len(problem.donate)])
    return eqx.filter(outputs, eqx.is_array) if "equinox" in problem.tags else outputs, None


def largest_error(reference: Any, outputs: Any) -> float:
    """Largest relative error of any float leaf; infinite where the leaves do not correspond."""
    expected, got = jax.tree.leaves(reference), jax.tree.leaves(outputs)
    if len(expected) != len(got):
        return float("inf")
    pairs = [
        (np.asarray(a, np.float64), np.asarray(b, np.float64))
        for a, b in zip(expected, got, strict=True)
        if jnp.issubdtype(a.dtype, jnp.floating)
    ]
    return max((relative_error(a, b) for a, b in pairs if a.shape == b.shape), default=0.0)
