"""Layouts of a state over a mesh: what is said holds, and what cannot be is named."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import jaxmem
from jaxmem.errors import ShardingError

P = PartitionSpec
EIGHT = AbstractMesh((8,), ("data",))
GRID = AbstractMesh((4, 2), ("data", "model"))
HERE = Path(__file__).parent


def shape(*dims: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def adam_state() -> dict:
    params = {"w": shape(1024, 512), "b": shape(512)}
    return {"params": params, "opt_state": jax.eval_shape(optax.adam(1e-3).init, params)}


def specs_of(found) -> dict:
    return {leaf.path: leaf.spec for leaf in found.leaves}


# --- laws -------------------------------------------------------------------------------------


@given(
    dims=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    axes=st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=3),
)
def test_named_rules_split_what_divides_and_nothing_else(dims, axes):
    names = ("data", "model", "pipe")[: len(axes)]
    mesh = AbstractMesh(tuple(axes), names)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = jaxmem.shard({"x": shape(*dims)}, mesh, "fsdp", axis=names)
    (leaf,) = found.leaves
    part = found.shardings["x"].shard_shape(tuple(dims))  # JAX's own arithmetic; it may raise.
    assert leaf.device_bytes == math.prod(part) * 4
    count = math.prod(axes)
    if leaf.nbytes < 64 * 2**10:
        assert leaf.spec == P()
    elif any(size % count == 0 for size in dims):
        assert leaf.device_bytes * count == leaf.nbytes
        wanted = max(size for size in dims if size % count == 0)
        rows = dims[-2] if len(dims) > 1 else 0
        if rows and rows % count == 0 and 4 * rows >= max(dims):
            wanted = rows
        divided = [size for size, own in zip(dims, part, strict=True) if size != own]
        assert divided == ([wanted] if count > 1 else [])
    else:
        assert leaf.device_bytes == leaf.nbytes
        assert len(told) == 1


@pytest.mark.parametrize(
    "dims, spec",
    [
        ((24, 2048, 8192), (None, "data")),
        ((24, 2048, 8256), (None, None, "data")),
        ((24, 8192, 2048), (None, "data")),
        ((50304, 2048), ("data",)),
        ((2048, 2044), ("data",)),
        ((2044, 2048), (None, "data")),
        ((2048, 16, 128), ("data",)),
        ((3, 3, 128, 512), (None, None, "data")),
        ((4096, 2, 2), ("data",)),
    ],
)
def test_rows_are_split_unless_they_are_few_and_stacks_of_layers_are_not(dims, spec):
    found = jaxmem.shard({"x": shape(*dims)}, EIGHT, "zero3")
    assert specs_of(found) == {"['x']": P(*spec)}


@pytest.mark.parametrize("rule", ["fsdp", "zero3"])
def test_parameters_and_moments_are_one_nth(rule):
    found = jaxmem.shard(adam_state(), EIGHT, rule)
    whole = sum(leaf.nbytes for leaf in found.leaves)
    assert whole / 8 <= found.device_bytes <= 1.05 * whole / 8


def test_zero1_splits_the_optimizers_state_alone():
    found = jaxmem.shard(adam_state(), EIGHT, "zero1")
    specs = specs_of(found)
    assert specs["['params']['w']"] == P()
    assert specs["['opt_state'][0].mu['w']"] == P("data")
    moments = [leaf for leaf in found.leaves if "opt_state" in leaf.path]
    assert sum(leaf.device_bytes for leaf in moments) <= 1.05 * sum(m.nbytes for m in moments) / 8


def test_optax_is_known_by_its_types():
    params = {"w": shape(1024, 512)}
    found = jaxmem.shard((params, jax.eval_shape(optax.adam(1e-3).init, params)), EIGHT, "zero1")
    assert specs_of(found) == {
        "[0]['w']": P(),
        "[1][0].count": P(),
        "[1][0].mu['w']": P("data"),
        "[1][0].nu['w']": P("data"),
    }


def test_the_first_pattern_that_matches_is_the_rule():
    state = {"up": shape(512, 512), "down": shape(512, 512), "other": shape(512, 512)}
    rules = {"*up*": P(None, "model"), "*other*": None, "*": "fsdp"}
    assert specs_of(jaxmem.shard(state, GRID, rules)) == {
        "['down']": P("data"),
        "['other']": P(),
        "['up']": P(None, "model"),
    }


def test_later_rules_split_what_earlier_ones_left():
    state = {"up": shape(512, 1024), "one": shape(512 * 64)}
    rules = [{"*": P("model")}, "fsdp"]
    assert specs_of(jaxmem.shard(state, GRID, rules)) == {
        "['one']": P(("model", "data")),
        "['up']": P("model", "data"),
    }


def test_specs_may_be_a_prefix_and_rules_fill_the_rest():
    state = {"a": [shape(512, 512), shape(512, 512)], "b": shape(512, 512)}
    found = jaxmem.shard(state, GRID, "fsdp", specs={"a": P("model"), "b": None})
    assert specs_of(found) == {
        "['a'][0]": P("model", "data"),
        "['a'][1]": P("model", "data"),
        "['b']": P("data"),
    }
    again = jaxmem.shard(state, GRID, specs=found.shardings)
    assert specs_of(again) == specs_of(found)


def test_variables_of_nnx_carry_their_specs():
    def make():
        return nnx.Linear(
            64,
            128,
            rngs=nnx.Rngs(0),
            kernel_init=nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "model")),
        )

    with nnx.use_eager_sharding(False):
        model = make()
    found = jaxmem.shard(model, GRID, logical={"embed": None})
    assert specs_of(found)["['kernel'].value"] == P(None, "model")
    with pytest.raises(
        ShardingError, match=r"the mesh has no axis 'embed'; it has data=4, model=2"
    ):
        jaxmem.shard(model, GRID)


def test_random_keys_and_low_precision_count_their_bytes():
    state = {"keys": jax.random.split(jax.random.key(0), 8), "low": shape(64, dtype=jnp.bfloat16)}
    found = jaxmem.shard(state, EIGHT, {"*": P("data")})
    assert [leaf.device_bytes for leaf in found.leaves] == [8, 16]


def test_pinned_memory_by_pattern():
    found = jaxmem.shard(adam_state(), EIGHT, "zero1", host="*opt_state*")
    assert found.shardings["opt_state"][0].mu["w"].memory_kind == "pinned_host"
    assert found.shardings["params"]["w"] == NamedSharding(EIGHT, P())
    assert found.shardings["opt_state"][0].mu["b"].memory_kind is None  # Too small for a copy.
    assert found.host_bytes == 2 * 1024 * 512 * 4 // 8


# --- what is told -----------------------------------------------------------------------------


def test_what_does_not_divide_is_told_with_what_would():
    state = {"head": shape(50257, 771), "small": shape(7)}
    with pytest.warns(UserWarning, match=r"\['head'\]: .* 50264 in place of 50257 would"):
        found = jaxmem.shard(state, EIGHT, "fsdp")
    assert [leaf.path for leaf in found.replicated] == ["['head']", "['small']"]
    assert len(found.warnings) == 1


def test_a_large_leaf_without_a_rule_is_told_and_one_that_is_meant_is_not():
    state = {"a": shape(1024, 1024), "b": shape(1024, 1024)}
    with pytest.warns(UserWarning, match=r"\['b'\]: 4.0MiB is whole on each device: no rule"):
        jaxmem.shard(state, EIGHT, {"*a*": "fsdp"})
    jaxmem.shard(state, EIGHT, {"*a*": "fsdp", "*b*": None})


def test_it_prints_as_a_table_and_names_cannot_steer_it():
    state = {"w\x1b[31m<script>": shape(1024, 512), "b": shape(8)}
    found = jaxmem.shard(state, EIGHT, "fsdp", host="*script*")
    text, html = str(found), found._repr_html_()
    assert "256.0KiB" in text
    assert "pinned host" in text
    assert "\x1b" not in text
    assert "<script>" not in html
    assert "2.0MiB over data=8" in text


# --- wrong uses -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "options", "said"),
    [
        ({"*w*": P("dat")}, {}, "the mesh has no axis 'dat'; it has data=4, model=2"),
        ({"*w*": P("data", None, None)}, {}, "has 3 entries for 2 dimensions"),
        ({"*w*": P("data", "data")}, {}, "the axis 'data' splits two dimensions"),
        ({"*w*": P(None, "data")}, {}, "dimension 1 has 6, .* Pad it to 8, or leave 'data' out"),
        ({"*v*": P("data")}, {}, r"'\*v\*' matches no leaf. There are 1, for instance \['w'\]"),
        ({"*w*": 3}, {}, r"the rule for '\*w\*' is 3"),
        ({"*w*": "fdsp"}, {}, "there is no rule 'fdsp'"),
        ("fdsp", {}, "there is no rule 'fdsp'; there are 'fsdp', 'zero3', 'zero1'"),
        ("zero2", {}, "zero2 splits gradients"),
        ("tp", {}, "patterns of paths"),
        ("zero1", {}, "no leaf is known as such"),
        ("fsdp", {"axis": "dat"}, "the mesh has no axis 'dat'"),
        ({"*w*": P("mlp")}, {}, r"logical axes stand for is said by jaxmem.shard\(..., logical="),
        ({3: P("data")}, {}, "a rule is for 3. Give patterns of paths as text"),
        ("fsdp", {"host": 3}, r"host=3: give patterns of paths"),
        ("fsdp", {"host": [3]}, r"host=\[3\]: give patterns of paths"),
        ("fsdp", {"logical": "mlp"}, "logical='mlp': give what each logical axis stands for"),
        ("fsdp", {"axis": 3}, "axis=3: give the name of an axis, or several: data, model"),
        (None, {}, "a rule is None. Give one of 'fsdp'"),
        (P("data"), {}, r"a rule is P\('data',?\).* or a mapping of patterns, such as"),
        ([P("data")], {}, r"a rule is P\('data',?\).* or a mapping of patterns, such as"),
        ((), {"host": "*v*"}, r"'\*v\*' matches no leaf"),
        ((), {"specs": {"v": P()}}, "specs= is no prefix of the state"),
        ((), {"specs": {"w": "data"}}, r"specs=: \['w'\] is 'data'"),
    ],
)
def test_wrong_uses(rules, options, said):
    with pytest.raises(ShardingError, match=said):
        jaxmem.shard({"w": shape(8, 6)}, GRID, rules, **options)


@pytest.mark.parametrize("leaf", ["text", print, np.array(["a"])])
def test_a_leaf_that_is_no_array_is_named(leaf):
    with pytest.raises(ShardingError, match=r"\['w'\]\[1\] is a .* cannot be split"):
        jaxmem.shard({"w": [shape(8), leaf]}, GRID, "fsdp", axis="data")


@pytest.mark.parametrize("mesh", ["data", (8,), [jax.devices()], None])
def test_what_is_no_mesh_is_told(mesh):
    with pytest.raises(ShardingError, match=r"mesh is .* Give a jax\.sharding\.Mesh, such as"):
        jaxmem.shard({"w": shape(8, 6)}, mesh, "fsdp")


def test_a_mesh_of_several_axes_needs_one_that_is_said():
    mesh = AbstractMesh((2, 2), ("x", "y"))
    with pytest.raises(ShardingError, match="the mesh has the axes x, y: say which with axis="):
        jaxmem.shard({"w": shape(512, 512)}, mesh, "fsdp")
    found = jaxmem.shard({"w": shape(512, 512)}, mesh, "fsdp", axis=("x", "y"))
    assert specs_of(found)["['w']"] == P(("x", "y"))


def told_by(script: str, *arguments: str) -> str:
    """What a script prints with eight CPU devices."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(HERE.parent.parent),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    ended = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_over_devices_that_are_there():
    assert told_by("sharded_states.py").count("holds") == 4


@pytest.mark.parametrize(
    ("net", "rules"),
    [
        pytest.param(
            net,
            rules,
            marks=()
            if (net, rules) == ("scanned", "zero1")
            else (pytest.mark.wide if net == "unrolled" and rules == "zero3" else pytest.mark.slow),
        )
        for net in ("unrolled", "scanned", "dropping")
        for rules in ("zero1", "zero3", "tp", "tp and zero1", "tp and zero3")
    ],
)
def test_fitted_steps_keep_the_layout_and_compute_the_same(net: str, rules: str):
    """In less than they take as written, with what each device has read from the compiler."""
    assert told_by("sharded_steps.py", net, rules).endswith("held\n")
