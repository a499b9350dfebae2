"""The values of a traced function: each described, and those that are chosen given a name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend import core as jex

from jaxmem import _compat
from jaxmem.policies.facts import OWN_NAMES, Facts, facts_of
from jaxmem.program.primitives import inner_jaxprs
from jaxmem.program.source import module_path

# A call is a bracket round its operations: these are described, it is not.
_CALLS = frozenset(["jit", "pjit", "closed_call", "eval_jaxpr"])
_OPENED = _CALLS | {"scan", "cond", "shard_map"}


@dataclass
class Values:
    """What a function is made of.

    Attributes:
        facts: one for each value that can be given a name.
        hidden: one for each checkpoint name inside what is kept whole: custom derivatives and
            inner checkpoints.
    """

    facts: list[Facts] = field(default_factory=list)
    hidden: list[Facts] = field(default_factory=list)

    @property
    def all(self) -> list[Facts]:
        """All that a rule can select."""
        return [*self.facts, *self.hidden]

    @property
    def names(self) -> frozenset[str]:
        """The checkpoint names of values that can be given another."""
        return frozenset(name for facts in self.facts for name in facts.names)


def describe(closed: Any) -> Values:
    """The values of a jaxpr, in loops, branches and calls too."""
    _, values = named(closed, lambda _: "")
    return values


def named(closed: Any, choose: Callable[[Facts], str]) -> tuple[Any, Values]:
    """The jaxpr with a checkpoint name on every value that ``choose`` has a name for.

    A value that has a checkpoint name already is one value: the one before it got its name. The
    result of a custom derivative is described by the operation inside that makes it.
    """
    namer = _Namer(choose)
    return namer.jaxpr(closed, None, {}), namer.values


class _Namer:
    def __init__(self, choose: Callable[[Facts], str]):
        self.choose = choose
        self.values = Values()

    def jaxpr(
        self, closed: Any, outer: jex.JaxprEqn | None, given: dict[int, tuple[str, ...]]
    ) -> Any:
        """A jaxpr that ``outer`` calls; ``given`` are names its results get outside."""
        opened = getattr(closed, "jaxpr", closed)
        made = _made(opened)
        names = _names(opened, made)
        for number, outvar in enumerate(opened.outvars):
            if not isinstance(outvar, jex.Literal) and outvar in made:
                names[outvar] = (*names.get(outvar, ()), *given.get(number, ()))
        eqns: list[jex.JaxprEqn] = []
        for eqn in opened.eqns:
            eqns.extend(self.equation(eqn, outer, made, names))
        changed = any(a is not b for a, b in zip(eqns, opened.eqns, strict=False))
        # Calls of one jitted function share its jaxpr, and should go on to.
        return _compat.with_equations(closed, eqns) if changed else closed

    def equation(
        self,
        eqn: jex.JaxprEqn,
        outer: jex.JaxprEqn | None,
        made: set[Any],
        names: dict[Any, tuple[str, ...]],
    ) -> list[jex.JaxprEqn]:
        placed = eqn if outer is None else _compat.under(eqn, outer)
        if eqn.primitive.name in _OPENED:
            return [self.opened(eqn, placed, names)]
        if _compat.checkpoint_name_of(eqn) is not None and eqn.invars[0] in made:
            return [eqn]
        self.values.hidden.extend(_hidden(placed))
        outvars, namings = list(eqn.outvars), []
        for number, var in enumerate(eqn.outvars):
            # A Ref or a token is no value, and its equations know it by its variable.
            if isinstance(var, jex.DropVar) or not _compat.is_array_type(var.aval):
                continue
            facts = _described(placed, number, names.get(var, ()))
            self.values.facts.append(facts)
            name = self.choose(facts)
            if name:
                outvars[number] = jex.Var(var.aval)
                namings.append(_compat.naming(outvars[number], var, name, eqn))
        return [eqn.replace(outvars=outvars), *namings] if namings else [eqn]

    def opened(
        self, eqn: jex.JaxprEqn, placed: jex.JaxprEqn, names: dict[Any, tuple[str, ...]]
    ) -> jex.JaxprEqn:
        """A call, loop or branch with names inside."""
        given = {}
        if eqn.primitive.name in _CALLS:
            given = {n: names[v] for n, v in enumerate(eqn.outvars) if v in names}

        def inner(param: Any) -> Any:
            if isinstance(param, tuple):
                new = tuple(inner(item) for item in param)
                return new if any(a is not b for a, b in zip(new, param, strict=True)) else param
            is_jaxpr = hasattr(getattr(param, "jaxpr", param), "eqns")
            return self.jaxpr(param, placed, given) if is_jaxpr else param

        params = {key: inner(param) for key, param in eqn.params.items()}
        changed = any(params[key] is not eqn.params[key] for key in params)
        return eqn.replace(params=params) if changed else eqn


def _made(jaxpr: Any) -> set[Any]:
    """The variables that an equation of the jaxpr, or of a call in it, makes and describes."""
    made: set[Any] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _CALLS:
            (inner,) = inner_jaxprs(eqn)
            inside = _made(inner)
            pairs = zip(eqn.outvars, inner.outvars, strict=True)
            made.update(v for v, w in pairs if not isinstance(w, jex.Literal) and w in inside)
        elif eqn.primitive.name not in _OPENED:
            made.update(v for v in eqn.outvars if not isinstance(v, jex.DropVar))
    return made


def _names(jaxpr: Any, made: set[Any]) -> dict[Any, tuple[str, ...]]:
    """The checkpoint names of variables; of one that has no maker here, of the named result."""
    names: dict[Any, tuple[str, ...]] = {}
    before: dict[Any, Any] = {}
    for eqn in jaxpr.eqns:
        name = _compat.checkpoint_name_of(eqn)
        if name is None:
            continue
        operand, result = eqn.invars[0], eqn.outvars[0]
        if isinstance(operand, jex.Literal) or operand not in made:
            root = result
        else:
            root = before[result] = before.get(operand, operand)
        names[root] = (*names.get(root, ()), name)
    return names


def _described(eqn: jex.JaxprEqn, number: int, names: Sequence[str]) -> Facts:
    """The facts of a result, seen through what is kept whole to the operation that makes it."""
    inside = inner_jaxprs_of(eqn) if _is_whole_call(eqn) else []
    for jaxpr in inside[:1]:
        var = jaxpr.outvars[number]
        for inner in jaxpr.eqns:
            if not isinstance(var, jex.Literal) and var in inner.outvars:
                return _described(_compat.under(inner, eqn), inner.outvars.index(var), names)
    module = module_path(_compat.name_stack_of(eqn))
    return facts_of(eqn, number, names=names, module=module)


def _is_whole_call(eqn: jex.JaxprEqn) -> bool:
    """Whether the first jaxpr in an equation makes its results, one by one."""
    kept = ("custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2", "call_hi_primitive")
    inside = inner_jaxprs_of(eqn)
    return (
        eqn.primitive.name in (*kept, *_CALLS)
        and len(inside) > 0
        and len(inside[0].outvars) == len(eqn.outvars)
    )


def inner_jaxprs_of(eqn: jex.JaxprEqn) -> list[Any]:
    """The jaxprs in an equation, those of a ``call_hi_primitive`` too."""
    params = _compat.equation_params(eqn)
    return inner_jaxprs(eqn if params is eqn.params else eqn.replace(params=params))


def _hidden(eqn: jex.JaxprEqn) -> Iterator[Facts]:
    for jaxpr in inner_jaxprs_of(eqn):
        yield from names_inside(jaxpr, eqn)


def names_inside(jaxpr: Any, outer: jex.JaxprEqn | None = None) -> Iterator[Facts]:
    """The facts of every checkpoint name in a jaxpr, at any depth."""
    for eqn in jaxpr.eqns:
        placed = eqn if outer is None else _compat.under(eqn, outer)
        name = _compat.checkpoint_name_of(eqn)
        if name is not None and not name.startswith(OWN_NAMES):
            module = module_path(_compat.name_stack_of(placed))
            yield facts_of(eqn, names=(name,), module=module)
        for inner in inner_jaxprs_of(eqn):
            yield from names_inside(inner, placed)
