"""What a policy decides about a program: names to keep, to make again and to offload at each turn.

A total policy decides about every value that is made before a turn, so one kept set is left. With
``policies.planned.override(...)`` the rules are constraints, and everything else is searched.

A value and the views of it (reshapes, transposes, checkpoint names) are one buffer and get one
decision, by the operation that makes the buffer and the names of all of them. A value that XLA
computes inside the kernels that read it has no bytes of its own. It is kept when a rule names it,
or when what it is made of is not kept; otherwise it is made again in those kernels at no cost.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jaxmem.errors import PolicyError
from jaxmem.planner.candidates import Candidate, TurnChoices
from jaxmem.planner.facts import kept_name
from jaxmem.planner.fill import KeptSets, Members
from jaxmem.planner.schedule import Keep, StillKept, Turn
from jaxmem.planner.values import Line, Part, forward_lines
from jaxmem.policies import Action, Policy
from jaxmem.policies.algebra import Rule
from jaxmem.policies.checks import require_matches
from jaxmem.policies.facts import Facts
from jaxmem.program.fusion import Fusion
from jaxmem.program.ir import Block, Value
from jaxmem.program.loops import Nest
from jaxmem.program.primitives import may_repeat

_KEPT = (Action.SAVE, Action.OFFLOAD)


@dataclass(frozen=True)
class Offloaded:
    """What one rule offloads.

    Attributes:
        rule: the rule.
        labels: how messages call the values.
        keys: the values.
    """

    rule: Rule
    labels: tuple[str, ...]
    keys: frozenset[str]


@dataclass(frozen=True)
class Ruled:
    """The decisions of a policy; without one it decides nothing.

    Attributes:
        policy: the policy.
        keep: for each turn the names that are kept.
        drop: for each turn the names that are made again.
        offload: for each turn those of the kept names that cross it in host memory.
        extra: kept values that are no candidates of the search, at their turns.
        whole: pairs of scans that keep something from iteration to iteration, so that they cannot
            run in segments.
        offloads: what each rule that offloads selects.
        idle: the rules that save by name what no backward pass needs.
        allows_written: whether the program as written does what the policy says.
    """

    policy: Policy | None = None
    keep: Keep = field(default_factory=dict)
    drop: Keep = field(default_factory=dict)
    offload: Keep = field(default_factory=dict)
    extra: tuple[tuple[Turn, Candidate], ...] = ()
    whole: frozenset[str] = frozenset()
    offloads: tuple[Offloaded, ...] = ()
    idle: tuple[Rule, ...] = ()
    allows_written: bool = True

    @property
    def total(self) -> bool:
        """Whether the policy leaves nothing to the planner."""
        return self.policy is not None and not self.policy.uses_planner

    @property
    def on_paper(self) -> bool:
        """Whether a line of kernels tells what a kept set needs: it has no transfers."""
        return not (self.total or self.offload or self.extra)

    def solver(self, planner: str) -> str:
        """How a plan says who made it, where the planner alone would say ``planner``."""
        if self.policy is None or not (self.total or any(self.policy.rules())):
            return planner
        said = f"policy: {self.policy!r}"
        return said if self.total else f"{planner}, {said}"

    def applied(self, keep: KeptSets) -> KeptSets:
        """Kept sets as far as the policy allows them."""
        if self.policy is None:
            return keep
        return {turn: self._applied(turn, kept) for turn, kept in keep.items()}

    def _applied(self, turn: Turn, kept: frozenset[str]) -> frozenset[str]:
        if isinstance(kept, StillKept):
            # What is made again for the first time is not what crosses the turn.
            here = [names for (path, _), names in self.keep.items() if path == turn[0]]
            return StillKept(kept.union(*here))
        if self.total:
            return self.keep.get(turn, frozenset())
        return (kept | self.keep.get(turn, frozenset())) - self.drop.get(turn, frozenset())

    def offloaded(self, offload: Keep) -> Keep:
        """What crosses each turn in host memory, with what the policy adds."""
        turns = dict.fromkeys([*offload, *self.offload])
        nothing: frozenset[str] = frozenset()
        return {t: offload.get(t, nothing) | self.offload.get(t, nothing) for t in turns}

    def movable(self, offload: Keep) -> Keep:
        """What may be offloaded of what a solver would: not what the policy decides about."""
        nothing: frozenset[str] = frozenset()
        decided = {t: self.keep.get(t, nothing) | self.drop.get(t, nothing) for t in offload}
        return {turn: names - decided[turn] for turn, names in offload.items()}

    def free(self, groups: Mapping[str, Members]) -> dict[str, Members]:
        """The groups of values that the policy leaves to the planner."""
        if self.policy is None:
            return dict(groups)
        left = {
            name: [(turn, c) for turn, c in members if not self._decides(turn, c.name)]
            for name, members in groups.items()
        }
        return {name: members for name, members in left.items() if members}

    def _decides(self, turn: Turn, name: str) -> bool:
        decided = (*self.keep.get(turn, ()), *self.drop.get(turn, ()))
        return self.total or name in decided

    def may_segment(self, path: str) -> bool:
        """Whether a pair of scans may run in segments."""
        return not self.total and path not in self.whole


def unread(ruled: Ruled, written: Block) -> Offloaded | None:
    """The first rule of which a schedule sends nothing to the host; ``None`` if there is none."""
    sent = set(sent_keys(written))
    return next((o for o in ruled.offloads if sent.isdisjoint(o.keys)), None)


def sent_keys(block: Block) -> Iterable[str]:
    """The keys of the values that a schedule sends to the host, in its loops too."""
    for op in block.ops:
        if op.transfer == "send":
            yield str(op.outputs[0].key).removesuffix(".host")
        if op.loop is not None:
            yield from sent_keys(op.loop.body)


def ruled_by(
    policy: Policy | None, nest: Nest, choices: Sequence[TurnChoices], what: str, *, host: bool
) -> Ruled:
    """What a policy decides about a program.

    Args:
        policy: the policy; ``None`` decides nothing.
        nest: the program.
        choices: its turns.
        what: name of the step, for messages.
        host: whether it is compiled for a CPU, which cannot offload.

    Raises:
        PolicyError: a rule selects nothing, or asks for what cannot be done there.
    """
    if policy is None:
        return Ruled()
    if policy.offloads and host:
        raise PolicyError(
            f"{policy!r} offloads, and {what} is fitted for a CPU, whose device memory is host "
            'memory. Plan for a GPU, such as target="h200", or save instead of offloading.'
        )
    lines = forward_lines(nest, {choice.turn for choice in choices})
    parts = [part for line in lines if line.turn for part in line.parts]
    _check_selects(policy, parts, lines, what)
    _check_repeatable(policy, parts, what)
    known = {choice.turn: {c.name for c in choice.candidates} for choice in choices}
    decided = [_Decided(policy, line, known[line.turn]) for line in lines if line.turn]
    keep = {d.turn: frozenset(d.keep) for d in decided}
    whole = {line.pair for d in decided if d.keep for line in (d.line, *d.line.within)}
    if policy.uses_planner:
        # A loop that keeps something must not be run again as a whole.
        for d in decided:
            for loop_turn, name in d.line.loops if d.keep else ():
                keep[loop_turn] = keep.get(loop_turn, frozenset()) | {name}
    actions = [d.actions[part] for d in decided for part in d.line.parts]
    return Ruled(
        policy,
        {turn: names for turn, names in keep.items() if names or not policy.uses_planner},
        {d.turn: frozenset(d.drop) for d in decided if d.drop},
        {d.turn: frozenset(d.offload) for d in decided if d.offload},
        tuple((d.turn, candidate) for d in decided for candidate in d.extra()),
        frozenset(whole) - {""},
        tuple(_offloads(policy, decided)),
        tuple(_idle(policy, decided)),
        all(action in (None, Action.SAVE) for action in actions),
    )


class _Decided:
    """The decisions at one turn."""

    def __init__(self, policy: Policy, line: Line, known: set[str]):
        assert line.turn is not None
        self.policy, self.line, self.turn = policy, line, line.turn
        self.actions = {part: policy.decide(part.facts) for part in line.parts}
        self.keep: set[str] = set(line.always if not policy.uses_planner else ())
        self.drop: set[str] = set()
        self.offload: set[str] = set()
        self.added: dict[Part, list[tuple[str, Value]]] = {}
        self.moved: dict[Part, frozenset[str]] = {}
        stay = {part.value for part, action in self.actions.items() if action in _KEPT}
        for part, action in self.actions.items():
            if action == Action.RECOMPUTE:
                self.drop.update(part.names)
            elif action in _KEPT and not self._comes_free(part, stay):
                self._stays(part, action == Action.OFFLOAD, known)
        # A loop has one name for all its results.
        self.drop -= self.keep

    def _comes_free(self, part: Part, stay: set[Value]) -> bool:
        """Whether the value has no bytes and all it is made of stays, and no rule names it."""
        fusion: Fusion = self.line.fusion
        if part.given or fusion.is_buffer(part.value) or _is_named(self.policy, part.facts):
            return False
        return all(root in stay or root in self.line.fixed for root in fusion.roots[part.value])

    def _stays(self, part: Part, away: bool, known: set[str]) -> None:
        values = part.to_send(self.line) if away else part.to_keep(self.line)
        names = [part.name_of(value) for value in values]
        self.keep.update(names)
        if away:
            # What is read of it is made of what comes back.
            self.drop.update(set(part.names) - set(names))
            self.offload.update(names)
            self.moved[part] = frozenset(str(value.key) for value in values)
        found = [(name, value) for name, value in zip(names, values, strict=True)]
        self.added[part] = [(name, value) for name, value in found if name not in known]

    @functools.cached_property
    def needed(self) -> frozenset[Value]:
        """What is read after the turn, by what is made again there too."""
        found: set[Value] = set()
        stack = list(self.line.late)
        makers = {v: op for op in self.line.early for v in op.outputs}
        while stack:
            value = stack.pop()
            if value in found:
                continue
            found.add(value)
            op = makers.get(value)
            if op is not None and may_repeat(op) and kept_name(op, value) not in self.keep:
                stack.extend(op.values)
        return frozenset(found)

    def is_needed(self, part: Part) -> bool:
        """Whether the backward pass would miss the value."""
        return any(v in self.needed for v in (part.value, *(view for _, view in part.views)))

    def extra(self) -> Iterator[Candidate]:
        """Values that are kept and are no candidates of the search."""
        for part, added in self.added.items():
            if self.is_needed(part):
                for name, value in added:
                    yield self.line.candidate(part, name, value)


def _repeatable(part: Part) -> bool:
    return part.made_by is not None and not part.given and may_repeat(part.made_by)


def _is_named(policy: Policy, facts: Facts) -> bool:
    """Whether a rule selects a value by its checkpoint name."""
    return any(rule.selector.names and rule.selector.matches(facts) for rule in policy.rules())


def _offloads(policy: Policy, decided: Sequence[_Decided]) -> Iterable[Offloaded]:
    for rule in policy.rules():
        if rule.action != Action.OFFLOAD:
            continue
        chosen = [
            (part.facts.label, d.moved.get(part, frozenset()))
            for d in decided
            for part, action in d.actions.items()
            if action == Action.OFFLOAD and rule.selector.matches(part.facts)
        ]
        keys = frozenset[str]().union(*(keys for _, keys in chosen))
        yield Offloaded(rule, tuple(dict.fromkeys(label for label, _ in chosen)), keys)


def _idle(policy: Policy, decided: Sequence[_Decided]) -> Iterable[Rule]:
    for rule in policy.rules():
        if rule.action == Action.SAVE and rule.selector.names:
            chosen = [
                d.is_needed(part)
                for d in decided
                for part, action in d.actions.items()
                if action == Action.SAVE and rule.selector.matches(part.facts)
            ]
            if chosen and not any(chosen):
                yield rule


def _check_selects(policy: Policy, parts: Sequence[Part], lines: Sequence[Line], what: str) -> None:
    """Check that every rule that names values names some that can be decided."""
    decidable = [part.facts for part in parts]
    elsewhere = [part.facts for line in lines if not line.turn for part in line.parts]
    hidden = [facts for line in lines for facts in line.hidden]
    require_matches(policy, [*decidable, *elsewhere, *hidden], what)
    for rule in policy.rules():
        chosen = rule.selector
        if not (chosen.names or chosen.module) or any(map(chosen.is_named, decidable)):
            continue
        inside = next(filter(chosen.is_named, hidden), None)
        if inside is not None:
            raise PolicyError(
                f"{rule!r} selects {inside.label} of {what}, which is inside an operation that is "
                "planned whole, such as jax.checkpoint or shard_map. Leave that out, or let the "
                "policy name what goes into it and comes out of it."
            )
        other = next(filter(chosen.is_named, elsewhere))
        raise PolicyError(
            f"{rule!r} selects {other.label} of {what}, and no backward pass that could be planned "
            "follows it: there is nothing to decide."
        )


def _check_repeatable(policy: Policy, parts: Sequence[Part], what: str) -> None:
    """Check that what a rule wants made again by name can be."""
    for rule in policy.rules():
        if rule.action != Action.RECOMPUTE or not rule.selector.names:
            continue
        chosen = [p for p in parts if rule.selector.matches(p.facts)]
        chosen = [p for p in chosen if policy.decide(p.facts) == Action.RECOMPUTE]
        if chosen and not any(_repeatable(p) for p in chosen):
            first = chosen[0]
            why = (
                "it is an argument, or what a loop is given, carries or returns"
                if first.given
                else f"{first.facts.primitive} may run only once"
            )
            raise PolicyError(
                f"{rule!r}: {first.facts.label} of {what} cannot be computed again: {why}. Save or "
                "offload it, or leave the rule out."
            )
