"""What checkpoints look like on disk, and Orbax, which writes and reads them."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxmem import processes
from jaxmem.errors import CheckpointError, MissingExtraError
from jaxmem.state.manifest import Manifest
from jaxmem.units import format_bytes

# The items of a checkpoint: arrays, as Orbax alone can read them, and what they must be.
ARRAYS, LIST = "state", "jaxmem"


def orbax() -> Any:
    """The module ``orbax.checkpoint``.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise MissingExtraError(
            "checkpoints are written by Orbax, which is not installed: pip install 'jaxmem[flax]'"
        ) from error
    return orbax.checkpoint


def resolved(directory: str | Path) -> Path:
    """One name for each directory, whatever links lead there."""
    if "://" in str(directory):
        raise CheckpointError(f"{directory} is a URL; checkpoints are in directories.")
    return Path(directory).expanduser().resolve()


def steps(path: Path) -> list[int]:
    """The complete checkpoints of a directory, in order."""
    if not path.is_dir():
        return []
    return sorted(orbax().utils.checkpoint_steps(path))


def check_number(step: Any) -> None:
    """Check the number of a checkpoint.

    Raises:
        CheckpointError: it is none.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise CheckpointError(f"step={step!r}: give the number of the checkpoint, 0 or more.")


def place_of(path: Path, step: int | None) -> Path:
    """Where a checkpoint is, the newest by default.

    Raises:
        CheckpointError: there is none, or ``step`` is no number.
    """
    if step is not None:
        check_number(step)
    found = steps(path)
    if not found:
        raise CheckpointError(f"{path} holds no complete checkpoint.")
    if step is not None and step not in found:
        there = ", ".join(map(str, found))
        raise CheckpointError(f"{path} holds no complete checkpoint {step}; there are: {there}.")
    return path / str(found[-1] if step is None else step)


def manifest_of(place: Path) -> Manifest:
    """The list of what a checkpoint holds.

    Raises:
        CheckpointError: it has none, or that is damaged or of another version.
    """
    ocp = orbax()
    try:
        written = ocp.JsonCheckpointHandler().restore(place / LIST)
    except Exception as error:
        if (place / LIST).is_dir():
            raise CheckpointError(
                f"{place} is damaged: the list of what it holds cannot be read ({error})."
            ) from error
        raise CheckpointError(
            f"{place} was not written by jaxmem.save: it has no list of checksums. Read it with "
            "Orbax."
        ) from error
    return Manifest.from_json(written, place)


def check_own(path: Path) -> None:
    """Orbax takes every directory with a number for a checkpoint, and deletes old ones.

    Raises:
        CheckpointError: there is such a directory that is none.
    """
    inside = path.iterdir() if path.is_dir() else ()
    for found in sorted(p for p in inside if p.name.isdecimal() and p.is_dir()):
        if not (found / LIST).is_dir() or found.name != str(int(found.name)):
            raise CheckpointError(
                f"{found} is no checkpoint of jaxmem.save, and would count as one. Give a "
                "directory of its own."
            )


def unwritten(path: Path, nbytes: int, error: Exception) -> CheckpointError:
    """The error for a checkpoint of ``nbytes`` bytes that this process could not write."""
    free = ""
    with contextlib.suppress(OSError):
        free = f"; {format_bytes(shutil.disk_usage(path).free)} are free there"
    left = "unknown"
    with contextlib.suppress(Exception):  # Not where Python is about to end.
        left = ", ".join(map(str, steps(path))) or "none"
    by = f" by process {processes.number()}" if processes.several() else ""
    return CheckpointError(
        f"a checkpoint in {path} could not be written{by}: {error}\n  Its arrays take "
        f"{format_bytes(nbytes)}{free}. Complete checkpoints that are there: {left}."
    )


def damaged(place: Path, names: Sequence[str]) -> CheckpointError:
    """The error for leaves that are not what was saved."""
    others = [str(step) for step in steps(place.parent) if str(step) != place.name]
    named = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    hint = f" Try step={others[-1]}." if others else ""
    return CheckpointError(f"{place} is damaged: what was read of {named} was not saved.{hint}")
