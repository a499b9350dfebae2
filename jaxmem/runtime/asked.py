"""What is asked of a step that streams: which argument leaves wait in host memory."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import NamedSharding

from jaxmem.errors import ArgumentError, PlanMismatchError
from jaxmem.planner.plan import Plan
from jaxmem.policies.selector import nearest
from jaxmem.program import leaves
from jaxmem.program.call import Call
from jaxmem.program.ir import Program
from jaxmem.program.microbatches import AUTO, Auto
from jaxmem.targets.target import Target
from jaxmem.units import format_bytes, format_seconds

# Leaves that are smaller stay on the device: each copy takes as long as 2 MiB do.
FEWEST_BYTES = 2**20


def check_patterns(
    host: str | Sequence[str] | Auto | None, plan: Plan | None, measure: bool
) -> tuple[str, ...] | Auto:
    """The patterns of ``host=``, checked as far as they can be without a step; ``AUTO`` as it is.

    Raises:
        ArgumentError: it is of another kind, or there is a plan already.

    >>> check_patterns("*.opt_state*", None, False)
    ('*.opt_state*',)
    """
    if host is None:
        return ()
    patterns = (host,) if isinstance(host, str) else host
    whole = isinstance(patterns, Sequence) and all(isinstance(p, str) and p for p in patterns)
    if host is not AUTO and (not whole or not patterns):
        raise ArgumentError(
            f"host is {host!r}: it takes patterns of argument paths, such as "
            'host="*.opt_state*", or jaxmem.AUTO.'
        )
    if plan is not None:
        raise ArgumentError(
            "fit(plan=..., host=...): a plan has decided already. Leave one of them out."
        )
    if measure:
        raise ArgumentError(
            "fit(host=..., measure=True): programs of a step that streams are not timed yet. "
            "Leave one of them out."
        )
    return AUTO if isinstance(patterns, Auto) else tuple(patterns)


def leaves_named(program: Program, patterns: Sequence[str]) -> tuple[list[int], list[int]]:
    """The argument leaves whose paths match, and of these the ones that are too small to move.

    Raises:
        ArgumentError: a pattern matches nothing, or only what is too small.
    """
    paths = [leaf.path for leaf in program.arguments]
    found: dict[int, None] = {}
    for pattern in patterns:
        matches = [n for n, path in enumerate(paths) if fnmatch.fnmatchcase(path, _glob(pattern))]
        if not matches:
            first = len(program.consts)
            large = [
                path
                for path, nbytes in zip(paths, program.input_bytes[first:], strict=True)
                if nbytes >= FEWEST_BYTES
            ] or paths
            near = ", ".join(nearest(pattern, large)) or ", ".join(large[:5])
            chosen = " For the planner's choice write host=jaxmem.AUTO."
            raise ArgumentError(
                f"host={pattern!r} matches no argument of {program.name}. There are {len(paths)}, "
                f"for instance {near}. A pattern matches a whole path; * stands for anything."
                f"{chosen if pattern.lower() == AUTO.value else ''}"
            )
        found.update(dict.fromkeys(matches))
    sizes = dict(enumerate(program.input_bytes[len(program.consts) :]))
    large = [n for n in found if sizes[n] >= FEWEST_BYTES]
    if not large:
        most = max(sizes[n] for n in found)
        each = " on each device" if program.sharded else ""
        raise ArgumentError(
            f"host={', '.join(map(repr, patterns))} matches no large argument of "
            f"{program.name}: of {len(found)} the largest has {format_bytes(most)}{each}: arrays "
            f"of less than {format_bytes(FEWEST_BYTES)} are not worth a copy. Leave host= out."
        )
    return large, [n for n in found if n not in large]


def _glob(pattern: str) -> str:
    """``[`` as the character that paths are full of, ``*`` and ``?`` as in file names."""
    return pattern.replace("[", "[[]")


def on_device(call: Call, patterns: Sequence[str] | Auto) -> Call:
    """A call whose leaves that wait in host memory are traced as if they were on devices.

    JAX takes the memory of an array over a mesh into its type, and a step computes on devices.
    """

    def here(leaf: Any, path: str) -> Any:
        layout: Any = getattr(leaf, "sharding", None)
        named = isinstance(patterns, Auto) or any(
            fnmatch.fnmatchcase(path, _glob(pattern)) for pattern in patterns
        )
        if not named or getattr(layout, "memory_kind", None) != "pinned_host":
            return leaf
        return leaves.laid_out(leaf, layout.with_memory_kind("device"))

    pairs = zip(call.leaves, call.paths, strict=True)
    return replace(call, leaves=tuple(here(leaf, path) for leaf, path in pairs))


@dataclass(frozen=True, eq=False)
class Asked:
    """What is asked of a step that streams.

    Attributes:
        hosted: the argument leaves that wait in host memory.
        notes: what the plan says about them.
        host_bytes: host memory that may be used for each device; ``None`` for what there is.
        plan: a plan to follow.
        quicker_than: predicted seconds from which on nobody wants the step.
        given_out_bytes: what XLA's allocator may give out on each device, where the step is planned
            in less than the budget; 0 for what it is planned in.
    """

    hosted: Sequence[int]
    notes: tuple[str, ...] = ()
    host_bytes: int | None = None
    plan: Plan | None = None
    quicker_than: float = math.inf
    given_out_bytes: int = 0


class NotQuickerError(Exception):
    """A step takes too long to be wanted: at least ``seconds``."""

    def __init__(self, seconds: float):
        super().__init__(f"at least {format_seconds(seconds)}")
        self.seconds = seconds


def asked_by(
    program: Program, patterns: Sequence[str], target: Target, host_bytes: int | None
) -> Asked:
    """What ``host=`` asks.

    Raises:
        ArgumentError: a pattern matches nothing that can be moved, or there is nowhere to move it.
    """
    if target.platform == "cpu":
        raise ArgumentError(
            f"host={', '.join(map(repr, patterns))}, and {target.name} computes in host memory: "
            'there is nowhere to move anything. Leave host= out, or plan for a GPU: target="h100".'
        )
    large, small = leaves_named(program, patterns)
    notes = ()
    if small:
        nbytes = sum(program.input_bytes[len(program.consts) + n] for n in small)
        notes = (
            f"{len(small)} of the arguments that host= matches stay on the device, "
            f"{format_bytes(nbytes)} in all: each is smaller than {format_bytes(FEWEST_BYTES)}",
        )
    return Asked(large, notes, host_bytes)


def check_layouts(program: Program, asked: Asked) -> None:
    """Check that what is to wait in host memory is laid out over the devices of the step.

    Raises:
        ArgumentError: it is not, so it is not known on whose hosts it would wait.
    """
    for n in sorted(asked.hosted):
        if not isinstance(program.shardings[n], NamedSharding):
            raise ArgumentError(
                f"{program.name}: host= keeps {program.arguments[n].path} in host memory, and it "
                "is not laid out over the devices that other arguments are split over. Put it "
                "there, jax.device_put(x, NamedSharding(mesh, PartitionSpec(...))), or have "
                "fit(mesh=..., shard=...) do so."
            )


def asked_by_plan(program: Program, plan: Plan) -> Asked:
    """What a plan made before asks.

    Raises:
        PlanMismatchError: it hosts an argument that is not there.
    """
    places = {leaf.path: n for n, leaf in enumerate(program.arguments)}
    unknown = [path for path in plan.hosted if path not in places]
    if unknown:
        raise PlanMismatchError(
            f"the plan for {plan.function} keeps argument {unknown[0]} in host memory, which "
            f"{program.name} does not have. Plan again."
        )
    return Asked([places[path] for path in plan.hosted], plan=plan)
