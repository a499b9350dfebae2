"""Trees of arrays with what each branch takes, and where: text everywhere, treescope in notebooks.

treescope (google-deepmind/treescope, which Flax brings) draws a tree that opens and closes; each
line gets what it costs as an annotation. Without it a notebook shows the text.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import jax
from rich.text import Text
from rich.tree import Tree

from jaxmem.show.rows import clean, type_text
from jaxmem.state.tiers import PlacedLeaf, PlacedTree, placed, sums
from jaxmem.units import format_bytes

_MOST_LINES = 400
_COLOURS = {"device": "cyan", "pinned host": "yellow", "host": "yellow", "disk": "magenta"}


def tree(state: Any) -> PlacedTree:
    """A tree of arrays, each with its bytes, its memory, and how it is split over a mesh.

    It shows itself where it is printed or the last line of a notebook's cell; nothing is moved or
    computed. Branches that are alike, as the layers of a net, are shown once in text.

    Args:
        state: any tree: arrays, ``jax.ShapeDtypeStruct``, NumPy arrays, memory-mapped files, NNX
            modules and optimizers.

    >>> import numpy as np
    >>> layers = [{"w": np.zeros((64, 64), np.float32), "b": np.zeros(64, np.float32)}] * 3
    >>> print(tree({"layers": layers, "step": 7}))
    48.8KiB host
    ├── ['layers']  48.8KiB host
    │   └── [0] … [2]  3 alike, each 16.2KiB host
    │       ├── ['b']  f32[64]  256B host
    │       └── ['w']  f32[64,64]  16.0KiB host
    └── ['step']  int
    """
    return placed(state)


@dataclass(eq=False)
class Branch:
    """A part of a tree: a leaf, or what is below a key."""

    key: str
    leaf: PlacedLeaf | None = None
    below: dict[str, Branch] = field(default_factory=dict)

    def leaves(self) -> Iterator[PlacedLeaf]:
        """All leaves of it."""
        if self.leaf is not None:
            yield self.leaf
        for branch in self.below.values():
            yield from branch.leaves()

    def form(self) -> tuple:
        """What two branches that are shown alike have in common: all but their keys."""
        own = self.leaf and vars(self.leaf)
        return (
            tuple(sorted(own.items())) if own else None,
            tuple((key, branch.form()) for key, branch in self.below.items()),
        )


def branches(shown: PlacedTree) -> Branch:
    """The tree by its keys."""
    root = Branch("")
    for path, leaf in jax.tree_util.tree_leaves_with_path(shown.tree):
        at = root
        for entry in path:
            key = str(entry)
            at = at.below.setdefault(key, Branch(key))
        at.leaf = leaf
    return root


def tree_view(shown: PlacedTree, width: int) -> Tree:
    """Returns a tree as rich prints it."""
    root = branches(shown)
    several = any(leaf.split or leaf.copies > 1 for leaf in root.leaves())
    words = _words("on each device:" if several else "", root)
    drawn = Tree(_line(words if any(words) else ["nothing"], root), guide_style="dim")
    left = [_MOST_LINES]
    _draw(drawn, root, left)
    if left[0] < 0:
        drawn.add(f"… and {-left[0]} more lines")
    return drawn


def _draw(drawn: Tree, branch: Branch, left: list[int]) -> None:
    for alike in _groups(list(branch.below.values())):
        left[0] -= 1
        if left[0] >= 0:
            key, first = _joined(alike[0])
            if len(alike) > 1:
                key = f"{key} … {_joined(alike[-1])[0]}"
            below = drawn.add(_line(_words(key, first, len(alike)), first))
            _draw(below, first, left)


def _joined(branch: Branch) -> tuple[str, Branch]:
    """A branch with those of its only branches, and so on, and their keys as one."""
    key = clean(branch.key)
    while branch.leaf is None and len(branch.below) == 1:
        (branch,) = branch.below.values()
        key += clean(branch.key)
    return key, branch


def _words(key: str, branch: Branch, alike: int = 1) -> list[str]:
    """A key, a type, and what it takes."""
    leaf = branch.leaf
    many = f"{alike} alike, each " if alike > 1 else ""
    if leaf is not None:
        return [key, type_text_of(leaf), many + _leaf_cost(leaf)]
    return [key, many + _cost(list(branch.leaves()))]


def _groups(found: Sequence[Branch]) -> Iterator[list[Branch]]:
    """Neighbours that are alike, if there are at least three of them."""
    runs: list[list[Branch]] = []
    for branch in found:
        if runs and runs[-1][0].form() == branch.form():
            runs[-1].append(branch)
        else:
            runs.append([branch])
    for run in runs:
        yield from [run] if len(run) > 2 else ([branch] for branch in run)


def _line(words: Sequence[str], branch: Branch) -> Text:
    tiers = {leaf.tier for leaf in branch.leaves() if leaf.nbytes}
    style = _COLOURS.get(next(iter(tiers)), "") if len(tiers) == 1 else ""
    line = Text(overflow="fold")
    for number, word in enumerate(filter(None, words)):
        line.append("  " * bool(number)).append(word, style if number else "")
    return line


def type_text_of(leaf: PlacedLeaf) -> str:
    """The type of a leaf as JAX writes it; of what is no array its class."""
    return type_text(leaf.dtype, leaf.shape) if leaf.is_array else clean(leaf.dtype, 40)


def _leaf_cost(leaf: PlacedLeaf) -> str:
    """For instance ``"2.0MiB pinned host of 16.0MiB, split over data"``."""
    if not leaf.is_array:
        return ""
    text = f"{format_bytes(leaf.device_bytes)} {leaf.tier}"
    if leaf.split:
        text += f" of {format_bytes(leaf.nbytes)}, split over {clean(leaf.split)}"
    return f"{text}, on {leaf.copies} devices" if leaf.copies > 1 else text


def _cost(leaves: list[PlacedLeaf]) -> str:
    """Bytes of a branch by memory; where it is split those of each device."""
    text = ", ".join(f"{format_bytes(n)} {tier}" for tier, n in sums(leaves).items())
    if any(leaf.split for leaf in leaves):
        text += f" of {format_bytes(sum(leaf.nbytes for leaf in leaves))}"
    return text


def tree_html(shown: PlacedTree) -> str:
    """Returns a tree as HTML: treescope's, or the text where treescope is not installed."""
    try:
        import treescope
    except ImportError:
        from jaxmem.show.terminal import plain_text

        return f"<pre>{escape(plain_text(tree_view(shown, 100), 100))}</pre>"
    from treescope import lowering, rendering_parts

    renderer = treescope.active_renderer.get().extended_with(
        handlers=[_render_leaf], wrapper_hooks=[_render_branch]
    )
    with warnings.catch_warnings():
        # treescope 0.1.10 looks np.chararray up, about which NumPy 2.5 warns.
        warnings.filterwarnings("ignore", "The chararray", DeprecationWarning)
        drawn = rendering_parts.build_full_line_with_annotations(
            renderer.to_foldable_representation(shown.tree)
        )
        treescope.active_expansion_strategy.get()(drawn)
        # Uncompressed it can be read, if not folded, where scripts are taken out, as on GitHub.
        return lowering.render_to_html_as_root(drawn, compressed=False)


def _render_leaf(node: Any, path: str | None, subtree_renderer: Any) -> Any:
    """For treescope: a leaf by its type."""
    if not isinstance(node, PlacedLeaf):
        return NotImplemented
    from treescope import rendering_parts

    return rendering_parts.build_one_line_tree_node(
        rendering_parts.text(type_text_of(node)), path=path
    )


def _render_branch(node: Any, path: str | None, node_renderer: Any) -> Any:
    """For treescope: what a branch takes before it, where it is seen when that is folded."""
    from treescope import rendering_parts

    leaves = jax.tree_util.tree_leaves(node)
    if not leaves or not all(isinstance(leaf, PlacedLeaf) for leaf in leaves):
        return NotImplemented
    drawn = node_renderer(node, path=path)
    if isinstance(node, PlacedLeaf):
        cost = _leaf_cost(node)
        note = rendering_parts.comment_color(rendering_parts.text(f"  {cost}" if cost else ""))
        return rendering_parts.RenderableAndLineAnnotations(drawn.renderable, note)
    cost = _cost(leaves)
    note = rendering_parts.comment_color(rendering_parts.text(f"{cost}  " if cost else ""))
    return rendering_parts.RenderableAndLineAnnotations(
        rendering_parts.siblings(note, drawn.renderable), drawn.annotations
    )
