"""``jaxmem.remat``: a function whose backward pass follows a policy."""

from __future__ import annotations

import functools
import hashlib
import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import jax

from jaxmem import _compat
from jaxmem.errors import PolicyError
from jaxmem.policies import verdict
from jaxmem.policies.algebra import Policy
from jaxmem.policies.checks import in_derivatives, name_of, require_matches, require_offload
from jaxmem.policies.facts import OWN_NAMES, Action, Facts
from jaxmem.policies.values import named
from jaxmem.program import nnx

P = ParamSpec("P")
T = TypeVar("T")


def remat(
    fun: Callable[P, T],
    policy: Policy,
    *,
    static_argnums: int | Sequence[int] = (),
    prevent_cse: bool = True,
) -> Callable[P, T]:
    """Returns ``fun`` with a backward pass that keeps, offloads and recomputes what a policy says.

    Like ``jax.checkpoint(fun, policy=policy)``, with all that the policy can ask for: module paths,
    names and operations of one value together, ``jax_remat3`` on or off. It computes the same
    function, under ``jit``, ``grad``, ``vmap`` and ``scan`` too. Flax NNX objects may be arguments,
    and change in place.

    A custom derivative (``jax.custom_vjp``, ``jax.nn.relu``) and a ``jax.checkpoint`` inside are
    kept whole: their results can be saved, and the values inside that have checkpoint names.

    Args:
        fun: a function of arrays, trees of arrays and Flax NNX objects.
        policy: what ``jaxmem.policies`` makes.
        static_argnums: positions of the arguments that are not arrays, as in ``jax.checkpoint``.
        prevent_cse: keep the compiler from merging the recomputation with the first computation.
            ``False`` is enough, and faster, in the body of a ``jax.lax.scan``.

    Raises:
        PolicyError: when called, a name or module matches nothing in ``fun``, or an offload has no
            effect; at once, a policy that only ``fit`` can use.

    Cost:
        A second trace of ``fun`` whenever it is traced; a policy that offloads traces the
        derivative once more.

    >>> import jax, jax.numpy as jnp
    >>> from jax.ad_checkpoint import checkpoint_name
    >>> from jaxmem import policies, remat
    >>> def block(x, w):
    ...     return jnp.sum(checkpoint_name(jnp.tanh(x @ w), "act") @ w)
    >>> x, w = jnp.ones((2, 4)), jnp.ones((4, 4))
    >>> saving = remat(block, policies.save("act"))
    >>> bool(jnp.allclose(jax.grad(saving)(x, w), jax.grad(block)(x, w)))
    True
    >>> jax.grad(remat(block, policies.save("acts")))(x, w)
    Traceback (most recent call last):
        ...
    jaxmem.errors.PolicyError: save('acts') matches nothing in block: ...
    """
    _check_arguments(fun, policy)
    call: Callable[..., T] = fun
    numbers = _numbers(static_argnums)

    @functools.wraps(fun)
    def remat_fun(*args: P.args, **kwargs: P.kwargs) -> T:
        static = {n % len(args) for n in numbers if -len(args) <= n < len(args)}
        dynamic = [arg for n, arg in enumerate(args) if n not in static]

        def of_arrays(pure: Any) -> Any:
            (merged, named_args), finish = nnx.merged(pure)
            rest = iter(merged)
            filled = [arg if n in static else next(rest) for n, arg in enumerate(args)]
            return finish(call(*filled, **named_args), (merged, named_args))

        with _compat.whole_checkpoint(), nnx.context((dynamic, kwargs)):
            pure = nnx.split((dynamic, kwargs))
            return nnx.put_back(_run(of_arrays, pure, policy, name_of(fun), prevent_cse))

    return remat_fun


def _run(fun: Callable[[Any], Any], tree: Any, policy: Policy, what: str, prevent_cse: bool) -> Any:
    """Trace ``fun``, name the values that the policy keeps, and run it under ``jax.checkpoint``."""
    closed, out_shape = jax.make_jaxpr(fun, return_shape=True)(tree)
    leaves, out_tree = jax.tree_util.tree_leaves(tree), jax.tree_util.tree_structure(out_shape)
    count = len(closed.consts)
    tags = _Tags.of(policy)
    jaxpr, values = named(closed, tags.tag)

    def original(*arrays: Any) -> list[Any]:
        return _compat.eval_closed(closed, arrays[:count], arrays[count:])

    def tagged(*arrays: Any) -> list[Any]:
        return _compat.eval_closed(jaxpr, arrays[:count], arrays[count:])

    arrays = [*closed.consts, *leaves]
    require_matches(policy, in_derivatives(policy, values, original, arrays), what)
    actions = {verdict.decided(policy, facts) for facts in values.all}
    if actions == {Action.SAVE}:
        return jax.tree_util.tree_unflatten(out_tree, original(*arrays))
    inner = _Followed(policy, tags, values.names)
    checkpointed = jax.checkpoint(tagged, policy=inner, prevent_cse=prevent_cse)
    if policy.offloads:
        require_offload(policy, values.all, checkpointed, arrays, what)
    return jax.tree_util.tree_unflatten(out_tree, checkpointed(*arrays))


@dataclass(frozen=True)
class _Tags:
    """The checkpoint names that stand for a policy's decisions.

    They are the policy's own, so that one function may follow a policy inside another that does.
    """

    policy: Policy
    saved: str
    offloaded: str

    @classmethod
    def of(cls, policy: Policy) -> _Tags:
        digest = hashlib.sha256(repr(policy).encode()).hexdigest()[:8]
        return cls(policy, f"{OWN_NAMES}save.{digest}", f"{OWN_NAMES}offload.{digest}")

    def tag(self, facts: Facts) -> str:
        """The name for a value, ``""`` for one that is recomputed."""
        action = verdict.decided(self.policy, facts)
        return {Action.SAVE: self.saved, Action.OFFLOAD: self.offloaded}.get(action, "")


@dataclass(frozen=True)
class _Followed:
    """What ``jax.checkpoint`` is told: keep the tagged values.

    Attributes:
        seen: the user's own names that are decided by tags. Others are inside derivative rules,
            where there is nothing but the name and the type to decide by.
    """

    policy: Policy
    tags: _Tags
    seen: frozenset[str]

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> Any:
        if prim.name != "name":
            return False
        name = params["name"]
        if name == self.tags.saved:
            return True
        if name == self.tags.offloaded:
            return verdict.in_jax_terms(Action.OFFLOAD)
        if name in self.seen or name.startswith(OWN_NAMES):
            return False
        return verdict.in_jax_terms(verdict.action_for(self.policy, prim, avals, params))


def _check_arguments(fun: Any, policy: Any) -> None:
    if inspect.isclass(fun):
        raise PolicyError(
            f"jaxmem.remat takes a function, not the class {fun.__name__}. For a Linen module use "
            f"nn.remat({fun.__name__}, policy=policy), with the same policy."
        )
    if not callable(fun):
        raise PolicyError(f"jaxmem.remat takes a function, not {fun!r}.")
    if not isinstance(policy, Policy):
        raise PolicyError(
            f"jaxmem.remat takes a policy of jaxmem.policies, not {policy!r}. JAX's own policies "
            "work in jax.checkpoint(fun, policy=policy)."
        )
    verdict.check_own_decisions(policy)


def _numbers(given: Any) -> tuple[int, ...]:
    try:
        return (operator.index(given),)
    except TypeError:
        return tuple(given)
