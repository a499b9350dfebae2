"""The difference of two plans: empty for equal ones, and nothing left out."""

from __future__ import annotations

import dataclasses

import pytest

from jaxmem import policies
from jaxmem.planner.decisions import Kept, Segmented
from jaxmem.planner.plan import Plan
from tests.fitted_steps import DEEP_ARGS
from tests.show.samples import GIB, decision, explained_plan, plan


def test_a_plan_does_not_differ_from_itself(planned_deep):
    found = planned_deep.plan(*DEEP_ARGS)
    for some in (plan(), explained_plan(), found):
        diff = some.diff(Plan.from_json(some.to_json()) if some is found else some)
        assert not diff
        assert (diff.changes, diff.moved, diff.same_program) == ((), (), True)


def test_how_it_was_found_is_no_difference():
    assert not plan().diff(plan(rounds=(), notes=(), larger=None, holders=()))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"budget_bytes": 21 * GIB}, ("budget", "20.0GiB", "21.0GiB")),
        ({"budget_bytes": 20 * GIB + 1}, ("budget", "21474836480", "21474836481")),
        ({"target": "h100"}, ("target", "h200", "h100")),
        ({"solver": "chain DP"}, ("solver", "greedy", "chain DP")),
        ({"predicted_bytes": 17 * GIB}, ("predicted", "18.0GiB", "17.0GiB")),
        ({"compiled_bytes": 18 * GIB}, ("compiled", "19.0GiB", "18.0GiB")),
        ({"host_bytes": GIB}, ("host", "0B", "1.0GiB")),
        ({"predicted_seconds": 0.2}, ("step", "106ms", "200ms")),
        ({"keep_all_seconds": 0.2}, ("step as written", "100ms", "200ms")),
        (
            {"compiled_exposed_seconds": 0.2},
            ("copies not hidden, compiled", "not known", "200ms"),
        ),
        ({"microbatches": 2}, ("microbatches", "1", "2")),
        ({"hosted": ("a", "b")}, ("arguments in host memory", "none", "a, b")),
        ({"options": (("x", "y"),)}, ("compiler options", "none", "x=y")),
        ({"policy": policies.dots.to_json()}, ("policy", "none", "dots")),
        ({"segments": (Segmented("p", 8, (2, 4)),)}, ("segments", "none", "8 in 2 x 4")),
        ({"kept": (Kept("", 1, ("a",)),)}, ("values kept by name", "0", "1 (0 the same)")),
        ({"mesh": (("data", 2), ("model", 4))}, ("mesh", "none", "data=2, model=4")),
        (
            {"split": (("w", "P('data',)"),)},
            ("arguments split otherwise", "w whole", "w P('data',)"),
        ),
        (
            {"pinned": True},
            ("what products give", "split as the compiler has it", "split as batches are"),
        ),
        ({"function": "other"}, ("function", "train_step", "other")),
    ],
)
def test_each_figure_and_setting(changes, named):
    diff = plan().diff(plan(**changes))
    assert [(c.name, c.before, c.after) for c in diff.changes] == [named]
    assert diff
    assert diff.moved == ()


def test_decisions_by_what_became_of_what():
    first = tuple(decision(n, nbytes=(n + 1) * GIB) for n in range(5))
    again = {"action": "recompute", "recomputed": 16}
    second = (
        first[0],
        dataclasses.replace(first[1], **again),
        dataclasses.replace(first[2], action="offload"),
        dataclasses.replace(first[3], **again),
        decision(7, nbytes=9 * GIB),
    )
    diff = plan(decisions=first).diff(plan(decisions=second))
    assert [(m.kind, m.decision.key) for m in diff.moved] == [
        ("new", "g007"),
        ("keep -> recompute", "g003"),
        ("keep -> recompute", "g001"),
        ("missing", "g004"),
        ("keep -> offload", "g002"),
    ]
    back = plan(decisions=second).diff(plan(decisions=first))
    assert {m.kind for m in back.moved} == {
        "missing",
        "recompute -> keep",
        "new",
        "offload -> keep",
    }


def test_fewer_more_and_others():
    def some(*again: int):
        return decision(1, action="recompute", recomputed=len(again), again=again)

    for before, after, kind in (
        (some(0, 1), some(0), "recompute fewer"),
        (some(0), some(0, 1), "recompute more"),
        (some(0), some(1), "recompute others"),
        (some(0), dataclasses.replace(some(0), nbytes=1), "recompute other sizes"),
    ):
        (moved,) = plan(decisions=(before,)).diff(plan(decisions=(after,))).moved
        assert moved.kind == kind


def test_other_programs_are_matched_by_line_module_and_operation():
    """Keys are numbers in one program; the same line of a wider net is the same value."""
    before = plan(decisions=(decision(1), decision(2, source="train.py:50 (f)")))
    after = plan(
        fingerprint="other",
        decisions=(decision(2, shape=(16, 2048, 2048), nbytes=2 * GIB),),
    )
    diff = before.diff(after)
    assert diff
    assert not diff.same_program
    assert [(m.kind, m.nbytes) for m in diff.moved] == [
        ("keep other sizes", 2 * GIB),
        ("missing", GIB),
    ]
    same = plan(decisions=()).diff(plan(decisions=(), fingerprint="other"))
    assert same
    assert (same.changes, same.moved) == ((), ())
