"""The only file that knows JAX's private names, and where JAX versions differ."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax._src import hardware_utils, source_info_util, xla_bridge
from jax._src.array import ArrayImpl
from jax.extend import core as jex

# --- equations ---------------------------------------------------------------------------------


class ScanArity(NamedTuple):
    """How many leading operands of a scan are constants, and how many after that are carries."""

    num_consts: int
    num_carry: int


def scan_arity(params: dict[str, Any]) -> ScanArity:
    """Operand counts of a ``scan`` equation; newer JAX keeps them in a flat tree of operands."""
    if "num_carry" in params:
        return ScanArity(params["num_consts"], params["num_carry"])
    consts, carry, _ = params["ft_in"].unpack()
    return ScanArity(len(consts), len(carry))


def is_concrete(leaf: Any) -> bool:
    """Whether ``leaf`` is an array of JAX with data; much faster than ``isinstance``."""
    return type(leaf) is ArrayImpl


def with_name(eqn: jex.JaxprEqn, name: str) -> jex.JaxprEqn:
    """``eqn`` with ``name`` appended to its name stack; XLA carries it as ``op_name`` metadata."""
    info = eqn.source_info
    return eqn.replace(source_info=info.replace(name_stack=info.name_stack.extend(name)))


def under(eqn: jex.JaxprEqn, outer: jex.JaxprEqn) -> jex.JaxprEqn:
    """``eqn`` of an inlined call, with the calling equation's name stack in front of its own.

    Where no line of the user's is known for it, because JAX traced a function of its own when it
    was imported or called elsewhere, the calling equation's line is taken.
    """
    info = eqn.source_info
    if outer.source_info.name_stack.stack:
        info = info.replace(name_stack=outer.source_info.name_stack + info.name_stack)
    if source_info_util.user_frame(info.traceback) is None:
        info = info.replace(traceback=outer.source_info.traceback)
    return eqn if info is eqn.source_info else eqn.replace(source_info=info)


def name_stack_of(eqn: jex.JaxprEqn) -> str:
    """The name stack of ``eqn`` as JAX prints it, such as ``transpose(jvp(h3))/mlp``."""
    return str(eqn.source_info.name_stack)


def user_line(eqn: jex.JaxprEqn) -> tuple[str, int, str] | None:
    """File, line and function of the user's code that made ``eqn``; ``None`` when unknown."""
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    return None if frame is None else (frame.file_name, frame.start_line, frame.function_name)


def evaluate(
    eqns: Sequence[jex.JaxprEqn],
    invars: Sequence[jex.Var],
    outvars: Sequence[Any],
    args: Sequence[Any],
) -> list[Any]:
    """Run a list of equations. ``eval_jaxpr`` knows how custom_jvp and its like must be bound."""
    effects = frozenset().union(*(eqn.effects for eqn in eqns)) if eqns else frozenset()
    info = jex.DebugInfo("jaxmem", "jaxmem", None, None)
    jaxpr = jex.Jaxpr((), tuple(invars), tuple(outvars), tuple(eqns), effects, info)
    return jax.core.eval_jaxpr(jaxpr, (), *args)  # pyright: ignore[reportAttributeAccessIssue]


# --- jitted functions --------------------------------------------------------------------------


def jit_static_arguments(fun: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Static argument numbers and names a ``jax.jit`` wrapper was made with."""
    state = fun.__getstate__()
    return tuple(state["static_argnums"] or ()), tuple(state["static_argnames"] or ())


def jit_donated_arguments(fun: Any) -> tuple[int, ...]:
    """Donated argument numbers a ``jax.jit`` wrapper was made with."""
    return tuple(fun._jit_info.donate_argnums)


def is_jitted(fun: Any) -> bool:
    """Whether ``fun`` is the result of ``jax.jit``."""
    return isinstance(fun, jax.stages.Wrapped) and hasattr(fun, "_jit_info")


# --- compiling for absent GPUs -----------------------------------------------------------------


def has_nvidia_gpu() -> bool:
    """Whether JAX would look for a CUDA backend on this machine."""
    return hardware_utils.has_visible_nvidia_gpu()


def has_topology(platform: str) -> bool:
    """Whether a plugin that can describe absent devices of ``platform`` is registered."""
    return platform in xla_bridge._topology_factories


@contextlib.contextmanager
def registering_topology_only(platform: str) -> Iterator[None]:
    """Within, a plugin that registers itself gives its compiler and topology, but no backend.

    JAX runs plugin callbacks (custom partitioning, FFI types) once, at discovery; a plugin that
    comes later needs them too. Its backend factory is taken out again, so that
    ``clear_backends`` does not make JAX look for a GPU that was not there before.
    """
    yield
    registration = xla_bridge._backend_factories.pop(platform, None)
    if registration is not None:
        for callback in xla_bridge._plugin_callbacks:
            callback(c_api=registration.c_api)
