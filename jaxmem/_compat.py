"""The only file that knows JAX's private names, and where JAX versions differ."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.extend.core.primitives
from jax._src import (
    ad_checkpoint,
    api_util,
    config,
    distributed,
    hardware_utils,
    hijax,
    source_info_util,
    xla_bridge,
)
from jax._src.array import ArrayImpl
from jax._src.interpreters import mlir, remat
from jax._src.lax.lax import _convert_element_type
from jax.ad_checkpoint import Offloadable
from jax.extend import core as jex

# Before jax 0.12 XLA:GPU wrote no result over an operand that came from behind a barrier.
BARRIERS_KEEP_PLACES = jax.__version_info__ < (0, 12)
# Before jax 0.12 XLA:GPU made the zeros that scans stack into, where several stack arrays of one
# kind, in one kernel before all else.
STACKS_MADE_AT_ONCE = jax.__version_info__ < (0, 12)

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


def are_concrete(leaves: Iterable[Any]) -> bool:
    """Whether all of them are; asked at every call of a step, of all its leaves."""
    return set(map(type, leaves)) <= {ArrayImpl}


def any_deleted(leaves: Sequence[Any]) -> bool:
    """Whether the data of an array is gone."""
    if are_concrete(leaves):
        return any(map(ArrayImpl.is_deleted, leaves))
    return any(leaf.is_deleted() for leaf in leaves if isinstance(leaf, jax.Array))


def is_array_type(aval: Any) -> bool:
    """Whether ``aval`` is the type of an array, not of a ``Ref`` or a token."""
    return isinstance(aval, jax.core.ShapedArray)  # pyright: ignore[reportAttributeAccessIssue]


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


def is_user_file(file: str) -> bool:
    """Whether a file of a traceback is the user's, and none of JAX or of what hides itself."""
    return source_info_util.is_user_filename(file)


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


def eval_closed(closed: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Run a jaxpr with other constants than its own."""
    jaxpr = closed.jaxpr
    return jax.core.eval_jaxpr(jaxpr, consts, *args)  # pyright: ignore[reportAttributeAccessIssue]


def with_equations(jaxpr: Any, eqns: Sequence[jex.JaxprEqn]) -> Any:
    """A jaxpr, closed or not, with other equations."""
    opened = jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr
    changed = opened.replace(eqns=list(eqns))
    # Newer JAX has one class: a closed jaxpr is its own jaxpr.
    return changed if opened is jaxpr else jaxpr.replace(jaxpr=changed)


def output_avals(primitive: Any, avals: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Types of the results that ``primitive`` has for operands of types ``avals``."""
    made, _ = primitive.abstract_eval(*avals, **params)
    return list(made) if primitive.multiple_results else [made]


def primitive_names() -> frozenset[str]:
    """Names of the primitives that JAX can run, those of imported libraries included."""
    public = vars(jax.extend.core.primitives).values()
    return frozenset(p.name for p in (*mlir._lowerings, *public) if isinstance(p, jex.Primitive))


# --- checkpoint policies -----------------------------------------------------------------------

_DEVICE, _HOST = "device", "pinned_host"

_hi_name_classes = tuple(
    getattr(ad_checkpoint, name)
    for name in ("CheckpointName", "CheckpointNameFwd")
    if hasattr(ad_checkpoint, name)
)
# With jax_remat3, jax 0.10 and 0.11 ask objects of JAX's own classes only: about matrix products,
# and up to 0.11.1 about names. Of jax 0.10 none can offload.
_own_classes: tuple[type, ...] = tuple(
    getattr(ad_checkpoint, name)
    for name in ("DotsSaveable", "OffloadDotWithNoBatchDims")
    if hasattr(ad_checkpoint, name)
)
_offloads_names = hasattr(ad_checkpoint, "SaveAndOffloadOnlyTheseNames")
if _own_classes:
    _names = "SaveAndOffloadOnlyTheseNames" if _offloads_names else "SaveOnlyTheseNames"
    _own_classes += (getattr(ad_checkpoint, _names),)
REMAT3_OFFLOADS = not _own_classes or _offloads_names
# What jax_remat3 asks a policy about; everything else is recomputed without a question.
REMAT3_ASKS = frozenset(["name"]) | {
    primitive.name
    for primitive in (
        jax.extend.core.primitives.dot_general_p,
        jax.extend.core.primitives.conv_general_dilated_p,
    )
    if primitive in remat.rules
}


@contextlib.contextmanager
def whole_checkpoint() -> Iterator[None]:
    """Within, ``jax.checkpoint`` can do all that it is documented to do.

    With ``jax_remat3``, that of jax 0.10 cannot offload, and its names cannot be mapped by
    ``vmap``; that of jax 0.11 tells no types of named values. What is traced within uses its other
    implementation there. Newer JAX is left as it is.
    """
    with config.remat3(False) if _own_classes else contextlib.nullcontext():
        yield


def remat3_enabled() -> bool:
    """Whether ``jax.checkpoint`` is JAX's new implementation, ``jax_remat3``."""
    return config.remat3.value


class _FalseOffload(Offloadable):
    """An offload for jax 0.11, which saves a matrix product for any verdict that is true."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return False


def offload() -> Offloadable:
    """The verdict of a policy that a value waits in host memory."""
    kind = _FalseOffload if _own_classes and remat3_enabled() else Offloadable
    return kind(src=_DEVICE, dst=_HOST)


@dataclass(frozen=True)
class _Names:
    """What jax 0.10 and 0.11 look a checkpoint name up in."""

    policy: Any
    offloaded: bool

    def __contains__(self, name: str) -> bool:
        verdict = self.policy.on_name(name)
        return isinstance(verdict, Offloadable) if self.offloaded else verdict is True


if TYPE_CHECKING or not _own_classes:

    @dataclass(frozen=True)
    class CheckpointPolicy:
        """Base of the policies that ``jax.checkpoint`` must recognise as such.

        A subclass has ``__call__`` and ``on_name``.
        """

else:

    @dataclass(frozen=True)
    class CheckpointPolicy(*_own_classes):
        """Base of the policies that ``jax.checkpoint`` must recognise as such."""

        # JAX's classes have these as fields; here they are not.
        only_if_no_batch_dims: ClassVar[bool] = False
        offload_src: ClassVar[str] = _DEVICE
        offload_dst: ClassVar[str] = _HOST
        saveable_names: ClassVar[Any] = property(lambda self: _Names(self, offloaded=False))
        names_which_can_be_saved: ClassVar[Any] = saveable_names
        names_which_can_be_offloaded: ClassVar[Any] = property(
            lambda self: _Names(self, offloaded=True)
        )


def checkpoint_name_of(eqn: jex.JaxprEqn) -> str | None:
    """The name that ``jax.ad_checkpoint.checkpoint_name`` gave, ``None`` for other equations."""
    if eqn.primitive is ad_checkpoint.name_p:
        return eqn.params["name"]
    hidden: Any = eqn.params.get("_prim")
    return hidden.name if isinstance(hidden, _hi_name_classes) else None


def naming(operand: jex.Var, result: jex.Var, name: str, like: jex.JaxprEqn) -> jex.JaxprEqn:
    """The equation that names ``operand``, at the place in the user's code of ``like``."""
    primitive, params = ad_checkpoint.name_p, {"name": name}
    if remat3_enabled():
        primitive = hijax.call_hi_primitive_p
        params = {"_prim": ad_checkpoint.CheckpointName(name, operand.aval)}
    return like.replace(
        primitive=primitive, params=params, invars=[operand], outvars=[result], effects=frozenset()
    )


def equation_params(eqn: jex.JaxprEqn) -> dict[str, Any]:
    """Parameters of an equation, those of a ``call_hi_primitive`` opened."""
    hidden = eqn.params.get("_prim")
    return eqn.params if hidden is None else {**eqn.params, **getattr(hidden, "params", {})}


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


def not_finite(error: BaseException) -> str:
    """``"nan"`` or ``"inf"`` where ``jax_debug_nans`` or ``jax_debug_infs`` found one; else ``""``.

    What ``jax.jit`` makes a ``FloatingPointError`` of comes out of a compiled program as it is.
    """
    return error.ty if isinstance(error, api_util.InternalFloatingPointError) else ""


# --- compiling for absent GPUs -----------------------------------------------------------------


def has_nvidia_gpu() -> bool:
    """Whether JAX would look for a CUDA backend on this machine."""
    return hardware_utils.has_visible_nvidia_gpu()


def has_started() -> bool:
    """Whether JAX has a backend already, with the settings it found then."""
    return xla_bridge.backends_are_initialized()


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


class GpuLibraries(NamedTuple):
    """What JAX asks a GPU about while it traces a call of cuDNN.

    Attributes:
        capability: compute capability, such as ``(9, 0)``.
        cudnn: version of cuDNN as it is numbered, 91000 for 9.10.
    """

    capability: tuple[int, int]
    cudnn: int


_answered: ContextVar[GpuLibraries | None] = ContextVar("jaxmem_gpu_libraries", default=None)


@contextlib.contextmanager
def answering_for(libraries: GpuLibraries) -> Iterator[None]:
    """Within, JAX traces calls of cuDNN on this thread as if ``libraries`` were here.

    JAX asks the process's own GPU and cuDNN while it traces ``dot_product_attention(...,
    implementation="cudnn")``, which compiles well for a GPU that is not there.
    """
    attention: Any = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    if not hasattr(attention, "jaxmem_answers"):
        _answer(attention, "check_cudnn_version", lambda known: known.cudnn)
        _answer(attention, "check_compute_capability", lambda known, c: known.capability >= _two(c))
        _answer(
            attention,
            "is_cuda_compute_capability_equal",
            lambda known, c: known.capability == _two(c),
        )
        attention.jaxmem_answers = True
    token = _answered.set(libraries)
    try:
        yield
    finally:
        _answered.reset(token)


def _answer(module: Any, name: str, answer: Callable[..., Any]) -> None:
    """Have ``module.name`` answer for absent libraries where :func:`answering_for` says so."""
    asked = getattr(module, name)

    def answered(*args: Any) -> Any:
        known = _answered.get()
        return asked(*args) if known is None else answer(known, *args)

    setattr(module, name, answered)


def _two(capability: str) -> tuple[int, int]:
    major, minor = capability.split(".")
    return int(major), int(minor)


def weakly_typed(array: jax.Array) -> jax.Array:
    """The array with the type of a Python number, which gives way to others' precision."""
    made: Any = _convert_element_type(array, array.dtype, weak_type=True)
    return made


def at_shutdown(finish: Callable[[], None]) -> Callable[[], None]:
    """Have ``finish`` called when Python begins to end, while thread pools still take work.

    ``atexit`` is too late for that. ``concurrent.futures`` is told in this way, too; what is told
    last is called first. Python 3.12 starts no new threads even then.
    """
    importlib.import_module("concurrent.futures.thread")
    threading._register_atexit(finish)  # pyright: ignore[reportAttributeAccessIssue]
    return finish


# --- several processes -------------------------------------------------------------------------


def preemption_service_enabled() -> bool:
    """Whether ``jax.distributed.initialize`` starts what tells all processes of a SIGTERM."""
    return bool(jax.config.jax_enable_preemption_service)  # pyright: ignore[reportAttributeAccessIssue]


def distributed_client() -> Any:
    """The client of ``jax.distributed``; ``None`` where it was not initialised."""
    return distributed.global_state.client
