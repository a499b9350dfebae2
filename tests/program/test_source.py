"""Names people recognise, for values of every origin."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxmem.program.loops import nest
from jaxmem.program.source import checkpoint_names, module_path, origin_of
from tests.planner.lines import program

X = jnp.ones((4, 4))


@pytest.mark.parametrize(
    ("stack", "path"),
    [
        ("", ""),
        ("jvp()", ""),
        ("transpose(jvp())", ""),
        ("Block_0/mlp", "Block_0/mlp"),
        ("jvp(Block_0)/mlp", "Block_0/mlp"),
        ("transpose(jvp(Block_0))/mlp", "Block_0/mlp"),
        ("jvp(vmap(encoder))/checkpoint/attention", "encoder/attention"),
        ("rematted_computation/mlp/jaxmem.recompute.step.3", "mlp"),
    ],
)
def test_module_paths_without_the_names_of_transformations(stack: str, path: str):
    assert module_path(stack) == path


def test_lines_point_at_the_users_own():
    def helper(x):
        return jnp.sin(x)

    def step(x):
        return helper(x) @ x

    ops = {op.name: origin_of(op) for op in program(step, X).block.ops}
    line = helper.__code__.co_firstlineno + 1
    assert ops["sin"].source.split(" ")[0] == f"test_source.py:{line}"
    assert ops["sin"].label == f"sin at test_source.py:{line}"
    assert ops["dot_general"].source.startswith(
        f"test_source.py:{step.__code__.co_firstlineno + 1} "
    )


def test_lines_survive_jit_and_gradients():
    def step(x):
        return jax.grad(lambda x: jax.jit(jnp.tanh)(x @ x).sum())(x)

    for op in program(step, X).block.ops:
        assert origin_of(op).source.startswith("test_source.py:")


def test_modules_of_flax_are_found():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def step(x):
        with jax.named_scope("head"):
            return model(x)

    modules = {origin_of(op).module for op in program(step, X).block.ops}
    assert any(module.startswith("head") for module in modules)


def test_checkpoint_names_are_found_in_loops_too():
    def step(x):
        def body(carry, _):
            return checkpoint_name(jnp.sin(carry), "inner"), None

        y = lax.scan(body, x, None, length=2)[0]
        return checkpoint_name(y @ y, "outer") * 2

    block = program(step, X).block
    names = checkpoint_names(nest(block))
    assert set(names.values()) == {"inner", "outer"}
    (product,) = [op for op in block.ops if op.name == "dot_general"]
    assert names[product.outputs[0]] == "outer"
    assert origin_of(product, "outer").label.startswith("outer at test_source.py:")
