"""Checkpoints: what comes back is what was saved, or an error says which leaf is not."""

from __future__ import annotations

import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import jaxmem
from jaxmem.errors import CheckpointError, MissingExtraError
from jaxmem.state import reading
from tests.state.trees import assert_same, blank
from tests.streamed_steps import X, fitted, in_small_buckets, kinds, state_with, step_with

DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
HOST = DEVICE.with_memory_kind("pinned_host")


def some_state() -> dict:
    """Leaves of every kind that a checkpoint holds."""
    params = {"w": jax.random.normal(jax.random.key(0), (8, 4)), "b": jnp.zeros(4)}
    return {
        "params": params,
        "opt": optax.adam(1e-3).init(params),
        "hosted": jax.device_put(jnp.arange(6.0), HOST),
        "low": jnp.arange(5).astype(jnp.bfloat16),
        "int4": jnp.arange(-3, 4).astype(jnp.int4),
        "flags": jnp.array([True, False]),
        "empty": jnp.zeros((0, 3)),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4, impl="rbg"), 2),
        "numpy": np.arange(3.0),
        "scalar": np.float64(0.1),
        "epoch": 3,
        "rate": 0.1,
        "nan": float("inf"),
        "done": False,
        "name/of it": "run \u202e one",
        "none": None,
    }


def test_every_kind_of_leaf_comes_back(tmp_path):
    state = some_state()
    saving = jaxmem.save(tmp_path, state, step=3)
    saving.wait()
    assert saving.path.is_dir()
    assert_same(state, jaxmem.restore(tmp_path, blank(state)))


def test_shapes_alone_are_enough_and_say_where_arrays_go(tmp_path):
    state = {"w": jnp.arange(8.0), "key": jax.random.key(3), "host": jnp.arange(4.0)}
    jaxmem.save(tmp_path, state, step=0)
    like = jax.eval_shape(lambda: state)
    like["host"] = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=HOST)
    found = jaxmem.restore(tmp_path, like)
    assert found["host"].sharding == HOST
    assert not found["w"].committed
    back = jax.device_put(found["host"], DEVICE)
    assert_same(state, {**found, "host": back})


def test_what_is_saved_may_be_donated_deleted_and_written_over_at_once(tmp_path):
    """On the device, in host memory and in NumPy."""
    grow = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)
    state = {
        "donated": jax.device_put(jnp.arange(2.0**18), DEVICE),
        "hosted": jax.device_put(jnp.arange(2.0**18), HOST),
        "numpy": np.arange(2.0**18),
    }
    expected = jax.tree.map(lambda x: np.array(x, copy=True), state)
    like = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state)
    for step in range(3):
        now = {**state, "donated": jnp.array(state["donated"]), "numpy": state["numpy"].copy()}
        now["hosted"] = jax.device_put(np.array(state["hosted"]), HOST)
        jaxmem.save(tmp_path, now, step=step)
        grow(now["donated"]).block_until_ready()
        now["hosted"].delete()
        now["numpy"][:] = -1
        _ = [jax.device_put(np.full(2**18, -5, np.float32), HOST) for _ in range(4)]
        found = jaxmem.restore(tmp_path, like, step=step)
        jax.tree.map(np.testing.assert_array_equal, expected, found)


def test_numbers_that_give_way_to_others_still_do(tmp_path):
    state = {"rate": jnp.asarray(0.5), "count": jnp.asarray(3), "strong": jnp.ones(())}
    jaxmem.save(tmp_path, state, step=0)
    for like in (state, jax.eval_shape(lambda: state)):
        found = jaxmem.restore(tmp_path, like)
        assert (found["rate"] * jnp.bfloat16(1)).dtype == jnp.bfloat16
        assert (found["count"] * jnp.int8(1)).dtype == jnp.int8
        assert (found["strong"] * jnp.bfloat16(1)).dtype == jnp.float32
        assert not found["rate"].committed


class Alike(str):
    """Keys that differ and look the same."""

    def __repr__(self):
        return "alike"


def test_keys_that_look_the_same_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"two leaves are called \[alike\]"):
        jaxmem.save(tmp_path / "run", {Alike("a"): np.ones(3), Alike("b"): np.zeros(3)}, step=0)
    assert not (tmp_path / "run").exists()


def test_threads_save_one_after_the_other(tmp_path):
    def save(number: int) -> int:
        try:
            jaxmem.save(tmp_path, {"w": jnp.full(3, float(number))}, step=number).wait()
        except CheckpointError as error:
            assert "does not come after" in str(error), error  # A later one was quicker.
            return -1
        return number

    with ThreadPoolExecutor(8) as pool:
        saved = list(pool.map(save, range(8)))
    there = sorted(int(path.name) for path in tmp_path.iterdir())
    assert there == sorted(number for number in saved if number >= 0)
    assert jaxmem.restore(tmp_path, {"w": jnp.zeros(3)})["w"][0] == there[-1] == 7


def test_other_directories_with_numbers_are_left_alone(tmp_path):
    (tmp_path / "2020").mkdir()
    (tmp_path / "2020" / "photo").write_text("a cat")
    with pytest.raises(CheckpointError, match="2020 is no checkpoint of jaxmem"):
        jaxmem.save(tmp_path, {"w": jnp.ones(3)}, step=3000, keep=1)
    assert (tmp_path / "2020" / "photo").exists()


def test_what_was_deleted_by_hand_does_not_count_for_keep(tmp_path):
    for step in range(3):
        jaxmem.save(tmp_path, {"w": jnp.ones(3)}, step=step, keep=3, wait=True)
    for step in (1, 2):
        shutil.rmtree(tmp_path / str(step))
    for step in (3, 4):
        jaxmem.save(tmp_path, {"w": jnp.ones(3)}, step=step, keep=3, wait=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "3", "4"]


def test_what_is_traced_cannot_be_saved(tmp_path):
    with pytest.raises(CheckpointError, match=r"being traced and holds no data\. Save outside of"):
        jax.jit(lambda w: jaxmem.save(tmp_path, {"w": w}, step=0))(jnp.ones(3))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("directory", [None, 3, b"run", ""])
def test_a_directory_is_a_path(directory):
    for use in (jaxmem.save, jaxmem.restore):
        with pytest.raises(CheckpointError, match=r"directory=.*give the path of a directory"):
            use(directory, {"w": jnp.ones(3)}, step=0)


def test_whatever_is_like_a_path_is_one(tmp_path):
    class Like:
        def __fspath__(self):
            return str(tmp_path)

    jaxmem.save(Like(), {"w": jnp.ones(3)}, step=0, wait=True)
    assert_same({"w": jnp.ones(3)}, jaxmem.restore(Like(), {"w": jnp.zeros(3)}))


def test_a_url_is_no_directory():
    with pytest.raises(CheckpointError, match="is a URL"):
        jaxmem.save("gs://bucket/run", {"w": jnp.ones(3)}, step=0)


def test_nnx_objects_are_given_their_arrays_in_place(tmp_path):
    def make(seed):
        model = nnx.Sequential(
            nnx.Linear(3, 4, rngs=nnx.Rngs(seed)), nnx.Dropout(0.5, rngs=nnx.Rngs(seed + 1))
        )
        return {"model": model, "opt": nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)}

    first, other = make(0), make(7)
    x = jnp.ones((2, 3))

    @nnx.jit
    def step(state, x):
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).sum())(state["model"])
        state["opt"].update(state["model"], grads)
        return loss

    step(first, x)
    jaxmem.save(tmp_path, first, step=1)
    model = other["model"]
    found = jaxmem.restore(tmp_path, other)
    assert found["model"] is model
    for _ in range(3):  # Dropout and moments, too, go on as they would have.
        assert step(first, x) == step(found, x)


def test_an_abstract_nnx_model_takes_no_memory_before(tmp_path):
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    jaxmem.save(tmp_path, model, step=1)
    like = nnx.eval_shape(lambda: nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
    found = jaxmem.restore(tmp_path, like)
    np.testing.assert_array_equal(found.kernel[...], model.kernel[...])


def test_linen_variables(tmp_path):
    variables = nn.Dense(3).init(jax.random.key(0), jnp.ones((1, 2)))
    jaxmem.save(tmp_path, variables, step=1)
    assert_same(variables, jaxmem.restore(tmp_path, blank(variables)))


def test_a_streamed_state_goes_on_as_it_would_have(tmp_path):
    """State that a plan keeps in host memory, saved between two steps that donate it."""
    tx = optax.adam(1e-2, eps=1e-3)
    run = fitted(step_with(tx), budget="30MiB")
    with in_small_buckets():
        state = run.place(state_with(tx), X)[0]
    state, _ = run(state, X)
    assert "pinned_host" in kinds(state[1])
    jaxmem.save(tmp_path, state, step=1)
    like = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state
    )
    losses = []
    for _ in range(2):
        state, loss = run(state, X)
        losses.append(float(loss))
    state = jaxmem.restore(tmp_path, like)
    assert "pinned_host" in kinds(state[1])
    for expected in losses:
        state, loss = run(state, X)
        assert float(loss) == expected


# --- which checkpoints there are -------------------------------------------------------------


def test_the_newest_are_kept_and_any_of_them_can_be_restored(tmp_path):
    for step in (1, 5, 7, 12):
        jaxmem.save(tmp_path, {"w": jnp.full(3, float(step))}, step=step, keep=2)
    like = {"w": jnp.zeros(3)}
    assert jaxmem.restore(tmp_path, like)["w"][0] == 12
    assert jaxmem.restore(tmp_path, like, step=7)["w"][0] == 7
    with pytest.raises(CheckpointError, match="no complete checkpoint 5; there are: 7, 12"):
        jaxmem.restore(tmp_path, like, step=5)


def test_all_are_kept_unless_told_otherwise(tmp_path):
    for step in range(4):
        jaxmem.save(tmp_path, {"w": jnp.full(3, float(step))}, step=step)
    assert jaxmem.restore(tmp_path, {"w": jnp.zeros(3)}, step=0)["w"][0] == 0


def test_a_number_must_come_after_those_that_are_there(tmp_path):
    jaxmem.save(tmp_path, {"w": jnp.zeros(3)}, step=5)
    for step in (5, 2):
        with pytest.raises(CheckpointError, match=f"step {step} does not come after 5"):
            jaxmem.save(tmp_path, {"w": jnp.ones(3)}, step=step)
    assert jaxmem.restore(tmp_path, {"w": jnp.ones(3)})["w"][0] == 0


def test_other_names_of_a_directory_are_the_same_directory(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    jaxmem.save(tmp_path / "link", {"w": jnp.zeros(3)}, step=0)
    jaxmem.save(tmp_path / "link" / ".." / "real", {"w": jnp.ones(3)}, step=1)
    assert jaxmem.restore(tmp_path / "real", {"w": jnp.zeros(3)})["w"][0] == 1


def test_what_is_deleted_between_saves_is_gone(tmp_path):
    for step in (3, 1, 2):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        jaxmem.save(tmp_path / "run", {"w": jnp.full(3, float(step))}, step=step, wait=True)
        assert jaxmem.restore(tmp_path / "run", {"w": jnp.zeros(3)})["w"][0] == step
    shutil.rmtree(tmp_path / "run" / "2")
    jaxmem.save(tmp_path / "run", {"w": jnp.full(3, 9.0)}, step=2)
    assert jaxmem.restore(tmp_path / "run", {"w": jnp.zeros(3)})["w"][0] == 9


def test_numbers_of_numpy_and_jax_are_numbers(tmp_path):
    jaxmem.save(tmp_path, {"w": jnp.zeros(3)}, step=jnp.int32(1), keep=np.int64(2))
    jaxmem.save(tmp_path, {"w": jnp.ones(3)}, step=np.int64(2), keep=2)
    assert jaxmem.restore(tmp_path, {"w": jnp.ones(3)}, step=np.int32(1))["w"][0] == 0


def test_a_directory_that_holds_none_says_why(tmp_path):
    jaxmem.save(tmp_path / "run", {"w": jnp.ones(3)}, step=7, wait=True)
    (tmp_path / "file").write_text("")
    for name, said in (
        ("run/7", r"it is one itself\. Give '.*run' and step=7"),
        ("file", "it is a file"),
        ("none", "there is no such directory"),
    ):
        with pytest.raises(CheckpointError, match=f"holds no complete checkpoint: {said}"):
            jaxmem.restore(tmp_path / name, {"w": jnp.ones(3)})


def test_an_empty_directory_says_so(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
            jaxmem.restore(path, {"w": jnp.zeros(3)})
    assert not (tmp_path / "none").exists()


# --- what does not match ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.pop("w"), r"only in the checkpoint: \['w'\]"),
        (lambda s: s.update(more=jnp.zeros(1)), r"not in the checkpoint: \['more'\]"),
        (lambda s: s.update(w=jnp.zeros(4)), r"\['w'\] \(float32\[4\], saved as float32\[3\]\)"),
        (
            lambda s: s.update(w=jnp.zeros(3, jnp.bfloat16)),
            r"\['w'\] \(bfloat16\[3\], saved as float32\[3\]\)",
        ),
        (lambda s: s.update(n=1.5), r"\['n'\] \(float, saved as int\)"),
        (lambda s: s.update(n=jnp.zeros(())), r"\['n'\] \(float32\[\], saved as int\)"),
        (
            lambda s: s.update(key=jax.random.key(0, impl="rbg")),
            r"\['key'\] \(key<rbg>, saved as key<fry>\)",
        ),
    ],
)
def test_another_tree_is_named_leaf_by_leaf(tmp_path, change, said):
    def make():
        return {"w": jnp.ones(3), "n": 2, "key": jax.random.key(0)}

    jaxmem.save(tmp_path, make(), step=0)
    like = make()
    change(like)
    with pytest.raises(CheckpointError, match=said):
        jaxmem.restore(tmp_path, like)


@pytest.mark.parametrize(
    ("saved", "given", "said"),
    [
        (lambda s: s, lambda s: {"train": s}, r"the same without \['train'\] in front: give what"),
        (lambda s: {"train": s}, lambda s: s, r"the same with \['train'\] in front: give a tree"),
        (lambda s: s, lambda s: {**s, "w": s["w"].astype("bfloat16")}, "For another dtype restore"),
    ],
)
def test_what_was_probably_meant_is_said(tmp_path, saved, given, said):
    state = {"w": jnp.ones((3, 2)), "b": jnp.ones(3)}
    jaxmem.save(tmp_path, saved(state), step=0)
    with pytest.raises(CheckpointError, match=said):
        jaxmem.restore(tmp_path, given(state))


def test_a_place_that_is_none_is_no_damage(tmp_path, monkeypatch):
    """A leaf that is whole on disk is never called damaged."""
    state = {"w": jnp.ones((6, 2)), "b": jnp.ones(3)}
    jaxmem.save(tmp_path, state, step=0, wait=True)
    absent = NamedSharding(AbstractMesh((3,), ("d",)), PartitionSpec("d"))
    like = jax.eval_shape(lambda: state)
    like["w"] = jax.ShapeDtypeStruct((6, 2), jnp.float32, sharding=absent)
    with pytest.raises(CheckpointError, match=r"^\['w'\] \[6, 2\] is to go to an AbstractMesh"):
        jaxmem.restore(tmp_path, like)
    read = reading._read

    def without_room(place, wanted):
        if any(getattr(a, "sharding", None) is not None for a in wanted.values()):
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return read(place, wanted)

    monkeypatch.setattr(reading, "_read", without_room)
    like["w"] = jax.ShapeDtypeStruct((6, 2), jnp.float32, sharding=DEVICE)
    said = r"not damaged, and \['w'\] cannot be put where it is to go: RESOURCE_EXHAUSTED"
    with pytest.raises(CheckpointError, match=said):
        jaxmem.restore(tmp_path, like)


def test_nothing_of_a_model_is_changed_where_something_does_not_match(tmp_path):
    jaxmem.save(tmp_path, {"model": nnx.Linear(3, 4, rngs=nnx.Rngs(0)), "n": 1}, step=0)
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(1))
    before = np.asarray(model.kernel[...])
    with pytest.raises(CheckpointError, match="only in the checkpoint"):
        jaxmem.restore(tmp_path, {"model": model})
    np.testing.assert_array_equal(before, model.kernel[...])


@pytest.mark.parametrize(
    ("state", "options", "said"),
    [
        ({"f": print}, {}, r"\['f'\] is a builtin_function_or_method"),
        ({"o": np.array(["a"], object)}, {}, r"\['o'\] is a ndarray of object"),
        ({"o": np.zeros(3, ">f4")}, {}, r"\['o'\] is a ndarray of >f4"),
        ({"o": np.zeros(3, np.longdouble)}, {}, r"\['o'\] is a ndarray of float128"),
        ({"o": np.zeros(3, [("a", "f4")])}, {}, r"\['o'\] is a ndarray of \["),
        ({"o": np.ma.masked_equal([1, 2], 2)}, {}, r"\['o'\] is a MaskedArray"),
        ({"o": jnp.zeros(3, jnp.uint4)}, {}, r"\['o'\] is a ArrayImpl of uint4"),
        ({"o": signal.SIGTERM, "w": np.ones(3)}, {}, r"\['o'\] is a Signals"),
        ({"w": jax.ShapeDtypeStruct((3,), jnp.float32)}, {}, r"\['w'\] has a shape and no data"),
        ({"o": DEVICE}, {}, r"\['o'\] is a SingleDeviceSharding.* jax\.ShapeDtypeStruct\(shape"),
        ({"n": 3}, {}, "holds no arrays"),
        ({"w": np.ones(3)}, {"step": -1}, "step=-1"),
        ({"w": np.ones(3)}, {"step": 1.0}, r"step=1\.0"),
        ({"w": np.ones(3)}, {"keep": 0}, "keep=0"),
    ],
)
def test_what_cannot_be_saved_is_named_and_nothing_is_written(tmp_path, state, options, said):
    with pytest.raises(CheckpointError, match=said):
        jaxmem.save(tmp_path / "run", state, **{"step": 0, **options})
    assert not (tmp_path / "run").exists()


def test_numbers_of_numpy_and_jax_number_checkpoints(tmp_path):
    for step in (np.int64(1), jnp.int32(2), np.uint8(3)):
        jaxmem.save(tmp_path, {"w": jnp.full(3, float(step))}, step=step, wait=True)
        found = jaxmem.restore(tmp_path, {"w": jnp.zeros(3)}, step=step)
        assert float(found["w"][0]) == float(step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2", "3"]


@pytest.mark.parametrize("step", [True, "1", 1.0, -1])
def test_what_is_no_number_of_a_checkpoint_is_told_when_one_is_read(tmp_path, step):
    jaxmem.save(tmp_path, {"w": jnp.ones(3)}, step=1, wait=True)
    with pytest.raises(CheckpointError, match=f"step={step!r}: give the number"):
        jaxmem.restore(tmp_path, {"w": jnp.zeros(3)}, step=step)


def test_a_donated_leaf_is_named(tmp_path):
    w = jnp.ones(3)
    w.delete()
    with pytest.raises(CheckpointError, match=r"\['w'\] was donated or deleted"):
        jaxmem.save(tmp_path, {"w": w}, step=0)


def test_a_directory_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file, and cannot hold"):
        jaxmem.save(tmp_path / "file", {"w": jnp.ones(3)}, step=0)


def test_orbax_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(MissingExtraError, match="pip install"):
        jaxmem.save(tmp_path, {"w": jnp.ones(3)}, step=0)
