"""The list in a checkpoint of what it holds: names, shapes, dtypes, values and checksums."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxmem.errors import CheckpointError
from jaxmem.state.contents import Contents
from jaxmem.state.sums import kind_of

# How this version writes checkpoints; it reads no others.
FORMAT = 1
_SHOWN = 8


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        arrays: the checksum of each array, which says its dtype and shape as well.
        keys: for those that are random keys the dtype of those.
        values: numbers and texts.
    """

    arrays: Mapping[str, str]
    keys: Mapping[str, str]
    values: Mapping[str, Any]

    @classmethod
    def of(cls, contents: Contents, sums: Mapping[str, str]) -> Manifest:
        """The list of a state."""
        return cls(dict(sums), dict(contents.keys), dict(contents.values))

    def to_json(self) -> dict[str, Any]:
        """It as JSON, with a checksum of its own."""
        text = json.dumps({"arrays": self.arrays, "keys": self.keys, "values": self.values})
        return {
            "format": FORMAT,
            "by": f"jaxmem {_version()}",
            "sha256": _digest(text),
            "list": text,
        }

    @classmethod
    def from_json(cls, written: Any, place: Path) -> Manifest:
        """The list that is written in the checkpoint at ``place``.

        Raises:
            CheckpointError: it is damaged, or was written by another version.
        """
        if not isinstance(written, dict) or not {"format", "sha256", "list"} <= written.keys():
            raise CheckpointError(f"{place} is damaged: its list of what it holds is no such list.")
        if written["format"] != FORMAT:
            raise CheckpointError(
                f"{place} has format {written['format']!r}, written by "
                f"{written.get('by', 'an unknown version')}; this is jaxmem {_version()}, which "
                f"reads format {FORMAT}. Restore it with the version that wrote it."
            )
        if _digest(written["list"]) != written["sha256"]:
            raise CheckpointError(f"{place} is damaged: its list of what it holds was changed.")
        found = json.loads(written["list"])
        return cls(found["arrays"], found["keys"], found["values"])

    def check(self, contents: Contents, place: Path) -> None:
        """Check that a tree has the leaves of this checkpoint.

        Raises:
            CheckpointError: leaves are missing or not in the checkpoint, or differ in shape, dtype
                or kind.
        """
        mine = {name: kind_of(a) for name, a in contents.arrays.items()}
        mine.update(contents.keys)
        mine.update((name, type(value).__name__) for name, value in contents.values.items())
        saved = {name: text.rsplit(" ", 1)[0] for name, text in self.arrays.items()}
        saved.update(self.keys)
        saved.update((name, type(value).__name__) for name, value in self.values.items())
        more, lacking = [n for n in mine if n not in saved], [n for n in saved if n not in mine]
        lines = [
            *_several("not in the checkpoint", more),
            *_several("only in the checkpoint", lacking),
            *_several(
                "differ",
                [
                    f"{name} ({mine[name]}, saved as {saved[name]})"
                    for name in mine
                    if name in saved and mine[name] != saved[name]
                ],
            ),
        ]
        if lines:
            text = "\n  ".join([*lines, *_hints(more, lacking, mine, saved)])
            raise CheckpointError(
                f"{place} does not hold a state like the one that was given:\n  {text}"
            )


def _hints(
    more: list[str], lacking: list[str], mine: Mapping[str, str], saved: Mapping[str, str]
) -> list[str]:
    """What was probably meant."""
    if key := _around(more, lacking):
        return [f"The checkpoint has the same without {key} in front: give what is in it."]
    if key := _around(lacking, more):
        return [f"The checkpoint has the same with {key} in front: give a tree with it."]
    others = [n for n in mine if n in saved and mine[n] != saved[n] and "[" in mine[n]]
    if any(mine[n].partition("[")[2] == saved[n].partition("[")[2] for n in others):
        return ["For another dtype restore a leaf as it was saved, and convert it then."]
    return []


def _around(outer: list[str], inner: list[str]) -> str:
    """The key in front of all the names in ``outer`` without which they are in ``inner``, or ""."""
    first = outer[0] if outer else ""
    keys = (first.removesuffix(name) for name in inner if first.endswith(name))
    return next((key for key in keys if {n.removeprefix(key) for n in outer} <= {*inner}), "")


def _several(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{what}: {', '.join(name or 'the state itself' for name in names[:_SHOWN])}{more}"]


def _version() -> str:
    # The package is there when its parts are; they do not import it.
    return sys.modules["jaxmem"].__version__


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
