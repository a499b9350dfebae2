"""XLA compiler options that jaxmem sets, for one program at a time, and why each."""

from __future__ import annotations

from collections.abc import Mapping

from jaxmem.targets import table
from jaxmem.targets.target import Target

DISABLED_PASSES = "xla_disable_hlo_passes"
_ROOM = "xla_gpu_memory_limit_slop_factor"
_IN_TURN = ("xla_gpu_disable_async_collectives", "ALLCOLLECTIVES")
_COPIES = "xla_gpu_experimental_parallel_async_compute_limit"


def memory_schedules(target: Target) -> tuple[dict[str, str], ...]:
    """Sets of compiler options that keep a plan's memory; which is best depends on the program.

    XLA:GPU needs none. XLA:CPU removes optimization barriers before it looks for common
    subexpressions, which merges recomputations with the originals, and orders operations for
    concurrency. A six-layer MLP planned for 57 MiB compiled to 141 MiB with the defaults and to
    72 MiB with these options; ordering for memory helps some programs (a conv net 48 -> 30 MiB)
    and hurts others (a GAN step 34 -> 37 MiB) (jax 0.10.2).

    The reshape mover is off because it miscompiles in jaxlib 0.12.0.1, with or without jaxmem:
    ``r * (rsqrt(q) / q)`` of a reshaped reduction ``r`` and a broadcast ``q`` came out 95% wrong.
    A layer norm whose statistics are made again is such a product.

    >>> memory_schedules(Target("h200"))
    ({},)
    """
    if target.platform != "cpu":
        return ({},)
    kept = {DISABLED_PASSES: "cse_barrier_expander,reshape-mover"}
    return kept, {**kept, "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def overlapping(target: Target) -> dict[str, str]:
    """Compiler options with which copies to and from the host run beside a loop's computation.

    XLA:GPU replays the body of a loop as one command buffer, in which copies and kernels wait for
    each other: 254 ms instead of 205 for 16 layers that move 4 GiB each way on an H200.

    >>> overlapping(Target("h200"))
    {'xla_gpu_enable_command_buffer': ''}
    """
    return {"xla_gpu_enable_command_buffer": ""} if target.platform == "gpu" else {}


def copying(target: Target) -> dict[str, str]:
    """Compiler options with which several copies to and from the host are under way at once.

    XLA:GPU has two at a time and starts others when these have ended. Of a GPT on an H100 whose
    moments are updated in the backward pass 109 ms of copies were not hidden in a first version,
    62 with four, and 107 with 64; later 70 and 67 with two and four. Each takes memory while it is
    under way: six products and their momentum, 96 MiB with four, are 92 with two.

    >>> copying(Target("h200"))
    {'xla_gpu_experimental_parallel_async_compute_limit': '4'}
    """
    return {_COPIES: "4"} if target.platform == "gpu" else {}


def within_room(target: Target, room_bytes: int, fixed_bytes: int) -> dict[str, str]:
    """Compiler options with which collectives are put beside other work only where there is room.

    XLA:GPU starts them early, ends them late and puts off what could hide them, as long as a
    program fits the device: it does not know of a budget. Six tensor-parallel layers over 8 H100
    took 872 MiB as written, 640 with no room for that, and 610 in their own order (jax 0.10.2).
    The room is told in hundredths of what a fifth less than the device leaves beside arguments and
    results, so it is rounded down; 95 are XLA's own choice.

    Args:
        target: an NVIDIA GPU.
        room_bytes: for temporaries, on each device.
        fixed_bytes: of arguments and results.

    >>> within_room(Target("8xh100"), 0, 0), within_room(Target("8xh100"), 10**12, 0)
    ({'xla_gpu_memory_limit_slop_factor': '0'}, {})
    """
    device = table.gpu(target.model)["memory_bytes"] if target.model else target.device_bytes
    usable = max(1, device * 8 // 10 - fixed_bytes)
    percent = max(0, room_bytes) * 100 // usable
    return {} if percent >= 95 else {_ROOM: str(percent)}


def collectives_in_turn(target: Target) -> dict[str, str]:
    """Compiler options with which nothing runs beside collectives, and copies to the host still do.

    With no room at all (:func:`within_room`) XLA:GPU starts copies late, too: a GPT over two H200
    that moves 3 GiB each way took 428 ms a step, and would hide them behind the 334 it computes.

    >>> collectives_in_turn(Target("8xh100"))
    {'xla_gpu_disable_async_collectives': 'ALLCOLLECTIVES'}
    """
    return dict([_IN_TURN]) if target.platform == "gpu" else {}


def is_schedule(target: Target, options: Mapping[str, str]) -> bool:
    """Whether a plan for the target may set these compiler options.

    >>> is_schedule(Target("8xh100"), within_room(Target("8xh100"), 2**32, 0))
    True
    """
    room = set(options) == {_ROOM} and options[_ROOM].isdecimal()
    of_gpus = room or dict(options) == collectives_in_turn(target)
    return dict(options) in memory_schedules(target) or (target.platform == "gpu" and of_gpus)


def going_by_rows(target: Target) -> dict[str, str]:
    """Compiler options of a program that takes leaves from host memory some rows at a time.

    Nothing is made again in it. XLA:CPU of jaxlib 0.12.0.1 ends the process ("Check failed: buffer
    != nullptr") where such a loop keeps its barriers, and there they order nothing.

    >>> going_by_rows(Target("h200"))
    {'xla_gpu_enable_command_buffer': ''}
    """
    if target.platform == "cpu":
        return {DISABLED_PASSES: "reshape-mover"}
    return overlapping(target)


def going_along(target: Target) -> dict[str, str]:
    """Compiler options of a loop that updates leaves in host memory beside what it computes.

    XLA:GPU has no more than two copies under way at a time in a program, and starts others when the
    first have ended: computation waits for them.

    >>> going_along(Target("h200"))["xla_gpu_experimental_parallel_async_compute_limit"]
    '64'
    """
    if target.platform == "cpu":
        return going_by_rows(target)
    return {**overlapping(target), _COPIES: "64"}
