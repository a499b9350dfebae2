"""What checkpoints look like on disk, and Orbax, which writes and reads them."""

from __future__ import annotations

import contextlib
import operator
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxmem import processes
from jaxmem.errors import CheckpointError, MissingExtraError
from jaxmem.state import seal
from jaxmem.state.manifest import Manifest
from jaxmem.units import format_bytes

# The items of a checkpoint: arrays, as Orbax alone can read them, and what they must be.
ARRAYS, LIST = "state", "jaxmem"
# What Orbax calls directories that are not complete; nothing of that name is ever restored.
_HALF = "*.orbax-checkpoint-tmp*"
# So often, a tenth of a second apart, it is looked whether they stay away; at most for so long.
_LOOKS, _DELETING_SECONDS = 4, 10.0
# What systems say where there is no room, as TensorStore and Python hand it on, and what helps.
_NO_ROOM = {
    "No space left on device": "Make room there, keep fewer with keep=, or give another directory.",
    "Disk quota exceeded": "Your quota is used up: delete something, or give another directory.",
    "File too large": "The system refuses files so large there: see `ulimit -f`.",
}


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


def resolved(directory: str | os.PathLike[str]) -> Path:
    """One name for each directory, whatever links lead there."""
    if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
        raise CheckpointError(f"directory={directory!r:.80}: give the path of a directory.")
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
    step = number_of(step)
    if step is not None:
        check_number(step)
    found = steps(path)
    if not found:
        raise CheckpointError(f"{path} holds no complete checkpoint{_why_none(path)}.")
    if step is not None and step not in found:
        there = ", ".join(map(str, found))
        raise CheckpointError(f"{path} holds no complete checkpoint {step}; there are: {there}.")
    return path / str(found[-1] if step is None else step)


def _why_none(path: Path) -> str:
    if (path / LIST).is_dir() and path.name.isdecimal():
        return f": it is one itself. Give {str(path.parent)!r} and step={path.name}"
    if not path.is_dir():
        return ": it is a file" if path.exists() else ": there is no such directory"
    return ""


def number_of(step: Any) -> Any:
    """A whole number of NumPy or JAX as Python's; anything else as it is."""
    if isinstance(step, bool | np.bool_):
        return step
    try:
        return operator.index(step)
    except TypeError:
        return step


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


def check_writable(path: Path) -> None:
    """Check that Orbax writes what it should into a directory, and deletes nothing else.

    It takes every directory with a number for a checkpoint, and deletes old ones. Where its path is
    a pattern, it does not find what it has written, and loses it without a word.

    Raises:
        CheckpointError: there is such a directory that is none, or the path is a pattern.
    """
    if found := sorted(set("*?[") & set(str(path))):
        raise CheckpointError(
            f"{path} has {' and '.join(found)} in it, which Orbax takes for a pattern: it would "
            "not find the arrays that it writes there. Give a directory of another name."
        )
    inside = path.iterdir() if path.is_dir() else ()
    for found in sorted(p for p in inside if p.name.isdecimal() and p.is_dir()):
        if not (found / LIST).is_dir() or found.name != str(int(found.name)):
            raise CheckpointError(
                f"{found} is no checkpoint of jaxmem.save, and would count as one. Give a "
                "directory of its own."
            )


def half_of(path: Path, step: int) -> Path:
    """Where a checkpoint is while it is being written."""
    found = next(path.glob(f"{step}{_HALF[1:]}"), None)
    if found is None:
        raise CheckpointError(f"what was written of checkpoint {step} in {path} is gone")
    return found


def delete_half_written(path: Path) -> None:
    """Delete what is not complete: on a full disk it takes the room that others need.

    One write that fails ends a save while others are on their way, and they make their directories
    again: it has to stay away for a moment. What comes later still goes with the next save.
    """
    end = time.monotonic() + _DELETING_SECONDS
    looks = _LOOKS if any(path.glob(_HALF)) else 0
    while looks and time.monotonic() < end:
        halves = [*path.glob(_HALF)]
        looks = _LOOKS if halves else looks - 1
        for half in halves:
            shutil.rmtree(half, ignore_errors=True)
        time.sleep(0.1)


def free_bytes(path: Path) -> int:
    """The bytes that are free where a directory is, counting what is half-written in it as free."""
    free = shutil.disk_usage(path).free
    for half in path.glob(_HALF):
        for folder, _, names in os.walk(half):
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # It is being deleted meanwhile.
                    free += (Path(folder) / name).stat().st_blocks * 512
    return free


def unwritten(path: Path, nbytes: int, error: Exception) -> CheckpointError:
    """The error for a checkpoint of ``nbytes`` bytes that this process could not write."""
    free = ""
    with contextlib.suppress(OSError):
        free = f"; {format_bytes(free_bytes(path))} are free there without it"
    left = "unknown"
    with contextlib.suppress(Exception):  # Not where Python is about to end.
        left = ", ".join(map(str, steps(path))) or "none"
    by = f" by process {processes.number()}" if processes.several() else ""
    takes = f"Its arrays take {format_bytes(nbytes)}{free}. " if nbytes else ""
    fix = next((f" {fix}" for said, fix in _NO_ROOM.items() if said in str(error)), "")
    return CheckpointError(
        f"a checkpoint in {path} could not be written{by}: {error}\n  {takes}Complete checkpoints "
        f"that are there: {left}.{fix}"
    )


def damaged(
    place: Path, names: Sequence[str], files: Sequence[str], how: str = "differs"
) -> CheckpointError:
    """The error for leaves that are not what was saved, or for files alone where there are none."""
    others = [str(step) for step in steps(place.parent) if str(step) != place.name]
    what = [f"{_several(names)} {how}."] if names else []
    if files:
        what.append(f"Not as written: {_several(files)}.")
    if not names:
        lists = f"{seal.ITEMS} and {seal.AROUND}"
        what.append(f"Every array is as it was: to take them all the same, delete {lists} in it.")
    if others:
        what.append(f"Try step={others[-1]}.")
    return CheckpointError(f"{place} is damaged: {' '.join(what)}")


def _several(names: Sequence[str]) -> str:
    shown = ", ".join(name or "the state" for name in names[:8])
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")
