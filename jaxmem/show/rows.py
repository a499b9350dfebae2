"""What a plan or a report shows, as plain strings and numbers: no terminal and no HTML in here.

Both renderings read the same rows, so they cannot disagree. Every name that comes from a user's
program goes through :func:`clean`, so a renderer only has to escape its own syntax.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from jaxmem.errors import BudgetInfeasibleError, Holder
from jaxmem.planner.decisions import Decision, Round
from jaxmem.planner.plan import Plan
from jaxmem.planner.report import Buffer, MemoryReport
from jaxmem.units import format_budget, format_bytes, format_seconds

# Columns of figures: never cut, and set to the right.
NUMERIC = frozenset(
    (
        "#,bytes,share,cost,limit,predicted,compiled,measured,peak,step,time,per GiB,faster,"
        "TFLOP/s,GB/s,spread,runs,per device,size,times"
    ).split(",")
)
NAME_LIMIT = 80
NOTE_LIMIT = 400
_ZERO_WIDTH_JOINER = "\u200d"  # glues emoji together; the only format character worth keeping
_SHORT_DTYPE = (("uint", "u"), ("int", "i"), ("bfloat", "bf"), ("float", "f"), ("complex", "c"))


@dataclass(frozen=True)
class Bar:
    """One labelled amount of memory; ``share`` is a part of some whole, or ``None``."""

    label: str
    nbytes: int
    share: float | None = None

    @property
    def size(self) -> str:
        """The amount as people read it."""
        return format_bytes(self.nbytes)


@dataclass(frozen=True)
class Grid:
    """A table with columns that may be cut, or left out where there is no room.

    Attributes:
        title: one line above the table.
        header: column names.
        flexible: indices of the columns that may be cut, in the order in which they are kept.
        rows: one tuple of strings per row, as long as ``header``.
        more: what was left out, for instance ``"… and 31 more (1.2GiB)"``, or ``""``.
    """

    title: str
    header: tuple[str, ...]
    flexible: tuple[int, ...]
    rows: tuple[tuple[str, ...], ...]
    more: str = ""


@dataclass(frozen=True)
class PlanRows:
    """Everything a plan shows. ``tone`` is ``"good"``, ``"changed"`` or ``"bad"``."""

    headline: str
    verdict: str
    tone: str
    budget: Bar
    bars: tuple[Bar, ...]
    makeup: str
    solver: str
    decisions: Grid
    rounds: Grid
    notes: tuple[str, ...]


@dataclass(frozen=True)
class ReportRows:
    """Everything a report shows; ``phases`` are (name, first index) and in order."""

    headline: str
    verdict: str
    tone: str
    makeup: str
    device: Bar
    bars: tuple[Bar, ...]
    categories: tuple[Bar, ...]
    timeline: tuple[int, ...]
    phases: tuple[tuple[str, int], ...]
    peak_index: int
    peak_bytes: int
    buffers: Grid
    arguments: Grid
    modules: Grid
    sources: Grid
    notes: tuple[str, ...] = ()


def clean(text: object, limit: int = NAME_LIMIT) -> str:
    r"""Returns one line of at most about ``limit`` characters that cannot steer what shows it.

    The middle of a long name is cut out. Control characters (also terminal escapes and line
    ends), characters that change the reading direction and lone surrogates become visible
    escapes.

    >>> clean("mlp\x1b[31m\u202eup")
    'mlp\\x1b[31m\\u202eup'
    >>> clean("a" * 50 + "b" * 50, limit=9)
    'aaaa…bbbb'
    """
    name = str(text)
    if len(name) > limit:
        head = limit // 2
        name = f"{name[:head]}…{name[len(name) - (limit - head - 1) :]}"
    return "".join(map(_visible, name))


def _visible(character: str) -> str:
    steers = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    if steers and character != _ZERO_WIDTH_JOINER:
        return character.encode("unicode_escape").decode("ascii")
    return character


def type_text(dtype: str, shape: Sequence[int], count: int = 1) -> str:
    """Returns an array type as JAX writes it, with how many there are.

    >>> type_text("bfloat16", (8, 2048), count=3)
    '3 x bf16[8,2048]'
    """
    short = clean(dtype, 24)
    for long, letter in _SHORT_DTYPE:
        if short.startswith(long):
            short = letter + short.removeprefix(long)
            break
    dims = clean(",".join(map(str, shape)), 40)
    return f"{count} x {short}[{dims}]" if count != 1 else f"{short}[{dims}]"


def percent_text(part: float, whole: float) -> str:
    """Returns a share as whole percent, ``"<1%"`` for what would round to nothing.

    >>> percent_text(1, 3), percent_text(1, 1000), percent_text(0, 5), percent_text(1, 0)
    ('33%', '<1%', '0%', '-')
    """
    if whole <= 0:
        return "-"
    percent = 100 * part / whole
    return "<1%" if 0 < percent < 0.5 else f"{percent:.0f}%"


def plan_rows(plan: Plan, top: int = 12) -> PlanRows:
    """Returns what a plan shows, with the ``top`` largest decisions."""
    verdict, tone = _plan_verdict(plan)
    if plan.measured_seconds is not None:
        verdict += f"; measured {format_seconds(plan.measured_seconds)} a step"
    keep_all = plan.keep_all_compiled_bytes
    bars = (
        Bar("compiled", plan.compiled_bytes),
        Bar("predicted", plan.predicted_bytes),
        Bar("keep-all", keep_all)
        if keep_all is not None
        else Bar("keep-all, predicted", plan.keep_all_predicted_bytes),
    )
    return PlanRows(
        headline=f"{clean(plan.function)} on {clean(plan.target)}",
        verdict=verdict,
        tone=tone,
        budget=Bar("budget", plan.budget_bytes),
        bars=bars,
        makeup=_makeup(plan) + _on_host(plan),
        solver=clean(_solver(plan), NOTE_LIMIT),
        decisions=_decision_grid(plan.decisions, top),
        rounds=_round_grid(plan.rounds, plan.budget_bytes),
        notes=tuple(clean(note, NOTE_LIMIT) for note in plan.notes),
    )


def _on_host(plan: Plan) -> str:
    """What is in host memory, and how long a step waits for it."""
    if not plan.host_bytes:
        return ""
    text = f", host {format_bytes(plan.host_bytes)}"
    if plan.streamed is not None:
        s = plan.streamed
        most = max(s.fetched_bytes, s.sent_bytes)
        how = f"each way in {s.updates} updates" if s.updates else f"fetched in {s.stages} stages"
        text += f" ({format_bytes(most)} {how})"
    text += f", copies not hidden {format_seconds(plan.exposed_seconds)}"
    found = {"compiled": plan.compiled_exposed_seconds, "measured": plan.measured_exposed_seconds}
    told = [f"{how} {format_seconds(s)}" for how, s in found.items() if s is not None]
    if told:
        text += f" ({', '.join(told)})"
    return text


def report_rows(report: MemoryReport, top: int = 10) -> ReportRows:
    """Returns what a report shows, with the ``top`` largest entries of each table."""
    verdict, tone = _report_verdict(report)
    whole = report.peak_bytes
    phases = sorted((p for p in report.phases if p[1] < len(report.timeline)), key=lambda p: p[1])
    return ReportRows(
        headline=f"{clean(report.function)} on {clean(report.target)}",
        verdict=verdict,
        tone=tone,
        makeup=f"{_makeup(report)}, temporaries {format_bytes(report.compiled_temp_bytes)}",
        device=Bar("device", report.device_bytes),
        bars=(
            Bar("compiled", report.compiled_bytes),
            *([Bar("predicted", report.predicted_bytes)] if report.predicted_bytes else []),
        ),
        categories=tuple(
            Bar(clean(name, 24), nbytes, nbytes / whole if whole > 0 else None)
            for name, nbytes in report.by_category().items()
        ),
        timeline=report.timeline,
        phases=tuple((clean(name, 24), max(0, start)) for name, start in phases),
        peak_index=report.peak_index,
        peak_bytes=report.peak_bytes,
        buffers=_buffer_grid(report.at_peak(), whole, top),
        arguments=_sum_grid("arguments at the peak", "argument", report.by_argument(), whole, top),
        modules=_sum_grid("by module, at the peak", "module", report.by_module(), whole, top),
        sources=_sum_grid("by source line, at the peak", "line", report.by_source(), whole, top),
        notes=tuple(clean(note, NOTE_LIMIT) for note in report.notes),
    )


def infeasible_grid(error: BudgetInfeasibleError, top: int = 10) -> Grid:
    """Returns what holds the memory of the smallest program that was found."""

    def row(holder: Holder) -> tuple[str, ...]:
        share = percent_text(holder.nbytes, error.smallest_bytes)
        return format_bytes(holder.nbytes), share, clean(holder.kind, 16), clean(holder.name)

    holders = sorted(error.holders, key=lambda h: (-h.nbytes, h.name))
    title = f"what fills the smallest peak found, {format_budget(error.smallest_bytes)}"
    more = more_text(h.nbytes for h in holders[top:])
    header = ("bytes", "share", "kind", "name")
    return Grid(title, header, (3,), tuple(map(row, holders[:top])), more)


def resampled(timeline: Sequence[int], columns: int) -> list[int]:
    """Returns the timeline in at most ``columns`` values, each the largest of its stretch.

    A timeline shorter than that is stretched by a whole factor.

    >>> resampled([1, 9, 2, 3], 2), resampled([1, 9], 5)
    ([9, 3], [1, 1, 9, 9])
    """
    count = len(timeline)
    if count == 0:
        return []
    if count <= columns:
        return [value for value in timeline for _ in range(columns // count)]
    cuts = [column * count // columns for column in range(columns + 1)]
    return [max(timeline[first:last]) for first, last in pairwise(cuts)]


def column_of(index: int, count: int, columns: int) -> int:
    """Returns the first column of :func:`resampled` that shows timeline ``index``.

    >>> [column_of(i, 5, 3) for i in range(5)], [column_of(i, 2, 5) for i in range(2)]
    ([0, 1, 1, 2, 2], [0, 2])
    """
    if count <= columns:
        return index * (columns // count)
    return ((index + 1) * columns - 1) // count


def _makeup(shown: Plan | MemoryReport) -> str:
    text = f"arguments {format_bytes(shown.argument_bytes)}"
    text += f", outputs {format_bytes(shown.output_bytes)}"
    if shown.aliased_bytes:
        text += f" ({format_bytes(shown.aliased_bytes)} of them reuse donated arguments)"
    return text


def _plan_verdict(plan: Plan) -> tuple[str, str]:
    values = sum(d.count for d in plan.decisions)
    again = sum(d.recomputed for d in plan.decisions)
    if again:
        words = f"recomputes {again} of {values} values, {_time_change(plan)}"
    elif plan.solver == "keep-all" and plan.streamed is not None:
        words = f"recomputes nothing, {_time_change(plan)}"
    elif plan.solver == "keep-all":
        words = "unchanged: keep-all fits"
    else:
        words = f"recomputes none of {values} values"
    if plan.microbatches > 1:
        rest = words if again else f"nothing recomputed, {_time_change(plan)}"
        words = f"{plan.microbatches} microbatches, {rest}"
    changed = again or plan.microbatches > 1 or plan.streamed is not None
    over = plan.compiled_bytes - plan.budget_bytes
    if over > 0:
        words = f"over budget: {words}" if changed else "over budget"
        return f"{words} ({format_bytes(over)} too much)", "bad"
    return words, "changed" if changed else "good"


def _solver(plan: Plan) -> str:
    """Who made the plan, why that one, and what is known of how good it is."""
    text = f"solver: {plan.solver}"
    text += f": {plan.why}" if plan.why else ""
    if plan.gap is None or not math.isfinite(plan.gap):
        return text
    share = f"{100 * plan.gap:.1f}%"
    close = "the optimum on paper" if share == "0.0%" else f"at most {share} from the paper optimum"
    return f"{text}; {close} without nesting"


def _time_change(plan: Plan) -> str:
    extra, base = plan.recompute_seconds, plan.keep_all_seconds
    if not (math.isfinite(extra) and math.isfinite(base)):
        return "predicted time unknown"
    sign = "-" if extra < 0 else "+"
    change = f"{sign}{format_seconds(abs(extra))}"
    if base > 0:
        change = f"{sign}{100 * abs(extra) / base:.1f}%"
    return f"{change} predicted time ({format_seconds(plan.predicted_seconds)} a step)"


def _decision_grid(decisions: Sequence[Decision], top: int) -> Grid:
    def row(decision: Decision) -> tuple[str, ...]:
        again, away, count = decision.recomputed, decision.offloaded, decision.count
        action = clean(decision.action, 16)
        if 0 < again + away and max(again, away) < count:
            parts = [f"recompute {again}" if again else "", f"offload {away}" if away else ""]
            action = f"{', '.join(filter(None, parts))} of {count}"
        name, primitive = clean(decision.checkpoint_name), clean(decision.primitive, 40)
        return (
            format_bytes(decision.nbytes),
            action,
            f"+{format_seconds(decision.seconds)}" if again else "",
            f"{name} ({primitive})" if name else primitive,
            type_text(decision.dtype, decision.shape, count),
            clean(decision.source),
            clean(decision.module),
        )

    ordered = sorted(decisions, key=lambda d: (-d.nbytes, d.key))
    header = ("bytes", "decision", "cost", "value", "type", "source", "module")
    return Grid(
        "values that live from forward to backward",
        header,
        (3, 5, 4, 6),
        tuple(map(row, ordered[:top])),
        more_text(d.nbytes for d in ordered[top:]),
    )


def _round_grid(rounds: Sequence[Round], budget_bytes: int) -> Grid:
    def row(number: int, entry: Round) -> tuple[str, ...]:
        over = f"over by {format_bytes(entry.compiled_bytes - budget_bytes)}"
        return (
            str(number),
            clean(entry.name, 32),
            format_bytes(entry.limit_bytes),
            format_bytes(entry.predicted_bytes),
            format_bytes(entry.compiled_bytes),
            "" if entry.measured_seconds is None else format_seconds(entry.measured_seconds),
            clean(entry.problem) or ("fits" if entry.fits else over),
        )

    header = ("#", "compile", "limit", "predicted", "compiled", "measured", "outcome")
    rows = tuple(row(number, entry) for number, entry in enumerate(rounds, 1))
    if all(entry.measured_seconds is None for entry in rounds):
        header, rows = header[:5] + header[6:], tuple(r[:5] + r[6:] for r in rows)
    return Grid("compiles", header, (len(header) - 1, 1), rows)


def _report_verdict(report: MemoryReport) -> tuple[str, str]:
    where = f"at operation {report.peak_index + 1} of {len(report.timeline)}"
    before = [name for name, start in report.phases if start <= report.peak_index]
    phase = f" ({clean(before[-1], 24)})" if before else ""
    words = f"peak {format_bytes(report.peak_bytes)} {where}{phase}"
    if report.source == "predicted":
        words = f"predicted {words}; compiled {format_bytes(report.compiled_bytes)}"
    over = report.compiled_bytes - report.device_bytes
    if over > 0 and report.device_bytes:
        return f"{words}, {format_bytes(over)} more than the device has", "bad"
    if not report.device_bytes:
        return words, "good"
    used = percent_text(report.compiled_bytes, report.device_bytes)
    return f"{words}, {used} of the device", "good"


def _buffer_grid(buffers: Sequence[Buffer], whole: int, top: int) -> Grid:
    """One row for buffers that differ only in when they live: the same line of many layers."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for buffer in buffers:
        form = type_text(buffer.dtype, buffer.shape)
        what = (clean(buffer.category, 16), clean(buffer.name), form, clean(buffer.source))
        alike.setdefault((*what, _place(buffer)), []).append(buffer.nbytes)

    def row(what: tuple[str, ...], sizes: list[int]) -> tuple[str, ...]:
        category, name, form, *where = what
        form = f"{len(sizes)} x {form}" if len(sizes) > 1 else form
        nbytes = sum(sizes)
        return format_bytes(nbytes), percent_text(nbytes, whole), category, name, form, *where

    ordered = sorted(alike.items(), key=lambda item: (-sum(item[1]), item[0]))
    header = ("bytes", "share", "category", "buffer", "type", "source", "module or name")
    rows = tuple(row(*item) for item in ordered[:top])
    more = more_text(sum(sizes) for _, sizes in ordered[top:])
    return Grid("largest buffers at the peak", header, (3, 5, 4, 6), rows, more)


def _place(buffer: Buffer) -> str:
    module, name = clean(buffer.module), clean(buffer.checkpoint_name)
    return f"{module}: {name}" if module and name else module or name


def _sum_grid(title: str, what: str, sums: Mapping[str, int], whole: int, top: int) -> Grid:
    items = list(sums.items())
    rows = tuple((format_bytes(n), percent_text(n, whole), clean(name)) for name, n in items[:top])
    more = more_text(nbytes for _, nbytes in items[top:])
    return Grid(title, ("bytes", "share", what), (2,), rows, more)


def more_text(rest: Iterable[int]) -> str:
    sizes = list(rest)
    return f"… and {len(sizes)} more ({format_bytes(sum(sizes))})" if sizes else ""
