"""Nothing is silent: rules that match nothing, and offloads without effect, are errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jaxmem import _compat
from jaxmem.errors import PolicyError
from jaxmem.policies import verdict
from jaxmem.policies.algebra import Policy, Rule
from jaxmem.policies.facts import Action, Facts
from jaxmem.policies.selector import module_matches, name_matches, nearest
from jaxmem.policies.values import Values, describe, names_inside

_MANY = 12


def require_matches(policy: Policy, described: Iterable[Facts], what: str) -> None:
    """Check that every rule is about some value, as far as names say.

    Every checkpoint name and module of a rule must match a value, and so must the rule that names
    them, whatever sizes it asks for. A rule about operations or sizes only may match none.

    Args:
        policy: the policy.
        described: the facts of all values there are.
        what: name of the function, for the message.

    Raises:
        PolicyError: a rule matches nothing; the message lists what there is.
    """
    facts = list(described)
    names = sorted({name for f in facts for name in f.names})
    modules = sorted({f.module for f in facts if f.module})
    primitives = sorted({f.primitive for f in facts if f.primitive})
    for rule in policy.rules():
        for glob in rule.selector.names:
            if not name_matches(glob, names):
                raise PolicyError(_no_match(rule, glob, "checkpoint name", names, what))
        for glob in rule.selector.module:
            if not any(module_matches(glob, path) for path in modules):
                raise PolicyError(_no_match(rule, glob, "module", modules, what))
        for name in rule.selector.primitive:
            if name not in primitives and name not in _compat.primitive_names():
                raise PolicyError(_no_match(rule, name, "primitive", primitives, what))
        if not any(map(rule.selector.is_named, facts)) and (
            rule.selector.names or rule.selector.module
        ):
            raise PolicyError(_no_conjunction(rule, facts, what))


def check(policy: Policy, fun: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Check that ``jax.checkpoint(fun, policy=policy)`` does what the policy says.

    ``jax.checkpoint`` and what builds on it (``nn.remat``, ``nnx.remat``, ``nn.remat_scan``) ask a
    policy about one operation at a time, so they cannot see that a rule matched nothing. This
    traces ``fun`` and its derivative, and runs nothing. :func:`jaxmem.remat` checks by itself.

    Args:
        policy: the policy.
        fun: the function as it is, without ``jax.checkpoint``.
        args: its arguments, or ``jax.ShapeDtypeStruct``s for them.
        kwargs: likewise, by name.

    Raises:
        PolicyError: a checkpoint name matches nothing, an offload has no effect, or the policy asks
            for what ``jax.checkpoint`` cannot do: select by module path, recompute a value that it
            sees before its name, or, with ``jax_remat3``, keep what it does not ask about.

    >>> import jax.numpy as jnp
    >>> from jax.ad_checkpoint import checkpoint_name
    >>> from jaxmem import policies
    >>> def block(x, w):
    ...     return checkpoint_name(jnp.tanh(x @ w), "act") @ w
    >>> policies.check(policies.save("act"), block, jnp.ones((2, 4)), jnp.ones((4, 4)))
    >>> policies.check(policies.save("atc"), block, jnp.ones((2, 4)), jnp.ones((4, 4)))
    Traceback (most recent call last):
        ...
    jaxmem.errors.PolicyError: save('atc') matches nothing in block: ...
    """
    what = name_of(fun)
    verdict.check_usable(policy)
    values = describe(jax.make_jaxpr(fun)(*args, **kwargs))
    flat, tree = jax.tree_util.tree_flatten((args, kwargs))

    def of_leaves(*leaves: Any) -> Any:
        args, kwargs = jax.tree_util.tree_unflatten(tree, leaves)
        return fun(*args, **kwargs)

    require_matches(policy, in_derivatives(policy, values, of_leaves, flat), what)
    for facts in values.facts:
        if facts.names:
            _check_followed(policy, facts, what)
    if _compat.remat3_enabled():
        for facts in values.facts:
            _check_asked(policy, facts, what)
    if policy.offloads:
        followed = jax.checkpoint(of_leaves, policy=policy)
        require_offload(policy, values.all, followed, flat, what)


def in_derivatives(
    policy: Policy, values: Values, fun: Callable[..., Any], args: Sequence[Any]
) -> list[Facts]:
    """The values, and the names that only the derivative rules of ``fun`` give, if need be."""
    known = {name for facts in values.all for name in facts.names}
    globs = {glob for rule in policy.rules() for glob in rule.selector.names}
    if all(name_matches(glob, known) for glob in globs):
        return values.all
    differentiated = jax.make_jaxpr(lambda *leaves: jax.vjp(fun, *leaves))(*args)
    return [*values.all, *names_inside(differentiated.jaxpr)]


def require_offload(
    policy: Policy,
    described: Iterable[Facts],
    fun: Callable[..., Any],
    args: Sequence[Any],
    what: str,
) -> None:
    """Check that some value waits for the backward pass of ``fun`` in host memory.

    Args:
        policy: the policy that ``fun`` follows.
        described: the facts of its values.
        fun: the function, checkpointed.
        args: its arguments.
        what: its name, for the message.

    Raises:
        PolicyError: none does.
    """
    residuals = jax.make_jaxpr(lambda *leaves: jax.vjp(fun, *leaves)[1])(*args)
    spaces = [getattr(aval, "memory_space", None) for aval in residuals.out_avals]
    if jax.memory.Space.Host in spaces:
        return
    chosen = [f for f in described if policy.decide(f) == Action.OFFLOAD]
    if chosen:
        raise PolicyError(
            f"the offload of {_listed([f.label for f in chosen])} has no effect in {what}: no "
            "derivative reads it. Name a value inside, such as a block's input, not its output."
        )
    rules = [repr(rule) for rule in policy.rules() if rule.action == Action.OFFLOAD]
    raise PolicyError(
        f"{_listed(rules)} offloads nothing in {what}: no value is selected by it that no other "
        f"rule saves. Operations there: {_listed(sorted({f.primitive for f in described}))}."
    )


def name_of(fun: Callable[..., Any]) -> str:
    """How a message calls a function."""
    return getattr(fun, "__name__", type(fun).__name__)


def _check_asked(policy: Policy, facts: Facts, what: str) -> None:
    """Check that ``jax_remat3`` asks about a value that the policy keeps."""
    asked = facts.primitive in (*_compat.REMAT3_ASKS, "scaled_matmul_wrapper")
    if not facts.names and not asked and verdict.decided(policy, facts):
        raise PolicyError(
            f"{policy!r} keeps {facts.label} of {what}, and jax_remat3 recomputes it without "
            "asking the policy. Use jaxmem.remat(fun, policy)."
        )


def _check_followed(policy: Policy, facts: Facts, what: str) -> None:
    """Compare what ``jax.checkpoint`` will do with a named value with what the policy says."""
    wanted = verdict.decided(policy, facts)
    maker = dataclasses.replace(facts, names=())
    seen = [verdict.decided(policy, maker)] if facts.primitive != "name" else []
    alias = dataclasses.replace(facts, primitive="name", flops=0.0, batch_dims=None)
    for name in facts.names:
        seen.append(verdict.decided(policy, dataclasses.replace(alias, names=(name,))))
    if max(seen, default=wanted) != wanted:
        verbs = {Action.SAVE: "saved", Action.OFFLOAD: "offloaded", Action.RECOMPUTE: "recomputed"}
        raise PolicyError(
            f"{policy!r} wants {facts.label} of {what} {verbs[wanted]}, and with jax.checkpoint it "
            f"is {verbs[max(seen)]}: the operation and the name are asked about one after the "
            "other. Use jaxmem.remat(fun, policy), which sees both."
        )


def _no_match(rule: Rule, glob: str, kind: str, there: Sequence[str], what: str) -> str:
    begin = f"{rule!r} matches nothing in {what}"
    close = nearest(glob, there)
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    if there:
        listed = _listed([repr(name) for name in there])
        return f"{begin}: no {kind} is {glob!r}.{hint} There are {listed}."
    remedy = {
        "checkpoint name": 'jax.ad_checkpoint.checkpoint_name(x, "name") gives one to a value',
        "module": 'Linen writes them; elsewhere use jax.named_scope("name")',
    }.get(kind, "it does not compute")
    return f"{begin}, which has no {kind} at all: {remedy}."


def _no_conjunction(rule: Rule, facts: Sequence[Facts], what: str) -> str:
    chosen = rule.selector
    partly = [
        f
        for f in facts
        if (not chosen.names or any(name_matches(g, f.names) for g in chosen.names))
        and (not chosen.module or any(module_matches(g, f.module) for g in chosen.module))
    ] or [f for f in facts if any(name_matches(g, f.names) for g in chosen.names)]
    found = [f"{f.label} (made by {f.primitive})" for f in partly]
    return (
        f"{rule!r} matches nothing in {what}: its parts match, but no value matches all of them. "
        f"Nearest: {_listed(found)}."
    )


def _listed(items: Sequence[str]) -> str:
    items = list(dict.fromkeys(items))
    more = f" and {len(items) - _MANY} more" if len(items) > _MANY else ""
    return ", ".join(items[:_MANY]) + more
