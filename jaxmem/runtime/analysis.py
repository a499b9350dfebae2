"""Make a MemoryReport: every buffer of a schedule with its bytes, lifetime and origin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jaxmem.errors import ReportError
from jaxmem.planner.report import Buffer, MemoryReport
from jaxmem.planner.simulate import Lifetime, Simulation, Simulator
from jaxmem.program.ir import Atom, Block, Op, Program, Value
from jaxmem.program.loops import is_backward, nest
from jaxmem.program.source import checkpoint_names, origin_of
from jaxmem.runtime.compiled import compiled_report
from jaxmem.runtime.known import known_of
from jaxmem.runtime.rates import rates_of
from jaxmem.targets.compiling import Compiled
from jaxmem.targets.target import Target


def report_on(program: Program, target: Target, block: Block, compiled: Compiled) -> MemoryReport:
    """Where the peak of a compiled program is and what fills it, with what was predicted of it.

    Args:
        program: the step as written.
        target: what it was compiled for.
        block: the schedule: ``program.block``, or one with recomputations.
        compiled: the same schedule, compiled.
    """
    predicted = predicted_report(program, target, block, compiled)
    try:
        report = compiled_report(
            compiled.executable,
            function=program.name,
            target=target.name,
            device_bytes=target.device_bytes,
            known=known_of(program),
        )
    except ReportError as error:
        return replace(predicted, notes=(f"the buffers are predicted ones: {error}",))
    return replace(report, equations=program.equations, predicted=predicted)


def predicted_report(
    program: Program, target: Target, block: Block, compiled: Compiled
) -> MemoryReport:
    """Where the peak of a schedule is and what fills it, by the simulator that plans.

    Args:
        program: the step as written.
        target: what it was compiled for.
        block: the schedule: ``program.block``, or one with recomputations.
        compiled: the same schedule, compiled, for its figures.
    """
    simulator = Simulator(rates_of(target))
    simulation = simulator.step(block)
    memory = compiled.memory
    whole = not program.is_counted
    fixed = memory.total_bytes - memory.temp_bytes if whole else program.fixed_bytes
    buffers = [*_arguments(program, simulation), *_results(program, block, simulation)]
    names = checkpoint_names(nest(program.block))
    buffers += _temporaries(block, simulation, names)
    at = simulation.peak_index
    buffers += _inside(block, simulation, simulator, names, at)
    return MemoryReport(
        function=program.name,
        target=target.name,
        device_bytes=target.device_bytes,
        peak_bytes=fixed + simulation.temp_bytes,
        compiled_bytes=compiled.memory.total_bytes,
        compiled_temp_bytes=compiled.memory.temp_bytes,
        argument_bytes=program.argument_bytes,
        output_bytes=program.output_bytes,
        aliased_bytes=program.aliased_bytes,
        peak_index=simulation.peak_index,
        timeline=tuple(fixed + live for live in simulation.timeline),
        phases=_phases(block),
        buffers=tuple(buffers),
        equations=program.equations,
    )


def _array(value: Atom) -> tuple[tuple[int, ...], str]:
    return tuple(getattr(value.aval, "shape", ())), str(getattr(value.aval, "dtype", ""))


def _arguments(program: Program, simulation: Simulation) -> Iterator[Buffer]:
    end = max(0, len(simulation.timeline) - 1)
    values = program.block.inputs
    for number, value in enumerate(values[: len(program.consts)]):
        shape, dtype = _array(value)
        yield Buffer(
            f"constant {number}", value.nbytes, "constant", 0, end, "", "", "", "", "", shape, dtype
        )
    for leaf, value in zip(program.arguments, values[len(program.consts) :], strict=True):
        shape, dtype = _array(value)
        yield Buffer(
            leaf.path, value.nbytes, "argument", 0, end, leaf.path, "", "", "", "", shape, dtype
        )


def _results(program: Program, block: Block, simulation: Simulation) -> Iterator[Buffer]:
    """Result buffers that do not reuse a donated argument."""
    end = max(0, len(simulation.timeline) - 1)
    shared, sizes = program.aliased_results, program.result_bytes
    for number, (leaf, atom) in enumerate(zip(program.results, block.outputs, strict=True)):
        if number in shared:
            continue
        shape, dtype = _array(atom)
        yield Buffer(
            f"result{leaf.path}",
            sizes[number],
            "output",
            0,
            end,
            leaf.path,
            "",
            "",
            "",
            "",
            shape,
            dtype,
        )


def _temporaries(block: Block, simulation: Simulation, names: dict[Value, str]) -> Iterator[Buffer]:
    made = simulation.makers(block.ops)
    turn = next((i for i, op in enumerate(block.ops) if is_backward(op)), len(block.ops))
    for span in simulation.lifetimes:
        crosses = span.start < turn <= span.end
        op, value = _maker(made[span.value], span.value)
        yield _buffer(op, span, names, "residual" if crosses else "temporary", value)


def _maker(op: Op, value: Value) -> tuple[Op, Value]:
    """For a stacked result of a loop the operation inside that makes its slices."""
    if op.loop is None:
        return op, value
    inner = op.loop.body.outputs[list(op.outputs).index(value)]
    for candidate in op.loop.body.ops:
        if inner in candidate.outputs:
            return _maker(candidate, inner) if isinstance(inner, Value) else (op, value)
    return op, value


def _inside(
    block: Block, simulation: Simulation, simulator: Simulator, names: dict[Value, str], at: int
) -> Iterator[Buffer]:
    """What lives only inside the loop, or the region left whole, that runs at the peak."""
    inner = simulator.inside(block.ops[simulation.peak_index]) if block.ops else None
    if inner is None:
        return
    body, running = inner
    made = running.makers(body.ops)
    for span in running.lifetimes:
        if span.start <= running.peak_index <= span.end:
            yield _buffer(made[span.value], Lifetime(span.value, at, at), names, "temporary")
    yield from _inside(body, running, simulator, names, at)


def _buffer(
    op: Op,
    span: Lifetime,
    names: dict[Value, str],
    category: str,
    named: Value | None = None,
) -> Buffer:
    origin = origin_of(op, names.get(named or span.value, ""))
    shape, dtype = _array(span.value)
    return Buffer(
        name=origin.checkpoint_name or origin.primitive,
        nbytes=span.value.nbytes,
        category=category,
        start=span.start,
        end=span.end,
        path="",
        source=origin.source,
        module=origin.module,
        checkpoint_name=origin.checkpoint_name,
        primitive=origin.primitive,
        shape=shape,
        dtype=dtype,
    )


def _phases(block: Block) -> tuple[tuple[str, int], ...]:
    """Where forward, backward and update start."""
    backward = [i for i, op in enumerate(block.ops) if is_backward(op)]
    if not backward:
        return (("forward", 0),)
    marks = [("forward", 0), ("backward", backward[0])]
    if backward[-1] + 1 < len(block.ops):
        marks.append(("update", backward[-1] + 1))
    return tuple(marks)
