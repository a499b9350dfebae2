"""Plans and reports made by hand, small enough to check every rendered character."""

from jaxmem.errors import Holder
from jaxmem.planner.decisions import Decision, Larger, Round
from jaxmem.planner.frontier import Frontier, Point
from jaxmem.planner.plan import Plan
from jaxmem.planner.report import Buffer, MemoryReport

MIB, GIB = 2**20, 2**30
HOSTILE = (
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>&amp;",
    "x" * 10_000,
    "🔥👩\u200d🔬 :fire:",
    "\u202eevil\u2066\u200f שלום",
    "[red]hot[/red] [link=http://a.b]c[/link] [/]",
    "\x1b[31mred\x1b]0;title\x07\r\n\x00\ud800\u2028",
    "",
)


def decision(index: int = 0, **changes) -> Decision:
    """A kept group of 16 equal values, 64 MiB each."""
    fields = {
        "key": f"g{index:03}",
        "action": "keep",
        "count": 16,
        "recomputed": 0,
        "nbytes": GIB,
        "seconds": 0.0,
        "primitive": "dot_general",
        "shape": (8, 2048, 2048),
        "dtype": "bfloat16",
        "source": "train.py:41 (mlp)",
        "module": "block/mlp",
        "checkpoint_name": "",
    }
    return Decision(**{**fields, **changes})


def plan(**changes) -> Plan:
    """A plan that recomputes 18 of 42 values."""
    fields = {
        "function": "train_step",
        "target": "h200",
        "budget_bytes": 20 * GIB,
        "predicted_bytes": 18 * GIB,
        "compiled_bytes": 19 * GIB,
        "argument_bytes": 4 * GIB,
        "output_bytes": 4 * GIB,
        "aliased_bytes": 4 * GIB,
        "keep_all_predicted_bytes": 29 * GIB,
        "keep_all_compiled_bytes": 30 * GIB,
        "predicted_seconds": 0.1061,
        "keep_all_seconds": 0.1,
        "decisions": (
            decision(1, nbytes=2 * GIB, count=10),
            decision(2, nbytes=8 * GIB, count=16, recomputed=16, action="recompute", seconds=5e-3),
            decision(
                3,
                nbytes=4 * GIB,
                recomputed=2,
                action="recompute",
                seconds=1.1e-3,
                checkpoint_name="up",
                primitive="mul",
            ),
        ),
        "solver": "greedy",
        "why": "a chain of 16 stages, of which 3 are distinct",
        "bound_seconds": 0.1061 / 1.012,
        "rounds": (
            Round("keep-all", 20 * GIB, 29 * GIB, 30 * GIB, False),
            Round("search", 20 * GIB, 18 * GIB, 19 * GIB, True),
        ),
        "fingerprint": "f" * 8,
        "notes": ("planned for h200, which is not this machine.",),
    }
    return Plan(**{**fields, **changes})


def buffer(nbytes: int, category: str, **changes) -> Buffer:
    """A buffer that lives all the time."""
    fields = {
        "name": "dot_general",
        "nbytes": nbytes,
        "category": category,
        "start": 0,
        "end": 100,
        "path": "",
        "source": "train.py:41 (mlp)",
        "module": "block/mlp",
        "checkpoint_name": "",
        "primitive": "dot_general",
        "shape": (8, 2048, 2048),
        "dtype": "bfloat16",
    }
    return Buffer(**{**fields, **changes})


def report(**changes) -> MemoryReport:
    """A report of 12 operations with the peak at the eighth."""
    argument = {"source": "", "module": "", "primitive": "", "dtype": "float32"}
    fields = {
        "function": "train_step",
        "target": "h200",
        "device_bytes": 128 * GIB,
        "peak_bytes": 32 * GIB,
        "compiled_bytes": 33 * GIB,
        "compiled_temp_bytes": 29 * GIB,
        "argument_bytes": 4 * GIB,
        "output_bytes": 4 * GIB,
        "aliased_bytes": 4 * GIB,
        "peak_index": 7,
        "timeline": tuple(n * GIB for n in (4, 8, 12, 16, 20, 24, 28, 32, 24, 16, 8, 4)),
        "phases": (("forward", 0), ("backward", 7), ("update", 10)),
        "buffers": (
            buffer(24 * GIB, "residual", checkpoint_name="up"),
            buffer(3 * GIB, "argument", name="params.w", path="params.w", **argument),
            buffer(GIB, "argument", name="opt.mu", path="opt.mu", **argument),
            buffer(4 * GIB, "temporary", name="mul", primitive="mul"),
            buffer(4 * GIB, "output", start=90, name="out[0]"),
        ),
        "equations": 12,
    }
    return MemoryReport(**{**fields, **changes})


def explained_plan(**changes) -> Plan:
    """A plan with everything recorded that an explanation reads."""
    layers = tuple(f"h{n}/mlp" for n in range(4))
    decisions = (
        decision(1, count=4, nbytes=2 * GIB, modules=layers, again_seconds=8e-3, feeds=2),
        decision(
            2,
            action="recompute",
            count=4,
            recomputed=3,
            again=(0, 1, 2),
            nbytes=8 * GIB,
            seconds=12e-3,
            again_seconds=16e-3,
            modules=tuple(f"h{n}/attn" for n in range(4)),
            source="train.py:30 (attn)",
        ),
        decision(
            3,
            action="recompute",
            count=1,
            recomputed=1,
            again=(0,),
            nbytes=4 * GIB,
            seconds=2e-3,
            again_seconds=2e-3,
            primitive="mul",
            checkpoint_name="scores",
            module="",
        ),
        decision(
            4,
            action="offload",
            count=1,
            offloaded=1,
            nbytes=GIB,
            again_seconds=5e-3,
            primitive="exp",
        ),
    )
    fields = {
        "decisions": decisions,
        "larger": Larger(GIB, 3e-3),
        "holders": (Holder("params", 4 * GIB, "argument"), Holder("up", 3 * GIB, "residual")),
        "hosted": ("state.mu",),
    }
    return plan(**{**fields, **changes})


def frontier(**changes) -> Frontier:
    """Four points and two policies."""
    points = tuple(
        Point(n * GIB, seconds, seconds / 0.1 - 1, solver)
        for n, seconds, solver in (
            (10, 0.125, "chain DP"),
            (12, 0.115, "chain DP + greedy fill"),
            (18, 0.114, "greedy fill"),
            (20, 0.1, "keep-all"),
        )
    )
    fields = {
        "function": "train_step",
        "target": "h200",
        "device_bytes": 128 * GIB,
        "points": points,
        "stock": (points[-1], Point(12 * GIB, 0.13, 0.3, "dots_saveable")),
        "fingerprint": "f" * 8,
    }
    return Frontier(**{**fields, **changes})
