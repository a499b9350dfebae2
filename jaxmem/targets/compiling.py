"""Compile a function for a target, here or absent, and say what memory the compiler uses."""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, SingleDeviceSharding

from jaxmem.targets import table, topology
from jaxmem.targets.absent import AbsentDevices, as_function
from jaxmem.targets.kernels import kernels_of
from jaxmem.targets.options import DISABLED_PASSES
from jaxmem.targets.target import Target

# A context, its kernels and cuBLAS, before anything is allocated.
_OF_CUDA = 512 * 2**20


@dataclass(frozen=True)
class CompiledMemory:
    """Bytes of a compiled program on each device, as the compiler assigned them.

    Attributes:
        argument_bytes: arguments, used or not.
        output_bytes: outputs, those that reuse a donated argument included.
        alias_bytes: outputs that live in donated arguments, counted in both of the above.
        temp_bytes: everything else at the fullest moment.
        host_temp_bytes: temporaries in host memory.
        host_argument_bytes: arguments in host memory.
        host_output_bytes: outputs in host memory.
        peak_bytes_reported: the compiler's own peak; not reliable on CPUs, kept to compare.
        code_bytes: the program itself.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    host_temp_bytes: int
    host_argument_bytes: int
    host_output_bytes: int
    peak_bytes_reported: int
    code_bytes: int

    @property
    def total_bytes(self) -> int:
        """Arguments + outputs + temporaries, aliased bytes once: what budgets are judged by."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes


@dataclass(frozen=True, eq=False)
class Compiled:
    """A function compiled for a target.

    Attributes:
        target: what it was compiled for.
        lowered: JAX's own lowered object; its ``compile()`` gives ``executable`` again.
        executable: JAX's own compiled object; callable only where the target is this machine.
        memory: bytes on each device.
        seconds: time that lowering and compiling took.
        runs_here: whether ``executable`` can be called in this process.
    """

    target: Target
    lowered: jax.stages.Lowered
    executable: jax.stages.Compiled
    memory: CompiledMemory
    seconds: float
    runs_here: bool

    def hlo_text(self) -> str:
        """The optimised and scheduled HLO module, as text."""
        return self.executable.as_text() or ""


def compile_for(
    target: Target | str | None,
    fun: Callable[..., Any],
    avals: Sequence[Any],
    *,
    donate: Sequence[int] = (),
    out_shardings: Any = None,
    options: Mapping[str, str | int | bool] | None = None,
    xla_remat: bool = False,
) -> Compiled:
    """Returns ``fun`` compiled for a target, with the compiler's memory figures.

    For this machine it is the program that will run. For an absent GPU the whole XLA:GPU
    pipeline runs, but for autotuning, which needs the device: on an H200 real gradient programs
    of 5 to 31 GiB took 0.1 to 0.6 GiB more, for the workspace of the GEMM kernels picked there.

    XLA:GPU rematerialises on its own when a program nears 80% of the device. That hides what a
    program needs: keep-all of an unrolled 24-layer GPT on an H200 compiled to 103 GiB, of which
    the pass had recomputed 70 GiB; without the pass it is 173 GiB, the same as with a
    ``device_memory_size`` of 100 TB or with ``xla_gpu_memory_limit_slop_factor=100000`` (jax
    0.10.2 and 0.12.0). So the pass is off, for this program only, unless ``xla_remat`` is set;
    with it go the pass's warnings that it could not reach its limit.

    Args:
        target: a target, its name, or ``None`` for this machine.
        fun: function of flat arrays or pytrees.
        avals: one ``ShapeDtypeStruct`` (or array, or pytree of them) for each argument. A
            ``NamedSharding`` on them is carried over to the target's devices, with the same axis
            names and sizes; what has none is replicated on every device.
        donate: numbers of arguments whose buffers outputs may take.
        out_shardings: as for ``jax.jit``; by default, and where it is ``None``, replicated where
            no argument is sharded, and otherwise XLA's choice.
        options: XLA compiler options, for this program only.
        xla_remat: let XLA rematerialise on its own.

    Raises:
        UnknownTargetError: no target of that name.
        MissingPluginError: the target is an absent GPU and the compiler is not installed.
        TargetError: an argument's mesh has another number of devices than the target.

    Cost:
        One compile: 0.2-10 s on one core.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    >>> compile_for("cpu", lambda x: x @ x, [x]).memory.argument_bytes
    262144
    """
    target = Target.local(measure=False) if target is None else Target.resolve(target)
    started = time.perf_counter()
    here = runs_here(target)
    lowered = lower_for(
        target,
        fun,
        avals,
        donate=donate,
        out_shardings=out_shardings,
        options=options,
        xla_remat=xla_remat,
    )
    try:
        with warnings.catch_warnings():
            if not here:
                # JAX's persistent cache takes such programs, and then cannot load them.
                warnings.filterwarnings("ignore", "Error reading persistent compilation cache")
            executable = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        topology.explain_missing_toolchain(error)
        raise
    return Compiled(
        target, lowered, executable, read_memory(executable), time.perf_counter() - started, here
    )


def lower_for(
    target: Target,
    fun: Callable[..., Any],
    avals: Sequence[Any],
    *,
    donate: Sequence[int] = (),
    out_shardings: Any = None,
    options: Mapping[str, str | int | bool] | None = None,
    xla_remat: bool = False,
) -> jax.stages.Lowered:
    """Returns ``fun`` lowered for a target: what :func:`compile_for` compiles.

    The arguments are those of :func:`compile_for`, and so are the errors.
    """
    here = runs_here(target)
    lower = _lower_here if here else _lower_absent
    given = map(_given_sharding, jax.tree.leaves(avals))
    split = any(sharding is not None and sharding.num_devices > 1 for sharding in given)
    jit = functools.partial(
        jax.jit,
        donate_argnums=tuple(donate),
        keep_unused=True,
        compiler_options=_options(target, here, options or {}, xla_remat, split),
    )
    return lower(target, jit, fun, tuple(avals), out_shardings)


def runs_here(target: Target) -> bool:
    """Whether a program compiled for the target can be called in this process.

    >>> runs_here(Target("cpu")), runs_here(Target("64x8xb200"))
    (True, False)
    """
    topology.initialize_default_backend()
    if target.platform == "cpu":
        return True
    if jax.default_backend() != "gpu":
        return False
    return (
        target.model == (table.by_device_kind(jax.devices()[0].device_kind) or "")
        and target.hosts <= jax.process_count()
        and target.devices_per_host <= jax.local_device_count()
    )


def usable_bytes(target: Target) -> int:
    """Bytes of each device a program may use: what JAX's allocator has here, or the table's.

    >>> usable_bytes(Target("h200")) == Target("h200").device_bytes
    True
    """
    if target.platform == "gpu" and runs_here(target):
        return min(target.device_bytes, Target.local(measure=False).device_bytes)
    return target.device_bytes


def most_bytes(target: Target) -> int:
    """Bytes of each device that a budget may ask for.

    A GPU of the table that is not here may be given nearly all of its memory where it is: JAX takes
    as much as ``XLA_PYTHON_CLIENT_MEM_FRACTION`` says, and CUDA itself half a GiB.

    >>> target = Target("a100-40")
    >>> target.device_bytes < 38 * 2**30 < most_bytes(target) < 40 * 2**30
    True
    """
    usable = usable_bytes(target)
    if target.platform != "gpu" or not target.model or runs_here(target):
        return usable
    as_in_table = usable == Target(target.model).device_bytes
    whole = table.gpu(target.model)["memory_bytes"] - _OF_CUDA
    return max(usable, whole) if as_in_table else usable


def memory_fraction(target: Target, budget_bytes: int) -> float:
    """The share of a GPU of the table, in whole hundredths, that JAX needs for a budget.

    >>> memory_fraction(Target("a100-40"), 38 * 2**30)
    0.97
    """
    return math.ceil(100 * budget_bytes / table.gpu(target.model)["memory_bytes"]) / 100


def read_memory(executable: jax.stages.Compiled) -> CompiledMemory:
    """Returns the memory figures of a compiled JAX function.

    >>> import jax
    >>> memory = read_memory(jax.jit(lambda x: x + 1).lower(1.0).compile())
    >>> memory.argument_bytes, memory.output_bytes
    (4, 4)
    """
    stats: Any = executable.memory_analysis()
    return CompiledMemory(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
        host_temp_bytes=stats.host_temp_size_in_bytes,
        host_argument_bytes=stats.host_argument_size_in_bytes,
        host_output_bytes=stats.host_output_size_in_bytes,
        peak_bytes_reported=stats.peak_memory_in_bytes,
        code_bytes=stats.generated_code_size_in_bytes,
    )


def _lower_here(target: Target, jit: Any, fun: Any, avals: Any, out_shardings: Any) -> Any:
    away = target.platform == "cpu" and jax.default_backend() != "cpu"
    cpu = SingleDeviceSharding(jax.devices("cpu")[0]) if away else None
    placed = jax.tree.map(lambda aval: _with_sharding(aval, _given_sharding(aval) or cpu), avals)
    return jit(fun, out_shardings=out_shardings).lower(*placed)


def _lower_absent(target: Target, jit: Any, fun: Any, avals: Any, out_shardings: Any) -> Any:
    absent = AbsentDevices(target)
    given = [_given_sharding(aval) for aval in jax.tree.leaves(avals)]
    split = any(sharding is not None and sharding.num_devices > 1 for sharding in given)
    if out_shardings is not None:
        out_shardings = jax.tree.map(
            lambda s: None if s is None and split else absent.sharding(s),
            out_shardings,
            is_leaf=_is_none,
        )
    elif not split:
        out_shardings = absent.replicated
    placed = jax.tree.map(
        lambda aval: _with_sharding(aval, absent.of_argument(_given_sharding(aval))), avals
    )
    waiting = jax.tree.map(lambda aval: absent.on_host(_given_sharding(aval)), avals)
    jit = functools.partial(jit, in_shardings=waiting, out_shardings=out_shardings)
    traced = jit(fun).trace(*placed)
    program = absent.program(traced.jaxpr)
    if program is not traced.jaxpr:
        traced = jit(as_function(program, jax.tree.structure(traced.out_info))).trace(*placed)
    return traced.lower()


def _given_sharding(aval: Any) -> Any:
    """The sharding that the caller gave; a traced value without one carries an empty mesh."""
    given = getattr(aval, "sharding", None)
    return None if isinstance(given, NamedSharding) and given.mesh.empty else given


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _with_sharding(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    aval = leaf if hasattr(leaf, "dtype") else jax.typeof(leaf)
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak)


def _options(
    target: Target,
    here: bool,
    given: Mapping[str, str | int | bool],
    xla_remat: bool,
    split: bool = False,
) -> Any:
    options: dict[str, str | int | bool] = {}
    if not here:
        options = {"xla_gpu_autotune_level": 0, **kernels_of(target.model)}
    options.update(given)
    without = ""
    if target.platform == "gpu" and not xla_remat:
        without = "rematerialization"
    elif target.platform == "cpu" and split:
        # It makes one of all all-reduces, whatever their size, which then waits for every whole
        # gradient: 24 MiB of temporaries in place of 16 for six layers with split parameters.
        without = "cpu-all-reduce-combiner"
    if without:
        passes = [str(options[DISABLED_PASSES])] if options.get(DISABLED_PASSES) else []
        options[DISABLED_PASSES] = ",".join([*passes, without])
    return options
