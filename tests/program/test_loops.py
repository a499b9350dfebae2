"""Scan pairs: which forward scan belongs to which backward scan, and what joining them keeps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxmem.program.ir import Value
from jaxmem.program.loops import Pair, is_backward, nest
from jaxmem.rewrite.emit import as_function
from tests.planner.lines import program
from tests.problems import PROBLEMS, pure

# How many pairs a problem has, those inside others included.
PAIRS = {
    "transformer_scan": 1,
    "transformer_scan_reverse": 1,
    "transformer_scan_outputs": 1,
    "transformer_linen": 1,
    "lstm": 1,
    "lstm_nested": 2,
    "lstm_bidirectional": 2,
    "scan_many_carries": 1,
    "mlp": 0,
}


def pairs_of(name: str) -> list[tuple[Pair, object]]:
    step = pure(PROBLEMS[name])
    found = nest(program(step.function, *step.args).block)
    return [(pair, inner.block) for inner in found.walk() for pair, _ in inner.pairs]


@pytest.mark.parametrize("name", PAIRS)
def test_every_differentiated_scan_is_paired(name: str):
    assert len(pairs_of(name)) == PAIRS[name]


@pytest.mark.parametrize("name", ["transformer_scan_outputs", "lstm_nested", "scan_many_carries"])
def test_a_joint_iteration_is_a_program_of_its_own(name: str):
    for pair, block in pairs_of(name):
        first, second = block.ops[pair.forward], block.ops[pair.backward]
        assert pair.forward < pair.backward
        assert first.loop.length == second.loop.length
        assert not is_backward(first) or pair.joint.path.count("+") > 1
        joint = pair.joint
        assert joint.ops[: pair.cut] == first.loop.body.ops
        assert len(joint.ops) == pair.cut + len(second.loop.body.ops)
        known = set(joint.inputs)
        for op in joint.ops:
            assert set(op.values) <= known
            known.update(op.outputs)
        assert {v for v in joint.outputs if isinstance(v, Value)} <= known
        residuals = {second.inputs[p] for p in pair.linked}
        assert residuals <= set(first.outputs[first.loop.num_carry :])


def test_what_else_reads_a_residual_escapes():
    def step(w, x):
        def loss(w):
            def body(carry, _):
                y = jnp.tanh(carry @ w)
                return y, y

            last, every = lax.scan(body, x, None, length=4)
            return last.sum() + jnp.square(every).sum(), every

        grads, every = jax.grad(loss, has_aux=True)(w)
        return grads, every

    block = program(step, jnp.eye(4), jnp.ones((3, 4))).block
    ((pair, _),) = nest(block).pairs
    escaping = {block.ops[pair.forward].outputs[k] for k in pair.escaping}
    assert {v for v in block.outputs if v in block.ops[pair.forward].outputs} <= escaping


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("unroll", [1, 2])
def test_a_joint_iteration_computes_what_the_two_scans_do(reverse: bool, unroll: int):
    """One iteration of both, by hand: the gradient of a scan of length one."""

    def step(w, x):
        def loss(w):
            def body(c, k):
                return jnp.tanh(c @ w) * k, c.sum()

            last, sums = lax.scan(body, x, jnp.ones(1), reverse=reverse, unroll=unroll)
            return last.sum() + sums.sum()

        return jax.grad(loss)(w)

    args = jnp.eye(4) * 0.5, jnp.linspace(-1, 1, 12).reshape(3, 4)
    block = program(step, *args).block
    ((pair, _),) = nest(block).pairs
    first, second = block.ops[pair.forward], block.ops[pair.backward]
    values = dict(zip(block.inputs, args, strict=True))
    outs = as_function(block.__class__("", block.inputs, block.ops, tuple(made(block))))(*args)
    values |= dict(zip(made(block), outs, strict=True))

    def sliced(op, position):
        atom = op.inputs[position]
        value = values[atom] if isinstance(atom, Value) else jnp.asarray(atom.val)
        return value[0] if position >= op.loop.num_consts + op.loop.num_carry else value

    given = [sliced(first, p) for p in range(len(first.inputs))]
    given += [sliced(second, p) for p in range(len(second.inputs)) if p not in pair.linked]
    results = as_function(pair.joint)(*given)
    expected = [values[v] for v in second.outputs]
    count = first.loop.num_carry + len(pair.escaping)
    for position, (found, wanted) in enumerate(zip(results[count:], expected, strict=True)):
        stacked = position >= second.loop.num_carry
        assert jnp.allclose(found, wanted[0] if stacked else wanted, atol=1e-6)


def made(block):
    return [v for op in block.ops for v in op.outputs]


def test_scans_of_different_lengths_are_no_pair():
    def step(x):
        short = lax.scan(lambda c, _: (jnp.sin(c), c), x, None, length=3)[1]
        return lax.scan(lambda c, y: (c + y, None), x, short[:2])[0]

    assert nest(program(step, 1.0).block).pairs == ()
    assert len(nest(program(step, 1.0).block).loops) == 2


def test_a_scan_without_a_gradient_is_a_loop_of_its_own():
    found = nest(program(lambda x: lax.scan(lambda c, _: (c * 2, c), x, None, length=3), 1.0).block)
    assert found.pairs == ()
    ((index, inner),) = found.loops
    assert (index, inner.cut) == (0, None)
    assert len(list(found.walk())) == 2
