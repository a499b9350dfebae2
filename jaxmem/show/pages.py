"""What explanations, differences, frontiers and layouts show: sentences, items and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from jaxmem.errors import Holder
from jaxmem.planner.difference import Moved, PlanDiff
from jaxmem.planner.explain import Explanation, Reason
from jaxmem.planner.frontier import Frontier, Point, pareto, thinned
from jaxmem.planner.fusions import Fusion, FusionReport, Unfused
from jaxmem.show.rows import NOTE_LIMIT, Grid, clean, percent_text, type_text
from jaxmem.state.sharded import Sharded, ShardedLeaf
from jaxmem.units import GIB, format_bytes, format_seconds

_MOST_POINTS = 16


@dataclass(frozen=True)
class Item:
    """One thing and what there is to say about it."""

    head: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Page:
    """Everything that is shown, from top to bottom."""

    headline: str
    sentences: tuple[str, ...] = ()
    items: tuple[Item, ...] = ()
    more: str = ""
    grids: tuple[Grid, ...] = ()


def explanation_page(explanation: Explanation, top: int = 8) -> Page:
    """Returns what an explanation shows, with the ``top`` largest values."""
    query = f": {clean(explanation.query)}" if explanation.query else ""
    rest = explanation.reasons[top:]
    size = format_bytes(sum(reason.nbytes for reason in rest))
    return Page(
        headline=f"{clean(explanation.function)} on {clean(explanation.target)}{query}",
        sentences=tuple(clean(s, NOTE_LIMIT) for s in explanation.sentences),
        items=tuple(map(_reason_item, explanation.reasons[:top])),
        more=f"… and {len(rest)} more ({size})" if rest else "",
        grids=(_holder_grid(explanation.holders),) if explanation.holders else (),
    )


def diff_page(diff: PlanDiff, top: int = 20) -> Page:
    """Returns what a difference shows, with the ``top`` first values of it."""
    names = dict.fromkeys((diff.function, diff.other_function))
    headline = " -> ".join(map(clean, names))
    if not diff:
        return Page(headline, ("no difference",))
    sums: dict[str, list[int]] = {}
    for moved in diff.moved:
        sums.setdefault(moved.kind, []).append(moved.nbytes)
    sentences = [
        f"{kind}: {len(sizes)} group{'s' * (len(sizes) > 1)} of values, {format_bytes(sum(sizes))}"
        for kind, sizes in sums.items()
    ]
    if not diff.same_program:
        sentences.insert(
            0,
            "the fingerprints differ: these plans are for different programs or shapes, and "
            "values are matched by line, module and operation",
        )
    rest = diff.moved[top:]
    more = f"… and {len(rest)} more ({format_bytes(sum(m.nbytes for m in rest))})" if rest else ""
    rows = tuple((c.name, clean(c.before), clean(c.after)) for c in diff.changes)
    return Page(
        headline,
        tuple(sentences),
        grids=(
            Grid("figures and settings", ("what", "before", "after"), (1, 2), rows),
            Grid(
                "values treated differently",
                ("bytes", "change", "value", "type", "source", "module"),
                (2, 4, 3, 5),
                tuple(map(_moved_row, diff.moved[:top])),
                more,
            ),
        ),
    )


def frontier_page(frontier: Frontier) -> Page:
    """Returns what a frontier shows: its points and, to compare, the stock policies."""
    figures = "predicted and compiled" if frontier.compiled else "predicted, not compiled"
    points = pareto(frontier.points)
    first, last = points[0], points[-1]
    sentences = [
        f"{figures}: from {format_bytes(first.peak_bytes)} and {format_seconds(first.seconds)} a "
        f"step to {format_bytes(last.peak_bytes)} and {format_seconds(last.seconds)}"
    ]
    return Page(
        f"frontier of {clean(frontier.function)} on {clean(frontier.target)}",
        tuple(sentences),
        grids=(_point_grid(frontier, points), _stock_grid(frontier)),
    )


def fusion_page(report: FusionReport, top: int = 12) -> Page:
    """Returns what a fusion report shows: what still goes through memory, and what does not."""
    saved = sum(f.saved_bytes * f.times for f in report.fusions)
    traffic = sum(u.traffic_bytes for u in report.unfused)
    sentences = (
        f"{len(report.fusions)} of {report.kernels} kernels are fusions; they keep "
        f"{format_bytes(saved)} a step out of memory",
        f"{len(report.unfused)} results of element-wise work are still written and read, "
        f"{format_bytes(traffic)} a step"
        if report.unfused
        else "no result of element-wise work is written only for work of that kind to read it",
    )
    return Page(
        f"fusions of {clean(report.function)} on {clean(report.target or 'this machine')}",
        sentences,
        grids=(_unfused_grid(report.unfused, top), _fusion_grid(report.fusions, top)),
    )


def _unfused_grid(unfused: Sequence[Unfused], top: int) -> Grid:
    rest = format_bytes(sum(u.traffic_bytes for u in unfused[top:]))
    return Grid(
        "what a fusion would remove; bytes: written and read in a step",
        ("bytes", "size", "times", "category", "made by", "type", "source", "read at", "module"),
        (4, 6, 7, 5, 8),
        tuple(
            (
                format_bytes(u.traffic_bytes),
                format_bytes(u.nbytes),
                str(u.times),
                clean(u.category, 16),
                clean(u.primitive or u.name),
                type_text(u.dtype, u.shape),
                clean(u.source),
                clean(", ".join(u.readers)),
                clean(u.module),
            )
            for u in unfused[:top]
        ),
        f"… and {len(unfused) - top} more ({rest})" if len(unfused) > top else "",
    )


def _fusion_grid(fusions: Sequence[Fusion], top: int) -> Grid:
    rest = format_bytes(sum(f.saved_bytes * f.times for f in fusions[top:]))
    return Grid(
        "what is fused; bytes: what that keeps out of memory in a step",
        ("bytes", "times", "kind", "operations", "source", "module"),
        (3, 4, 5),
        tuple(
            (
                format_bytes(f.saved_bytes * f.times),
                str(f.times),
                clean(f.kind, 12),
                f"{f.operations}: {clean(', '.join(f.primitives))}",
                clean(f.source),
                clean(f.module),
            )
            for f in fusions[:top]
        ),
        f"… and {len(fusions) - top} more ({rest})" if len(fusions) > top else "",
    )


def sharded_page(sharded: Sharded, top: int = 20) -> Page:
    """Returns what a layout over a mesh shows: the leaves that take most of each device."""
    whole = sum(leaf.nbytes for leaf in sharded.leaves)
    axes = ", ".join(f"{clean(name)}={size}" for name, size in sharded.axes.items())
    host = f" and {format_bytes(sharded.host_bytes)} of its host" if sharded.host_bytes else ""
    ordered = sorted(sharded.leaves, key=lambda leaf: (-leaf.device_bytes, leaf.path))
    return Page(
        f"{format_bytes(whole)} over {axes}",
        (f"{format_bytes(sharded.device_bytes)} of each device{host}",),
        items=tuple(Item(clean(text, NOTE_LIMIT), ()) for text in sharded.warnings),
        grids=(_leaf_grid(ordered[:top], ordered[top:]),),
    )


def _leaf_grid(leaves: Sequence[ShardedLeaf], left: Sequence[ShardedLeaf]) -> Grid:
    rest = format_bytes(sum(leaf.device_bytes for leaf in left))
    return Grid(
        "what each device has",
        ("leaf", "type", "split over", "bytes", "per device", "memory"),
        (0, 2),
        tuple(
            (
                clean(leaf.path),
                type_text(leaf.dtype, leaf.shape),
                ", ".join(map(_axes_text, leaf.spec)) or "-",
                format_bytes(leaf.nbytes),
                format_bytes(leaf.device_bytes),
                "pinned host" if leaf.on_host else "device",
            )
            for leaf in leaves
        ),
        f"… and {len(left)} more ({rest})" if left else "",
    )


def _axes_text(entry: object) -> str:
    if entry is None:
        return "-"
    return "+".join(map(clean, entry)) if isinstance(entry, tuple) else clean(entry)


def _reason_item(reason: Reason) -> Item:
    d, matched = reason.decision, len(reason.matched)
    what = clean(d.checkpoint_name or d.primitive)
    if d.checkpoint_name:
        what = f"{what} ({clean(d.primitive, 40)})"
    names = (what, type_text(d.dtype, d.shape, matched), clean(d.source), clean(_module(reason)))
    lines = [f"{clean(reason.why, NOTE_LIMIT)}."]
    if matched < d.count:
        here = "recomputed" if reason.recomputed == matched else "kept"
        if 0 < reason.recomputed < matched:
            here = f"{reason.recomputed} recomputed"
        these = "this one" if matched == 1 else f"these {matched}"
        lines.append(f"It is decided with {d.count} equal values; of them {these}: {here}.")
    if reason.kept_from_bytes is not None:
        lines.append(
            f"All of it would be kept from a budget of about {format_bytes(reason.kept_from_bytes)}"
            " on."
        )
    return Item("  ".join([format_bytes(reason.nbytes), *filter(None, names)]), tuple(lines))


def _module(reason: Reason) -> str:
    d = reason.decision
    modules = list(dict.fromkeys(d.modules[n] for n in reason.matched)) if d.modules else [d.module]
    return modules[0] if len(modules) == 1 else f"{modules[0]} … {modules[-1]}"


def _holder_grid(holders: tuple[Holder, ...]) -> Grid:
    rows = tuple((format_bytes(h.nbytes), clean(h.kind, 16), clean(h.name)) for h in holders)
    return Grid("what fills the predicted peak", ("bytes", "kind", "name"), (2,), rows)


def _moved_row(moved: Moved) -> tuple[str, ...]:
    d = moved.decision
    name, primitive = clean(d.checkpoint_name), clean(d.primitive, 40)
    return (
        format_bytes(moved.nbytes),
        _change_text(moved),
        f"{name} ({primitive})" if name else primitive,
        type_text(d.dtype, d.shape, d.count),
        clean(d.source),
        clean(d.module),
    )


def _change_text(moved: Moved) -> str:
    a, b = moved.before, moved.after
    if a is None or b is None:
        return moved.kind
    words = []
    for d in (a, b):
        some = f" {d.recomputed} of {d.count}" if d.recomputed not in (0, d.count) else ""
        words.append(f"{clean(d.action, 16)}{some}")
    return " -> ".join(words) if words[0] != words[1] else moved.kind


def _point_grid(frontier: Frontier, points: list[Point]) -> Grid:
    shown = thinned(points, _MOST_POINTS)
    prices = [
        f"{format_seconds((a.seconds - b.seconds) / max(1, b.peak_bytes - a.peak_bytes) * GIB)}"
        for a, b in pairwise(shown)
    ]
    rows = tuple(
        (*_figures(p), price, clean(p.problem), clean(p.solver))
        for p, price in zip(shown, [*prices, ""], strict=True)
    )
    more = f"… and {len(points) - len(shown)} more between" if len(points) > len(shown) else ""
    header = ("peak", "compiled", "step", "time", "per GiB", "undone", "found by")
    return Grid("best programs; per GiB: saved up to the next", header, (6, 5), rows, more)


def _stock_grid(frontier: Frontier) -> Grid:
    rows = tuple(
        (chr(ord("a") + n % 26), *_figures(p), faster, clean(p.solver))
        for n, (p, faster) in enumerate(zip(frontier.stock, _faster(frontier), strict=True))
    )
    header = ("#", "peak", "compiled", "step", "time", "faster", "policy")
    return Grid("policies; faster: the frontier with no more bytes", header, (6,), rows)


def _faster(frontier: Frontier) -> Iterator[str]:
    for policy in frontier.stock:
        within = [p.seconds for p in frontier.points if p.peak_bytes <= policy.peak_bytes]
        yield percent_text(policy.seconds - min(within), policy.seconds) if within else ""


def _figures(point: Point) -> tuple[str, str, str, str]:
    compiled = "" if point.compiled_bytes is None else format_bytes(point.compiled_bytes)
    more = f"{100 * point.recompute_share:+.1f}%"
    return format_bytes(point.peak_bytes), compiled, format_seconds(point.seconds), more
