"""Trees say of every leaf and branch what it takes and where, and move nothing."""

from __future__ import annotations

import sys
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

import jaxmem
from jaxmem.show import tree
from jaxmem.units import format_bytes
from tests.show.samples import HOSTILE

MESH = AbstractMesh((8, 2), ("data", "model"))


def state():
    params = {f"layer{n}": {"w": jnp.zeros((256, 1024))} for n in range(5)}
    return {"params": params, "opt_state": optax.adam(1e-3).init(params)}


@pytest.fixture(scope="module")
def sharded():
    return jaxmem.shard(
        jax.eval_shape(state), MESH, [{"*w*": PartitionSpec(None, "model")}, "fsdp"], host="*mu*"
    )


def test_a_layout_and_its_tree_agree(sharded):
    placed = sharded.tree()
    assert list(placed.leaves) == [leaf.path for leaf in sharded.leaves]
    for leaf, known in zip(placed.leaves.values(), sharded.leaves, strict=True):
        assert (leaf.nbytes, leaf.device_bytes) == (known.nbytes, known.device_bytes)
        assert (leaf.tier == "pinned host") == known.on_host
    assert placed.device_bytes == {
        "device": sharded.device_bytes,
        "pinned host": sharded.host_bytes,
    }


def test_the_text_has_the_totals_and_alike_branches_once(sharded):
    lines = str(sharded.tree()).splitlines()
    assert lines[0].startswith("on each device: ")
    for nbytes in (sharded.device_bytes, sharded.host_bytes):
        assert format_bytes(nbytes) in lines[0]
    (alike,) = (n for n, line in enumerate(lines) if "['params']" in line)
    assert (
        "['layer0']['w'] … ['layer4']['w']  f32[256,1024]  5 alike, each 64.0KiB device"
        in (lines[alike + 1])
    )
    assert " of 1.0MiB," in lines[alike + 1]


def test_where_things_are(tmp_path):
    gone = jnp.ones(4)
    gone.delete()
    np.zeros((64, 64), np.float32).tofile(tmp_path / "weights")
    mapped = np.memmap(tmp_path / "weights", np.float32, "r", shape=(64, 64))
    pinned = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    found = tree(
        {
            "device": jnp.ones((8, 8), jnp.bfloat16),
            "pinned": jax.device_put(jnp.ones(4), pinned),
            "numpy": np.ones(3),
            "disk": [mapped, mapped[:2].reshape(-1)],
            "gone": gone,
            "shape": jax.ShapeDtypeStruct((4,), jnp.int8),
            "later": jax.ShapeDtypeStruct((4,), jnp.int8, sharding=pinned),
            "key": jax.random.key(0),
            "name": "net",
            "empty": jnp.zeros((0, 4)),
        }
    )
    tiers = {path: (leaf.tier, leaf.device_bytes) for path, leaf in found.leaves.items()}
    assert tiers == {
        "['device']": ("device", 128),
        "['pinned']": ("pinned host", 16),
        "['numpy']": ("host", 24),
        "['disk'][0]": ("disk", 64 * 64 * 4),
        "['disk'][1]": ("disk", 2 * 64 * 4),
        "['gone']": ("donated", 0),
        "['shape']": ("not allocated", 4),
        "['later']": ("pinned host", 4),
        "['key']": ("device", 8),
        "['name']": ("", 0),
        "['empty']": ("device", 0),
    }
    assert "['name']  str" in str(found)


def test_nnx_modules_and_what_is_no_tree_of_arrays():
    modules = nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(0)) for _ in range(3)])
    found = tree({"model": modules, "function": len})
    assert found.device_bytes == {"device": 3 * 4 * (64 + 8)}
    assert "['kernel']" in str(found)
    assert str(tree(())) == "nothing"
    assert str(tree(jnp.ones(3))) == "f32[3]  12B device"


def test_a_long_tree_ends_and_says_how_much_is_left():
    wide = {f"leaf{n}": np.zeros(n + 1) for n in range(500)}
    lines = str(tree(wide)).splitlines()
    assert len(lines) == 402
    assert lines[-1].endswith("… and 100 more lines")


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_keys_are_inert(name):
    placed = tree({name: np.zeros(4), "b": {name: [np.zeros(2)]}})
    assert "\x1b" not in str(placed)
    harmless = tree({"a" * 200: np.zeros(4), "b": {"a" * 200: [np.zeros(2)]}})
    known, found = tags(harmless), tags(placed)
    assert {tag.split()[0] for tag in found} <= {tag.split()[0] for tag in known}
    assert set(found) - set(known) <= {"input ['type', 'class']"}, "one that is folded"
    assert found.count("script []") == known.count("script []")
    placed._repr_html_().encode()


def tags(placed) -> list[str]:
    """The tags of a tree, and the names of their attributes."""
    found: list[str] = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag, attrs):
            found.append(f"{tag} {[name for name, _ in attrs]}")

    Parser().feed(placed._repr_html_())
    return found


def test_in_notebooks_treescope_draws_it_with_what_each_branch_takes(sharded):
    html = sharded.tree()._repr_html_()
    assert "treescope" in html
    assert "split over data, model" in html
    assert "f32[256,1024]" in html
    assert "64.0KiB pinned host of 1.0MiB" in html


def test_without_treescope_a_notebook_has_the_text(sharded, monkeypatch):
    monkeypatch.setitem(sys.modules, "treescope", None)
    html = sharded.tree()._repr_html_()
    assert html.startswith("<pre>on each device: ")
    assert "<script" not in html
