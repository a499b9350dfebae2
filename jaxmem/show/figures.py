"""What targets, profiles, benchmarks and fitted steps show."""

from __future__ import annotations

import statistics

from jaxmem.fitted import FittedStep
from jaxmem.runtime.benchmark import Benchmark, Timed
from jaxmem.runtime.profile import StepProfile
from jaxmem.show.pages import Item, Page
from jaxmem.show.rows import NOTE_LIMIT, Grid, clean, percent_text, plan_rows
from jaxmem.targets.target import Target
from jaxmem.units import format_bytes, format_seconds


def target_page(target: Target) -> Page:
    """Returns what a target shows: memory, arithmetic, links, and where the figures are from."""
    each = " of each device" if target.device_count > 1 else ""
    host = " of each host" if target.hosts > 1 else ""
    memory = (
        (f"device{each}, usable", format_bytes(target.device_bytes)),
        (f"host{host}", format_bytes(target.host_bytes)),
        ("pinned by one process", format_bytes(target.pinned_host_bytes)),
    )
    links = (
        ("device memory", target.hbm_bytes_per_second),
        ("host to device", target.h2d_bytes_per_second),
        ("device to host", target.d2h_bytes_per_second),
        ("between them, each way at once", target.duplex_bytes_per_second),
        ("device to device", target.d2d_bytes_per_second),
    )
    hosts = f"{target.hosts} hosts with " if target.hosts > 1 else ""
    devices = f"{hosts}{target.devices_per_host} device{'s' * (target.devices_per_host > 1)}"
    rates = sorted(target.flops.items(), key=lambda item: (-item[1], item[0]))
    sources = tuple(clean(source, NOTE_LIMIT) for source in target.sources)
    return Page(
        clean(target.name),
        (f"{target.platform}, {devices}",),
        items=(Item("the figures are from", sources),) if sources else (),
        grids=(
            Grid("memory", ("memory of", "bytes"), (0,), memory),
            Grid(
                "matrix products",
                ("dtype", "TFLOP/s"),
                (0,),
                tuple((clean(name, 24), f"{rate / 1e12:.4g}") for name, rate in rates),
            ),
            Grid(
                "links",
                ("link", "GB/s"),
                (0,),
                tuple((name, f"{rate / 1e9:.4g}") for name, rate in links),
            ),
        ),
    )


def profile_page(profile: StepProfile) -> Page:
    """Returns what a profile shows: what the device did in a step, and for how long."""
    whole = profile.step_seconds
    figures = (
        ("computed", profile.computing_seconds),
        ("copied to or from the host", profile.copying_seconds),
        ("only copied", profile.exposed_seconds),
        ("did nothing", profile.idle_seconds),
    )
    rows = tuple((what, format_seconds(s), percent_text(s, whole)) for what, s in figures)
    return Page(
        f"a step of {format_seconds(whole)}",
        ("computing and copying overlap: what copies cost is the time in which it only copied",),
        grids=(Grid("the device", ("the device", "time", "share"), (0,), rows),),
    )


def bench_page(found: Benchmark) -> Page:
    """Returns what a benchmark shows: bytes and seconds of the two programs."""

    def row(program: Timed) -> tuple[str, ...]:
        median = program.median_seconds
        spread = ""
        if median is not None:
            low, _, high = statistics.quantiles(program.seconds, n=4)
            spread = format_seconds(high - low)
        return (
            program.name,
            format_bytes(program.compiled_bytes),
            format_seconds(program.predicted_seconds),
            "" if median is None else format_seconds(median),
            spread,
            str(len(program.seconds)) if program.seconds else "",
            program.why,
        )

    header = ("program", "compiled", "predicted", "measured", "spread", "runs", "why not")
    return Page(
        f"{clean(found.function)} on {clean(found.target)}",
        (
            f"planned for {format_bytes(found.budget_bytes)} by {clean(found.solver)}",
            "compiled: the compiler's peak; measured: the median of the runs, which took turns; "
            "spread: of the middle half of them",
        ),
        grids=(Grid("a step", header, (6, 0), tuple(map(row, found.programs))),),
    )


def fitted_page(step: FittedStep) -> Page:
    """Returns what a fitted step shows: what it was asked for, and its plans so far."""
    how = step._planning
    settings = {
        "budget": how.budget,
        "target": how.wanted_target and how.target.name,
        "host": how.hosts,
        "policy": how.policy,
    }
    asked = [f"{name}={clean(value)}" for name, value in settings.items() if value]
    rows = tuple(
        (
            clean(plan.target),
            format_bytes(plan.budget_bytes),
            format_bytes(plan.compiled_bytes),
            format_seconds(plan.predicted_seconds),
            plan_rows(plan).verdict,
        )
        for plan in step.plans
    )
    header = ("target", "limit", "compiled", "step", "plan")
    several = f"planned for {len(rows)} signature{'s' * (len(rows) != 1)} so far"
    return Page(
        f"{clean(step._caller.name)}, fitted: {', '.join(asked) or 'all of the device'}",
        (several if rows else "not planned yet: the first call or .plan(...) plans it",),
        grids=(Grid("plans", header, (4, 0), rows),),
    )
