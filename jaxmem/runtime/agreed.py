"""Several processes plan one step: the same question, the same answer, or an error on all of them.

A step over devices of several processes waits forever where one of them runs another program.
Planning is deterministic, so each process plans for itself, and all compile the same programs at
the same time, as XLA wants it for autotuning; then they compare what they are to run.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

from jaxmem import processes
from jaxmem.errors import ProcessError
from jaxmem.planner.plan import Plan
from jaxmem.processes import Meeting
from jaxmem.program.ir import Program
from jaxmem.runtime.tries import Outcome

# For those that come: one may still read data when another is ready to plan.
_ARRIVE_SECONDS = 300.0

Decide = Callable[[int, int | None, Plan | None], Outcome]


def is_shared(program: Program) -> bool:
    """Whether a step is over devices of several processes."""
    return processes.several() and any(
        isinstance(layout, Sharding) and not layout.is_fully_addressable
        for layout in program.shardings
    )


def fit(
    program: Program,
    settings: Sequence[str],
    budget: int,
    host_bytes: int | None,
    given: Plan | None,
    decide: Decide,
) -> Outcome:
    """What ``decide`` comes to on all processes, for the least memory that any of them has.

    Args:
        program: the step.
        settings: what has to be the same on all, for people.
        budget: bytes of a device of this process, and ``host_bytes`` of host memory for each.
        given: a plan that is followed.
        decide: plans for these bytes, or follows a plan.

    Raises:
        ProcessError: the step, its arguments or what was asked differ; some processes do not come;
            or, which should not be, they would run different programs.
        JaxmemError: what ``decide`` raised on any of them.
    """
    _check_all_there(program)
    meeting = processes.meet(f"plan {program.name}", _ARRIVE_SECONDS)
    hint = "Run the same code with the same settings, shapes and layouts on all."
    meeting.check_same("question", _question(program, settings, given), "the step", hint)
    said = meeting.exchange("memory", [budget, host_bytes])
    budget = min(its for its, _ in said)
    host_bytes = min((its for _, its in said if its is not None), default=None)
    outcome, same = _decided(meeting, "planned", lambda: decide(budget, host_bytes, given))
    if not same:
        text = meeting.by_first("plan", outcome.plan.to_json)
        first = Plan.from_json(text)
        outcome, same = _decided(meeting, "followed", lambda: decide(budget, host_bytes, first))
    meeting.left()
    if not same:
        raise ProcessError(
            f"the processes follow one plan for {program.name} and would run different programs, "
            "which would wait for each other forever. This is a bug of jaxmem or of XLA, please "
            "report it.",
            processes=(),
        )
    return outcome


def _check_all_there(program: Program) -> None:
    """Processes without a device of the step do not come to plan it: it would wait for them."""
    devices = {d for s in program.shardings if isinstance(s, Sharding) for d in s.device_set}
    missing = tuple(sorted({*range(jax.process_count())} - {d.process_index for d in devices}))
    if missing:
        raise ProcessError(
            f"{program.name} is laid out over devices of some processes only, without those of "
            f"{processes.joined(missing)}. jaxmem plans a step over several processes with all of "
            "them: make the mesh of devices of each, or of this process alone.",
            processes=missing,
        )


def _decided(meeting: Meeting, phase: str, decide: Callable[[], Outcome]) -> tuple[Outcome, bool]:
    """What this process came to, and whether all came to the same."""
    found: list[Outcome] = []
    started = time.monotonic()

    def run() -> str:
        try:
            found.append(decide())
        finally:  # Others may take as long again.
            meeting.timeout = max(_ARRIVE_SECONDS, time.monotonic() - started)
        return _digest(found[0])

    said = meeting.together(phase, run)
    return found[0], len({*said}) == 1


def _question(program: Program, settings: Sequence[str], given: Plan | None) -> list[str]:
    """What has to be the same on all processes, a line for each."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "jaxlib"))
    return [
        versions,
        f"the step {program.name}",
        *settings,
        *(
            f"argument {leaf.path} {_layout(layout)}"
            for leaf, layout in zip(program.arguments, program.shardings, strict=True)
        ),
        f"the program {program.fingerprint}",
        f"the plan {_hash(given.to_json())[:12]}" if given is not None else "no plan",
    ]


def _layout(layout: Any) -> str:
    if isinstance(layout, NamedSharding):
        return f"as {layout.spec} over {dict(layout.mesh.shape)}"
    return "on one device" if layout is None else str(layout)


def _digest(outcome: Outcome) -> str:
    """Of the program that will run, or all of them in order."""
    more = () if outcome.stream is None else outcome.stream.lowered
    return _hash("".join(lowered.as_text() for lowered in (outcome.compiled.lowered, *more)))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
