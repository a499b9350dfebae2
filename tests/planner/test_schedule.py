"""Whatever is kept, the written-out program does the same, again only where it says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem.planner.schedule import Keep, Scheduler
from jaxmem.planner.search import Search
from jaxmem.program.ir import Block, Op, Value
from jaxmem.rewrite.emit import as_function
from jaxmem.targets import Target, compile_for
from jaxmem.targets.options import memory_schedules
from tests.planner.lines import Line, lines, random_keep, search
from tests.problems import PROBLEMS, assert_same, pure

# Loops of every form, keys, branches, two gradients in one step, effects.
NAMES = ("transformer_scan", "lstm_nested", "dropout", "branches", "adversarial", "effects")
# What no program may do twice, whatever jaxmem thinks of it.
ONCE = {"psum", "psum_invariant", "all_to_all", "all_gather", "ppermute", "reduce_scatter"} | {
    "debug_callback",
    "io_callback",
    "pure_callback",
}


def searched(name: str) -> tuple[Search, list]:
    """The search over a problem as a pure function, and the arrays to run it on."""
    step = pure(PROBLEMS[name])
    found = search(step.function, *step.args)
    return found, [*found.program.consts, *jax.tree.leaves(step.args)]


def expressions(block: Block, numbers: dict[tuple, int] | None = None) -> tuple[list, list]:
    """What each output and each operation computes, written in the block's inputs.

    A barrier or transfer returns what it was given and a copy what its original does, so a right
    schedule has the expressions of the program it was made from. Where it has another order the
    two are compared with the same ``numbers``.
    """
    numbers = {} if numbers is None else numbers

    def number(*expression) -> int:
        return numbers.setdefault(expression, len(numbers))

    known = {value: number("input", n) for n, value in enumerate(block.inputs)}

    def of(atom) -> int:
        return known[atom] if isinstance(atom, Value) else number("literal", id(atom))

    computed = []
    for op in block.ops:
        operands = tuple(of(atom) for atom in op.inputs)
        same = op.barrier or op.transfer
        if not same:
            computed.append(number(id(op.origin), operands))
        for place, value in enumerate(op.outputs):
            again = operands[place] if same else number("result", computed[-1], place)
            known[value] = again
    return [of(atom) for atom in block.outputs], computed


@given(lines(), st.data(), st.booleans())
@settings(max_examples=200)
def test_a_schedule_computes_what_the_line_computes(line: Line, data, host: bool):
    turns = data.draw(st.lists(st.integers(1, len(line.block.ops)), min_size=1, max_size=2))
    names = [str(v.key) for op in line.block.ops for v in op.outputs]
    keep = {
        ("", turn): frozenset(data.draw(st.lists(st.sampled_from(names), unique=True)))
        for turn in turns
    }
    written = Scheduler(line.nest, host).schedule(keep)
    outputs, computed = expressions(line.block)
    again_outputs, again = expressions(written)
    assert again_outputs == outputs
    assert set(again) == set(computed), "the same operations on the same operands, only more often"
    originals = [op for op in written.ops if not (op.recompute or op.barrier)]
    assert [op.origin for op in originals] == [op.origin for op in line.block.ops]


@given(lines(), st.data(), st.booleans())
def test_what_is_dropped_is_made_again_and_what_is_kept_is_not(line: Line, data, host: bool):
    kept = frozenset(data.draw(st.lists(st.sampled_from(line.keys), unique=True)))
    written = Scheduler(line.nest, host).schedule({("", line.turn): kept})
    check_dropped(line.block, written, line.turn, kept)


def check_dropped(block: Block, written: Block, turn: int, kept: frozenset[str]) -> None:
    """After the turn only kept values of before it are read, and those are never made again."""
    assert written.ops[:turn] == block.ops[:turn], "nothing changes before the turn"
    returned = set(block.outputs)
    early = {v for op in block.ops[:turn] for v in op.outputs}
    readable = {v for v in early if str(v.key) in kept or v in returned}
    for op in written.ops[turn:]:
        stale = [v for v in op.values if v in early and v not in readable]
        assert not stale, f"{op} reads {stale}, which was not kept"
    made_again = {v for op in written.ops[turn:] if op.recompute for v in op.origin.outputs}
    needless = [op for op in block.ops[:turn] if set(op.outputs) <= readable & made_again]
    assert not needless, "all results of these were kept"


@pytest.mark.parametrize("name", NAMES)
def test_any_kept_set_computes_the_same(name: str):
    found, leaves = searched(name)
    assert found.choices, "a problem with nothing to decide tests nothing"
    written = found.scheduler.schedule(random_keep(found, len(name)))
    assert any(op.recompute for op in everything(written))
    assert_same(run(found, found.program.block, leaves), run(found, written, leaves))


def run(found: Search, block: Block, leaves: list) -> list:
    """Results of a schedule, compiled as jaxmem compiles it for a CPU."""
    # Level 0 compiles in half the time.
    options = {**memory_schedules(Target("cpu"))[0], "xla_backend_optimization_level": 0}
    compiled = compile_for("cpu", as_function(block), found.program.avals(), options=options)
    return compiled.executable(*leaves)


@pytest.mark.parametrize("name", [*NAMES, "experts"])
def test_nothing_happens_twice_that_may_not(name: str):
    found, _ = searched(name)
    before = Counter(kind for op in everything(found.program.block) for kind in once(op.eqn))
    for keep in (dict.fromkeys(random_keep(found, 0), frozenset()), random_keep(found, 1)):
        written = found.scheduler.schedule(keep)
        after = Counter(kind for op in everything(written) for kind in once(op.eqn))
        assert after == before
        assert not [op for op in everything(written) if op.recompute and any(once(op.eqn))]


def test_the_problems_have_things_that_may_not_happen_twice():
    for name, kind in (("experts", "all_to_all"), ("effects", "debug_callback")):
        found, _ = searched(name)
        assert kind in {k for op in everything(found.program.block) for k in once(op.eqn)}


def everything(block: Block) -> Iterator[Op]:
    """All operations, those inside loops too."""
    for op in block.ops:
        yield op
        if op.loop is not None:
            yield from everything(op.loop.body)


def once(eqn) -> Iterator[str]:
    """Names of what may not be repeated in an equation, a loop's own body left out."""
    if eqn.primitive.name in ONCE or (eqn.effects and eqn.primitive.name != "scan"):
        yield eqn.primitive.name
    if eqn.primitive.name == "scan":
        return
    for param in eqn.params.values():
        for item in param if isinstance(param, tuple | list) else (param,):
            jaxpr = getattr(item, "jaxpr", item)
            for inner in getattr(jaxpr, "eqns", ()):
                yield from once(inner)


# --- barriers ----------------------------------------------------------------------------------


def unprotected(block: Block) -> list[Op]:
    """Copies that stand on no barrier, so that XLA merges them with the originals.

    What is made of nothing (an iota, a constant mask) has no operand to hold back.
    """
    from_nothing: set[Value] = set()
    behind: set[Value] = set()
    bare = []
    for op in block.ops:
        held_back = op.barrier or (op.recompute and any(v in behind for v in op.values))
        if held_back:
            behind.update(op.outputs)
        elif all(v in from_nothing for v in op.values):
            from_nothing.update(op.outputs)
        elif op.recompute:
            bare.append(op)
    return bare


def straight(block: Block) -> Iterator[Block]:
    """The blocks in which copies stand next to their originals: not those of scan pairs."""
    yield block
    for op in block.ops:
        if op.loop is not None and not op.loop.rewritten:
            yield from straight(op.loop.body)


@given(lines(), st.data(), st.booleans())
def test_every_copy_of_a_line_stands_on_a_barrier(line: Line, data, host: bool):
    kept = frozenset(data.draw(st.lists(st.sampled_from(line.keys), unique=True)))
    assert not unprotected(Scheduler(line.nest, host).schedule({("", line.turn): kept}))


@pytest.mark.parametrize("name", NAMES)
def test_every_copy_stands_on_a_barrier(name: str):
    found, _ = searched(name)
    for seed in range(3):
        for block in straight(found.scheduler.schedule(random_keep(found, seed))):
            assert not unprotected(block)


def test_a_copy_of_what_is_made_of_constants_and_an_argument_stands_on_a_barrier():
    """Positions as one-hot rows times a table: the rows are made of nothing, the product not."""

    def step(table, w):
        def loss(table, w):
            rows = jax.nn.one_hot(jnp.arange(256) % 64, 64)
            y = jnp.tanh(rows @ table)
            for _ in range(4):
                y = jnp.tanh(y @ w)
            return (y**2).sum()

        return jax.grad(loss, (0, 1))(table, w)

    args = (jnp.ones((64, 64)), jnp.eye(64))
    found = search(step, *args)
    written = found.scheduler.schedule(random_keep(found, 0) | empty(found))
    names = [op.name for op in written.ops if op.recompute]
    assert names.count("dot_general") == 5
    assert not unprotected(written)


def empty(found: Search) -> Keep:
    return {choice.turn: frozenset() for choice in found.choices}


def test_copies_depend_on_what_was_born_after_the_turn():
    """The barrier is tied to the backward pass; otherwise XLA may run it before."""
    found, _ = searched("mlp")
    ((_, turn),) = empty(found)
    written = found.scheduler.schedule(empty(found))
    late = {v for op in written.ops[turn:] if not op.recompute for v in op.outputs}
    barriers = [op for op in written.ops if op.barrier]
    assert barriers
    first, *others = barriers
    assert all(any(v in late for v in op.values) for op in others)
    assert written.ops.index(first) >= turn


def test_a_tag_names_one_recomputation_each():
    found, _ = searched("transformer_dropout_unrolled")
    written = found.scheduler.schedule(empty(found))
    tags = [op.recompute for op in written.ops if op.barrier]
    assert len(tags) == len(set(tags)) > 1
    assert set(tags) <= {op.recompute for op in written.ops if not op.barrier}
    assert not any(set(tag) & set('/")') for tag in tags)


def test_keeping_everything_changes_nothing():
    for name in ("mlp", "lstm_nested"):
        found, _ = searched(name)
        kept = {c.turn: frozenset(k.name for k in c.candidates) for c in found.choices}
        written = found.scheduler.schedule(kept)
        copies = Counter(op.name for op in everything(written) if op.recompute and not op.barrier)
        assert not {"dot_general", "scan"} & set(copies), "buffers were kept, not made again"


def test_schedules_are_the_same_whatever_was_scheduled_before():
    fresh, _ = searched("lstm_nested")
    used, _ = searched("lstm_nested")
    for seed in range(3):
        used.scheduler.schedule(random_keep(used, seed))
    keep = random_keep(fresh, 7)
    assert shape_of(used.scheduler.schedule(keep)) == shape_of(fresh.scheduler.schedule(keep))


def shape_of(block: Block) -> list:
    return [
        (op.name, op.recompute, [v.aval.str_short() for v in op.values], op.loop is not None)
        for op in everything(block)
    ]
