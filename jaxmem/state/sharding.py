"""Lay a state out over a mesh by rules: FSDP, ZeRO, and specs by patterns of paths."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxmem.errors import ShardingError
from jaxmem.runtime.asked import FEWEST_BYTES
from jaxmem.state.leaves import leaves_of, specs_like
from jaxmem.state.rules import Patterns, matches
from jaxmem.state.sharded import Sharded
from jaxmem.state.sharder import Rules, Sharder

_WARNED = 8


def shard(
    tree: Any,
    mesh: Mesh | AbstractMesh,
    rules: Rules | Sequence[Rules] = (),
    *,
    specs: Any = None,
    axis: str | tuple[str, ...] | None = None,
    logical: Mapping[str, str | tuple[str, ...] | None] | None = None,
    host: str | Sequence[str] = (),
) -> Sharded:
    """How each leaf of a state is split over a mesh, and what it costs on each device.

    For ``jax.device_put(state, shard(...).shardings)`` and ``jax.jit(in_shardings=...)``; nothing
    is moved by this alone. Specs come first: ``specs``, or those that leaves carry (boxes of
    ``flax.linen``, variables of ``flax.nnx``). Rules then split what is left, in order.

    A step that :func:`jaxmem.fit` compiles has what it makes of a batch split as the batch is. One
    that ``jax.jit`` compiles should say so of its activations
    (``jax.lax.with_sharding_constraint``): left alone, XLA may exchange them in every layer.

    Args:
        tree: arrays, ``jax.ShapeDtypeStruct``, NNX objects or states.
        mesh: devices, or ``jax.sharding.AbstractMesh`` for those of a cluster that is not there.
        rules: ``"fsdp"`` or ``"zero3"`` splits each leaf of 64 KiB and more along its rows, the
            last dimension but one, or along its largest dimension where rows are fewer than a
            quarter of that or do not divide; ``"zero1"`` only the optimizer's state. A mapping of
            patterns of paths has a ``PartitionSpec``, such a name or ``None`` (whole) for the
            leaves of which it is the first that matches: tensor parallelism is ``{"*up*":
            PartitionSpec(None, "model")}``. Of several rules each splits dimensions that those
            before it left.
        specs: a tree of ``PartitionSpec`` like ``tree``, or a prefix of it; ``None`` for none.
        axis: what named rules split over; by default the only axis of the mesh, or its axes
            ``"data"`` and ``"fsdp"``.
        logical: for names in specs that are no axes of the mesh the axes that they stand for, or
            ``None``.
        host: patterns of leaves that wait in pinned host memory, as of ``fit(host=...)``; those of
            less than 1 MiB stay on the device, as there.

    Returns:
        Shardings and a row for each leaf. Leaves that are whole on each device though a rule was to
        split them, and large ones that no rule is for, are named by ``warnings.warn`` as well.

    Raises:
        ShardingError: ``mesh`` is none, or a leaf is no array; an axis or a rule does not exist, a
            spec does not fit its leaf, a pattern matches nothing.

    Rules are named after ZeRO (Rajbhandari et al., arXiv:1910.02054) and PyTorch's FSDP.

    >>> import jax.numpy as jnp
    >>> state = {"w": jax.ShapeDtypeStruct((512, 1024), jnp.float32), "step": jnp.int32(0)}
    >>> found = shard(state, jax.sharding.AbstractMesh((8,), ("data",)), "fsdp")
    >>> tuple(found.shardings["w"].spec), found.device_bytes
    (('data',), 262148)
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ShardingError(
            f"mesh is {mesh!r:.80}. Give a jax.sharding.Mesh, such as jax.make_mesh((8,), "
            '("data",)), or an AbstractMesh.'
        )
    if not isinstance(logical, Mapping | None):
        raise ShardingError(
            f"logical={logical!r:.80}: give what each logical axis stands for, such as "
            '{"mlp": "model"}.'
        )
    leaves, structure, opened = leaves_of(tree)
    sharder = Sharder(leaves, dict(mesh.shape), axis)
    given = [leaf.own for leaf in leaves] if specs is None else specs_like(specs, opened)
    sharder.take(given, logical or {})
    given_rules: Any = rules
    is_one = isinstance(rules, PartitionSpec) or not isinstance(rules, list | tuple)
    for rule in [given_rules] if is_one else given_rules:
        sharder.apply(rule)
    asked: Any = host
    patterns = [*asked] if isinstance(asked, Iterable) and not isinstance(asked, str) else [asked]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise ShardingError(f'host={host!r:.80}: give patterns of paths, such as "*opt_state*".')
    Patterns(dict.fromkeys(patterns)).check([leaf.names for leaf in leaves])
    hosted = {
        leaf.path
        for leaf in leaves
        if leaf.nbytes >= FEWEST_BYTES and any(matches(leaf.names, p) for p in patterns)
    }
    found = Sharded(
        jax.tree_util.tree_unflatten(structure, sharder.shardings(mesh, hosted)),
        sharder.rows(hosted),
        sharder.sizes,
        sharder.data_axes,
    )
    if told := short(found.warnings):
        warnings.warn("jaxmem.shard: " + "\n  ".join(told), UserWarning, stacklevel=2)
    return found


def short(lines: Sequence[str]) -> list[str]:
    """The first few lines, and how many more there are."""
    rest = len(lines) - _WARNED
    return [*lines[:_WARNED], *([f"and {rest} more"] if rest > 0 else [])]
