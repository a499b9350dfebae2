"""The decorator: its options, and what they mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

from jax.sharding import AbstractMesh, Mesh

from jaxmem.fitted import FittedStep
from jaxmem.planner.plan import Plan
from jaxmem.planning import Budget, Verify
from jaxmem.policies import Policy
from jaxmem.program.microbatches import Auto
from jaxmem.runtime.progress import Report
from jaxmem.targets.target import Target


@overload
def fit(
    fun: Callable[..., Any],
    *,
    budget: Budget = None,
    target: Target | str | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    verify: Verify = True,
    progress: bool | Report | None = None,
    plan: Plan | None = None,
    host_budget: Budget = None,
    host: str | Sequence[str] | Auto | None = None,
    policy: Policy | None = None,
    measure: bool = False,
    time_limit: float | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    shard: Any = None,
) -> FittedStep: ...
@overload
def fit(
    fun: None = None,
    *,
    budget: Budget = None,
    target: Target | str | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    verify: Verify = True,
    progress: bool | Report | None = None,
    plan: Plan | None = None,
    host_budget: Budget = None,
    host: str | Sequence[str] | Auto | None = None,
    policy: Policy | None = None,
    measure: bool = False,
    time_limit: float | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    shard: Any = None,
) -> Callable[[Callable[..., Any]], FittedStep]: ...
def fit(
    fun: Callable[..., Any] | None = None,
    *,
    budget: Budget = None,
    target: Target | str | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    verify: Verify = True,
    progress: bool | Report | None = None,
    plan: Plan | None = None,
    host_budget: Budget = None,
    host: str | Sequence[str] | Auto | None = None,
    policy: Policy | None = None,
    measure: bool = False,
    time_limit: float | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    shard: Any = None,
) -> FittedStep | Callable[[Callable[..., Any]], FittedStep]:
    """A train step that runs inside a byte budget and computes the same thing.

    The step is traced once for each signature; values that do not fit from the forward to the
    backward pass are recomputed. The model, random numbers, gradients and the order of effects
    do not change; rounding may, because XLA fuses a different program.

    Args:
        fun: anything ``jax.jit`` takes, also a function that is jitted already. Flax NNX
            modules and optimizers may be passed and mutated, as with ``nnx.jit``.
        budget: bytes on each device for the whole step: arguments, results and temporaries,
            what donation shares counted once. ``20 * 2**30``, ``"20GiB"``, ``"80%"`` of the
            device, or ``None`` for all of it.
        target: where it must fit: ``None`` for the local device, ``"h100"``, ``"8xh100"`` or a
            :class:`jaxmem.Target`. A GPU that is not there is compiled for all the same.
        donate_argnums: arguments whose buffers the results may reuse, as in ``jax.jit``.
        static_argnums: arguments that are part of the program, as in ``jax.jit``.
        verify: ``True`` checks that the compiler kept every recomputation; ``"full"`` also
            runs the step as written once and compares all results; ``False`` checks only bytes.
        progress: show what planning does; ``None`` shows it in a terminal.
        plan: a plan made before, such as ``Plan.load(path)``: it is compiled and checked, and
            nothing is searched.
        host_budget: host memory for each device, written like ``budget``. ``None`` uses the host
            only where nothing fits without: values that cross from forward to backward, and an
            optimizer's moments, are then kept there. A number lets plans use it to be faster,
            ``0`` never.
        host: argument leaves that live in pinned host memory, by their paths:
            ``"*.opt_state*"``, or several such patterns. Those of 1 MiB and more are fetched,
            updated and sent back one after the other, beside each other's copies. Those that are
            updated must be donated. ``jaxmem.AUTO`` chooses: none, half or all of those that only
            updates read, or all that are updated, whichever is predicted to be quickest of what
            fits; the plan's notes say what came of each. What is only read has to be named.
        policy: what of the forward pass to save, offload and recompute for the backward pass, in
            the bodies of loops too: a policy of ``jaxmem.policies``. One that decides about every
            value is followed as it is; the rules of ``policies.planned.override(...)`` bind the
            planner, which decides about the rest.
        measure: time the step as written, where it fits, and up to four of the programs that are
            predicted to be quickest, simple answers among them, on the device that is here, and
            take the quickest. They run on copies of what is donated, or on zeros where there are
            only shapes; ``plan.rounds`` says the median of each. Such a plan may be another one
            the next time.
        time_limit: seconds that the planner's own search may take; compiling, tracing and timing
            do not count. When it is over the best so far is compiled, at the least a simple
            answer such as every block recomputed, and the plan says so in its notes. ``None``
            searches to the end, and the same call gives the same plan.
        mesh: the devices that a step runs on, ``jax.make_mesh((8,), ("data",))``, or with a
            ``target`` of as many GPUs an ``AbstractMesh``, to plan only. Budgets and plans speak
            of bytes on each device. Its axes are taken as Auto, whatever their types, unless
            there is no ``shard`` and an argument is laid out over Explicit ones. A
            ``PartitionSpec`` inside the step is over this mesh.
        shard: how the state is split over the mesh, by rules of :func:`jaxmem.shard`
            (``"zero1"``, ``"zero3"``, patterns of paths with a ``PartitionSpec``, several of
            these), a tree of specs, or what that function returned. ``"auto"`` compares the state
            whole on each device, ``"zero1"`` and ``"zero3"`` and takes what is predicted to be
            quickest of those that fit, for the first arguments and all that come later;
            ``["auto", {pattern: spec}]`` has the patterns in each. The plan's notes say what was
            predicted. The state is what is donated,
            else the first argument, and arguments with an optimizer's state. Every other array is
            split by its rows over the axes ``"data"`` and ``"fsdp"``, or the only axis; one
            that has a ``NamedSharding`` over the mesh stays as it is. Calls move what is elsewhere,
            and results that replace state keep its layout. ``None`` follows what arrays and
            Flax's variables say of themselves; other state is whole on each device.

    Returns:
        A callable like ``fun`` with ``.plan``, ``.place``, ``.lower``, ``.report`` and
        ``.profile``.

    Raises:
        BudgetError: the budget does not parse or the device does not have it.
        BudgetInfeasibleError: at the first call for new shapes, if no plan fits; it names the
            smallest budget that works and what fills it.
        TraceError: JAX cannot trace the function.
        VerificationError: the compiled program is not what the plan says.
        CutError: a leaf that ``host`` names cannot wait in host memory.
        StepInterruptedError: a step failed twice between updates of such leaves.
        PlanMismatchError: the given plan was made for another program or other shapes.
        PolicyError: a rule of the policy matches nothing or cannot be followed.
        ShardingError: a rule or a spec does not fit the state or the mesh, the rows of a batch do
            not divide, or an argument is on a device that the mesh does not have.
        TargetError: the target has another number of devices than the mesh.
        ArgumentError: an option is of another kind, or ``measure`` is set for another device, a
            step with effects, several processes, or without room for the copies.

    Cost:
        Planning takes one trace and 1 to 15 compiles for each signature, with ``shard="auto"``
        three times as much for the first one; with ``jaxmem.AUTO`` a
        trace for each number of microbatches tried; with ``measure`` 7 to 27 runs of up to 5
        programs. Recomputation costs what the plan predicts;
        a program that fits as written is left unchanged, unless a GPU is predicted to be clearly
        quicker at one whose loops keep less.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> def loss(w, x):
    ...     for _ in range(8):
    ...         x = jnp.tanh(x @ w)
    ...     return (x**2).mean()
    >>> @jaxmem.fit(budget="64MiB", progress=False)
    ... def step(w, x):
    ...     return w - 0.1 * jax.grad(loss)(w, x)
    >>> w, x = jnp.eye(128), jnp.ones((64, 128))
    >>> step(w, x).shape
    (128, 128)
    >>> step.plan(w, x).solver
    'keep-all'
    >>> by_hand = jaxmem.fit(step.__wrapped__, policy=jaxmem.policies.nothing, progress=False)
    >>> by_hand.plan(w, x).solver
    'policy: nothing'
    """
    options: dict[str, Any] = {
        "budget": budget,
        "target": target,
        "donate_argnums": donate_argnums,
        "static_argnums": static_argnums,
        "verify": verify,
        "progress": progress,
        "plan": plan,
        "host_budget": host_budget,
        "host": host,
        "policy": policy,
        "measure": measure,
        "time_limit": time_limit,
        "mesh": mesh,
        "shard": shard,
    }
    if fun is None:
        return lambda f: FittedStep(f, **options)
    return FittedStep(fun, **options)
