"""The simple answers: blocks recomputed whole, and what JAX's own policies save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxmem.planner.candidates import TurnChoices, stock_keeps
from jaxmem.planner.fill import KeptSets

BLOCKS = "recompute per block"
WHY = "a simple answer"
_WHY_POLICY = "the policy decides about every value"
_STRIDES = (1, 2, 3, 4, 6, 8, 12, 16)


def base_keeps(
    choices: Sequence[TurnChoices], *, total: bool
) -> Iterator[tuple[str, KeptSets, str]]:
    """The kept sets of all, with names and why; nothing where a policy decides in ``total``."""
    if total and choices:
        yield "policy", {c.turn: frozenset() for c in choices}, _WHY_POLICY
        return
    for name, keep in _simple_keeps(choices):
        yield name, keep, WHY


def _simple_keeps(choices: Sequence[TurnChoices]) -> Iterator[tuple[str, KeptSets]]:
    """The kept set of each, with its name: every so many valleys, then the stock policies."""
    if not choices:
        return
    longest = max(len(c.valleys) for c in choices)
    for stride in [s for s in _STRIDES if s == 1 or s <= longest] + [longest + 1]:
        for loops in (True, False):
            for tail in (True, False):
                yield BLOCKS, {c.turn: valley_keep(c, stride, loops, tail) for c in choices}
    yield from stock_keeps(choices)


def valley_keep(choice: TurnChoices, stride: int, loops: bool, tail: bool) -> frozenset[str]:
    """What is live in every ``stride``-th valley, and trifles.

    With ``loops`` whole loops are kept too. With ``tail`` so is what is made after the last of
    these valleys: the backward pass starts there and would make it again at once.
    """
    chosen = range(stride - 1, len(choice.valleys), stride)
    names: set[str] = set().union(*(choice.valleys[v] for v in chosen))
    if tail and chosen:
        names |= choice.tails[chosen[-1]]
    return frozenset((names | choice.loops if loops else names - choice.loops) | choice.trifles)
