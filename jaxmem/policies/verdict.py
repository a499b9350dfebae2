"""What ``jax.checkpoint`` asks a policy, and the answer in its own terms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.ad_checkpoint import Offloadable

from jaxmem import _compat
from jaxmem.errors import PolicyError
from jaxmem.policies.facts import (
    DOTS,
    OWN_NAMES,
    Action,
    Facts,
    Operand,
    Operation,
    batch_dims_of,
    facts_of,
)
from jaxmem.policies.selector import Selector

if TYPE_CHECKING:
    from jaxmem.policies.algebra import Policy


def on_operation(
    policy: Policy, prim: Any, avals: Sequence[Any], params: dict[str, Any]
) -> bool | Offloadable:
    """The verdict on the results of one operation: the largest action of any of them.

    Raises:
        PolicyError: the policy needs what JAX does not tell, or JAX would not follow it.
    """
    if prim.name == "name" and not avals:
        return on_name(policy, params["name"])
    check_usable(policy)
    if _compat.remat3_enabled():
        _check_asked(policy)
    return in_jax_terms(action_for(policy, prim, avals, params))


def action_for(policy: Policy, prim: Any, avals: Sequence[Any], params: dict[str, Any]) -> Action:
    """The largest action for any result of an operation."""
    return max(_actions(policy, prim, avals, params), default=Action.RECOMPUTE)


def on_name(policy: Policy, name: str) -> bool | Offloadable:
    """The verdict for ``jax_remat3`` of jax 0.10 and 0.11, which tells a name and nothing else.

    Raises:
        PolicyError: as :func:`on_operation`, and for rules that need more than the name.
    """
    check_usable(policy)
    _check_asked(policy)
    if policy.needs_results:
        raise PolicyError(
            f"jax_remat3 of jax {jax.__version__} tells a policy the name of a value and nothing "
            f"else, and {policy!r} selects by dtype or size. Use jaxmem.remat(fun, policy)."
        )
    action = policy.decide(Facts(names=users_names(name), primitive="name"))
    return in_jax_terms(action)


def check_usable(policy: Policy) -> None:
    """Check that a policy can be used outside ``fit`` and without module paths.

    Raises:
        PolicyError: it cannot.
    """
    check_own_decisions(policy)
    if policy.has_modules:
        raise PolicyError(
            f"{policy!r} selects by module path, which jax.checkpoint does not tell a policy. Use "
            "jaxmem.remat(fun, policy), or checkpoint names."
        )


def check_own_decisions(policy: Policy) -> None:
    """Check that a policy decides about every value itself.

    Raises:
        PolicyError: it leaves some to the planner.
    """
    if policy.uses_planner:
        raise PolicyError(
            f"{policy!r} leaves values to the planner, which only jaxmem.fit(policy=...) has. "
            "Say what happens to them: policies.nothing.override(...), or another base."
        )


def in_jax_terms(action: Action | None) -> bool | Offloadable:
    """An action as ``jax.checkpoint`` takes it.

    Raises:
        PolicyError: an offload, and this JAX would save instead.
    """
    if action != Action.OFFLOAD:
        return action == Action.SAVE
    if _compat.remat3_enabled() and not _compat.REMAT3_OFFLOADS:
        raise PolicyError(
            f"jax_remat3 of jax {jax.__version__} cannot offload. Switch it off, "
            'jax.config.update("jax_remat3", False), or use a newer jax.'
        )
    return _compat.offload()


def users_names(name: str) -> tuple[str, ...]:
    """A checkpoint name as facts have it: none where ``remat`` gave it."""
    return () if name.startswith(OWN_NAMES) else (name,)


def _actions(
    policy: Policy, prim: Any, avals: Sequence[Any], params: dict[str, Any]
) -> Iterator[Action]:
    """The action for each result of an operation."""
    names = users_names(params["name"]) if prim.name == "name" else ()
    operands = [Operand(aval) for aval in avals]
    if not policy.needs_results:
        # Types of results take time to find out.
        batch_dims = batch_dims_of(Operation(prim, params, operands, ()))
        found = [Facts(names=names, primitive=prim.name, batch_dims=batch_dims)]
    else:
        results = [Operand(aval) for aval in _compat.output_avals(prim, avals, params)]
        operation = Operation(prim, params, operands, results)
        found = [facts_of(operation, number, names=names) for number in range(len(results))]
    for facts in found:
        yield decided(policy, facts)


def decided(policy: Policy, facts: Facts) -> Action:
    """The action of a policy that decides about every value itself."""
    action = policy.decide(facts)
    assert action is not None
    return action


def _check_asked(policy: Policy) -> None:
    """``jax_remat3`` recomputes all but these without asking; say so rather than follow in part."""
    if policy.bound(_selects_unasked) != Action.RECOMPUTE:
        raise PolicyError(
            "jax_remat3 asks a policy about checkpoint names, matrix products and convolutions, "
            f"and recomputes all other values; {policy!r} keeps some of them. Use "
            "jaxmem.remat(fun, policy), which can."
        )


def _selects_unasked(selector: Selector) -> bool:
    asked = selector.primitive and {*selector.primitive} <= {*DOTS, "name"}
    return not (selector.names or asked or selector.batch_dims is not None)
