"""Policies: rules and their combinations, as frozen data.

A policy maps every value to an action of the chain recompute < offload < save. ``|`` is the larger
of two actions, ``&`` the smaller, ``~`` turns the chain round. A chain with such a turn is a
De Morgan algebra (Kleene's three-valued logic), so policies are one too, pointwise: all its laws
hold. Those that need no distribution also hold between the objects: ``~`` is pushed to the rules,
``|`` and ``&`` are flat, without repetition and sorted.
"""

from __future__ import annotations

import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxmem import _compat
from jaxmem.errors import PolicyError
from jaxmem.policies import verdict
from jaxmem.policies.facts import DOTS, Action, Facts
from jaxmem.policies.selector import Selector, selector

SCHEMA_VERSION = 1
_VERBS = {Action.SAVE: "save", Action.OFFLOAD: "offload", Action.RECOMPUTE: "recompute"}
_ACTIONS = {verb: action for action, verb in _VERBS.items()}


@dataclass(frozen=True)
class Policy(_compat.CheckpointPolicy, ABC):
    """What to save, offload and recompute; made by the functions of ``jaxmem.policies``.

    A policy is hashable, its ``repr`` is the code that makes it, and it is a policy for
    ``jax.checkpoint(policy=...)``, ``nn.remat``, ``nnx.remat`` and ``nn.remat_scan`` too. Those do
    not know module paths; :func:`jaxmem.remat` does.
    """

    @property
    def _binding(self) -> int:
        """How tightly the written form holds together: `|`, `&`, `~`, then names and calls."""
        return 3

    @abstractmethod
    def decide(self, facts: Facts) -> Action | None:
        """The action for a value; ``None`` where ``policies.planned`` leaves it to the planner."""

    def rules(self) -> Iterator[Rule]:
        """The rules in it."""
        yield from ()

    @abstractmethod
    def bound(self, may_select: Callable[[Selector], bool]) -> Action:
        """The largest action there can be for values that only some of the rules may select."""

    @property
    def uses_planner(self) -> bool:
        """Whether ``policies.planned`` is its base, so that only ``fit`` can use it."""
        return False

    @functools.cached_property
    def has_modules(self) -> bool:
        """Whether a rule of it selects by module path."""
        return any(rule.selector.module for rule in self.rules())

    @functools.cached_property
    def needs_results(self) -> bool:
        """Whether it asks for more of a value than names and the operation."""
        return any(rule.selector.needs_results for rule in self.rules())

    @functools.cached_property
    def offloads(self) -> bool:
        """Whether a rule of it offloads."""
        return any(rule.action == Action.OFFLOAD for rule in self.rules())

    def override(self, *rules: Policy) -> Policy:
        """Returns this policy with exceptions.

        Where a rule selects a value, its action decides, of several the last one's. Elsewhere this
        policy does.

        Args:
            rules: what :func:`save`, :func:`recompute` and :func:`offload` return.

        Raises:
            PolicyError: no rule, something that is not a single rule, or two that select exactly
                the same values for different actions.

        >>> from jaxmem import policies
        >>> policies.dots.override(policies.recompute("logits"), policies.offload("layer_in"))
        dots.override(recompute('logits'), offload('layer_in'))
        """
        if not rules:
            raise PolicyError(
                "override() has no rules: give it save(...), offload(...) or the like."
            )
        added: dict[Selector, Rule] = {}
        for rule in rules:
            if not isinstance(rule, Rule):
                raise PolicyError(
                    f"override({rule!r}): only a single save(...), recompute(...) or offload(...) "
                    "can override, because it must say where it holds."
                )
            plain = single_rule(rule.action, rule.selector)
            before = added.setdefault(rule.selector, plain)
            if before != plain:
                raise PolicyError(
                    f"override({before}, {plain}) contradicts itself: both select the same values. "
                    "Keep one of them."
                )
        return self._overridden(tuple(added.values()))

    def _overridden(self, rules: tuple[Rule, ...]) -> Policy:
        return Override(self, rules)

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> Any:
        """What ``jax.checkpoint`` asks: the verdict on the results of one operation."""
        return verdict.on_operation(self, prim, avals, params)

    def on_name(self, name: str) -> Any:
        """What ``jax.checkpoint`` of jax 0.10 and 0.11 asks with ``jax_remat3``."""
        return verdict.on_name(self, name)

    def __or__(self, other: Any) -> Policy:
        return _combined(Join, (self, _policy(other, "|")))

    def __and__(self, other: Any) -> Policy:
        return _combined(Meet, (self, _policy(other, "&")))

    def __ror__(self, other: Any) -> Policy:
        return _policy(other, "|")

    def __rand__(self, other: Any) -> Policy:
        return _policy(other, "&")

    @abstractmethod
    def __invert__(self) -> Policy:
        """The policy with the chain of actions turned round."""

    def __repr__(self) -> str:
        return _CONSTANTS.get(self) or self._written()

    @abstractmethod
    def _written(self) -> str:
        """The code that makes it, where it has no name."""

    def _inside(self, binding: int) -> str:
        """The written form, in brackets where what is around it holds together more tightly."""
        name = _CONSTANTS.get(self)
        own = self._binding if name is None else 2 if name.startswith("~") else 3
        return repr(self) if own >= binding else f"({self!r})"

    def to_json(self) -> str:
        """The policy as JSON text; :meth:`from_json` reads it."""
        return json.dumps({"schema_version": SCHEMA_VERSION, "policy": self._data()}, indent=2)

    @abstractmethod
    def _data(self) -> dict[str, Any]:
        """It as JSON has it; :func:`_read` reads that."""

    @staticmethod
    def from_json(text: str) -> Policy:
        """The policy of :meth:`to_json` text.

        Raises:
            PolicyError: not a policy, or of another schema version.

        >>> from jaxmem import policies
        >>> policies.Policy.from_json(policies.save("attn*").to_json())
        save('attn*')
        """
        try:
            data = json.loads(text)
        except (TypeError, ValueError) as error:
            raise PolicyError(f"not a jaxmem policy: {error}") from error
        version = data.get("schema_version") if isinstance(data, dict) else None
        if version != SCHEMA_VERSION:
            raise PolicyError(
                f"policy has schema version {version!r}, this jaxmem reads {SCHEMA_VERSION}."
            )
        return _read(data.get("policy"))


@dataclass(frozen=True, repr=False)
class Constant(Policy):
    """The same action for every value."""

    action: Action

    def decide(self, facts: Facts) -> Action:
        return self.action

    def bound(self, may_select: Callable[[Selector], bool]) -> Action:
        return self.action

    def __invert__(self) -> Policy:
        return Constant(~self.action)

    def _written(self) -> str:
        return "everything" if self.action == Action.SAVE else "nothing"

    def _data(self) -> dict[str, Any]:
        return {"everything": _VERBS[self.action]}


@dataclass(frozen=True, repr=False)
class Rule(Policy):
    """One action for what is selected and another, save or recompute, for the rest."""

    action: Action
    selector: Selector
    otherwise: Action

    @property
    def _binding(self) -> int:
        return 3 if self == single_rule(self.action, self.selector) else 2

    def decide(self, facts: Facts) -> Action:
        return self.action if self.selector.matches(facts) else self.otherwise

    def bound(self, may_select: Callable[[Selector], bool]) -> Action:
        selected = self.action if may_select(self.selector) else self.otherwise
        return max(selected, self.otherwise)

    def rules(self) -> Iterator[Rule]:
        yield self

    def __invert__(self) -> Policy:
        return Rule(~self.action, self.selector, ~self.otherwise)

    def _written(self) -> str:
        if self._binding == 2:
            return f"~{(~self)!r}"
        return f"{_VERBS[self.action]}({self.selector.arguments()})"

    def _data(self) -> dict[str, Any]:
        return {_VERBS[self.action]: self.selector.given(), "otherwise": _VERBS[self.otherwise]}


@dataclass(frozen=True, repr=False)
class _Combined(Policy):
    parts: tuple[Policy, ...]

    _pick: ClassVar[Callable[..., Any]]
    _key: ClassVar[str]
    _sign: ClassVar[str]
    _ties: ClassVar[int]

    @property
    def _binding(self) -> int:
        return self._ties

    def decide(self, facts: Facts) -> Action:
        return type(self)._pick(part.decide(facts) for part in self.parts)

    def bound(self, may_select: Callable[[Selector], bool]) -> Action:
        return type(self)._pick(part.bound(may_select) for part in self.parts)

    def rules(self) -> Iterator[Rule]:
        for part in self.parts:
            yield from part.rules()

    def __invert__(self) -> Policy:
        turned = Meet if isinstance(self, Join) else Join
        return _combined(turned, [~part for part in self.parts])

    def _written(self) -> str:
        return f" {self._sign} ".join(part._inside(self._binding + 1) for part in self.parts)

    def _data(self) -> dict[str, Any]:
        return {self._key: [part._data() for part in self.parts]}


@dataclass(frozen=True, repr=False)
class Join(_Combined):
    """The largest action of several policies."""

    _ties: ClassVar[int] = 0
    _pick: ClassVar[Callable[..., Any]] = max
    _key: ClassVar[str] = "any"
    _sign: ClassVar[str] = "|"


@dataclass(frozen=True, repr=False)
class Meet(_Combined):
    """The smallest action of several policies."""

    _ties: ClassVar[int] = 1
    _pick: ClassVar[Callable[..., Any]] = min
    _key: ClassVar[str] = "all"
    _sign: ClassVar[str] = "&"


@dataclass(frozen=True, repr=False)
class Override(Policy):
    """A policy with exceptions; the last rule that selects a value decides."""

    base: Policy
    exceptions: tuple[Rule, ...]

    def decide(self, facts: Facts) -> Action | None:
        for rule in reversed(self.exceptions):
            if rule.selector.matches(facts):
                return rule.action
        return self.base.decide(facts)

    def bound(self, may_select: Callable[[Selector], bool]) -> Action:
        possible = [rule.action for rule in self.exceptions if may_select(rule.selector)]
        return max(self.base.bound(may_select), *possible, Action.RECOMPUTE)

    def rules(self) -> Iterator[Rule]:
        yield from self.base.rules()
        yield from self.exceptions

    @property
    def uses_planner(self) -> bool:
        return self.base.uses_planner

    def _overridden(self, rules: tuple[Rule, ...]) -> Policy:
        # What a later rule selects too, exactly, an earlier one no longer decides.
        later = {rule.selector for rule in rules}
        kept = tuple(rule for rule in self.exceptions if rule.selector not in later)
        return Override(self.base, (*kept, *rules))

    def __invert__(self) -> Policy:
        if self.uses_planner:
            raise _only_planned("~")
        turned = tuple(single_rule(~rule.action, rule.selector) for rule in self.exceptions)
        return Override(~self.base, turned)

    def _written(self) -> str:
        inside = ", ".join(map(repr, self.exceptions))
        return f"{self.base._inside(3)}.override({inside})"

    def _data(self) -> dict[str, Any]:
        return {"base": self.base._data(), "override": [rule._data() for rule in self.exceptions]}


@dataclass(frozen=True, repr=False)
class Planned(Policy):
    """Leaves every value to the planner."""

    def decide(self, facts: Facts) -> None:
        return None

    @property
    def uses_planner(self) -> bool:
        return True

    def __invert__(self) -> Policy:
        raise _only_planned("~")

    def bound(self, may_select: Callable[[Selector], bool]) -> Action:
        return Action.SAVE

    def _written(self) -> str:
        return "planned"

    def _data(self) -> dict[str, Any]:
        return {"planned": True}


def single_rule(action: Action, chosen: Selector) -> Rule:
    """The rule as it is written: what is not selected is recomputed, or saved if that is."""
    return Rule(action, chosen, Action.SAVE if action == Action.RECOMPUTE else Action.RECOMPUTE)


nothing = Constant(Action.RECOMPUTE)
everything = Constant(Action.SAVE)
planned = Planned()
dots = single_rule(Action.SAVE, Selector(primitive=DOTS))
dots_with_no_batch_dims = single_rule(
    Action.SAVE, Selector(primitive=("dot_general", "scaled_matmul_wrapper"), batch_dims=0)
)
_CONSTANTS: dict[Policy, str] = {
    dots: "dots",
    ~dots: "~dots",
    dots_with_no_batch_dims: "dots_with_no_batch_dims",
    ~dots_with_no_batch_dims: "~dots_with_no_batch_dims",
}


def _policy(given: Any, sign: str) -> Policy:
    if isinstance(given, Policy):
        return given
    raise PolicyError(
        f"{given!r} is not a policy of jaxmem, so {sign} cannot combine it. Of JAX's own there are "
        "policies.dots, dots_with_no_batch_dims, nothing and everything; for names there is "
        "policies.save(...)."
    )


def _only_planned(sign: str) -> PolicyError:
    return PolicyError(
        f"policies.planned cannot be combined with {sign}: it only says that the planner decides. "
        "Use policies.planned.override(...)."
    )


def _combined(kind: type[_Combined], given: Sequence[Policy]) -> Policy:
    neutral, absorbing = (nothing, everything) if kind is Join else (everything, nothing)
    parts: set[Policy] = set()
    for policy in given:
        if policy.uses_planner:
            raise _only_planned(kind._sign)
        parts.update(policy.parts if isinstance(policy, kind) else (policy,))
    if absorbing in parts:
        return absorbing
    parts.discard(neutral)
    if len(parts) < 2:
        return parts.pop() if parts else neutral
    return kind(tuple(sorted(parts, key=repr)))


def _read(data: Any) -> Policy:
    if not isinstance(data, Mapping):
        raise PolicyError(f"policy is damaged: {data!r} is not a part of one.")
    keys = set(data)
    if keys == {"planned"}:
        return planned
    if keys == {"everything"} and data["everything"] in ("save", "recompute"):
        return Constant(_ACTIONS[data["everything"]])
    for key, kind in (("any", Join), ("all", Meet)):
        if keys == {key} and isinstance(data[key], list) and data[key]:
            return _combined(kind, [_read(part) for part in data[key]])
    if keys == {"base", "override"} and isinstance(data["override"], list):
        return _read(data["base"]).override(*map(_read, data["override"]))
    verbs = keys & set(_ACTIONS)
    if len(verbs) == 1 and keys == verbs | {"otherwise"}:
        return _read_rule(verbs.pop(), data)
    raise PolicyError(f"policy is damaged: {dict(data)!r} is not a part of one.")


def _read_rule(verb: str, data: Mapping[str, Any]) -> Policy:
    given, action = data[verb], _ACTIONS[verb]
    if not isinstance(given, Mapping):
        raise PolicyError(f"policy is damaged: {given!r} does not select values.")
    names = given.get("names", ())
    fields = {k: v for k, v in given.items() if k != "names"}
    rule = single_rule(action, selector(names, fields, verb))
    if action == Action.OFFLOAD and data["otherwise"] == "save":
        return ~rule
    if data["otherwise"] != _VERBS[rule.otherwise]:
        raise PolicyError(f"policy is damaged: {verb} otherwise {data['otherwise']!r}.")
    return rule
