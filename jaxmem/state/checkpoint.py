"""Save a state with Orbax, and restore it anywhere: another mesh, other memory, checked."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import _compat
from jaxmem.errors import CheckpointError, MissingExtraError
from jaxmem.program import leaves
from jaxmem.state.contents import Contents, contents_of
from jaxmem.state.manifest import Manifest
from jaxmem.state.sums import Sum
from jaxmem.units import format_bytes

# The items of a checkpoint: arrays, as Orbax alone can read them, and what they must be.
_ARRAYS, _LIST = "state", "jaxmem"
# Orbax reads about so much at a time, or one leaf if that is larger.
_READ_BYTES = 2**30
# Threads save one after the other: Orbax's manager of a directory is for one at a time.
_lock = threading.RLock()
_open: dict[Path, _Directory] = {}
# A fork of it has none of the threads that write.
_PROCESS = os.getpid()


@dataclass(frozen=True, eq=False)
class Saving:
    """A checkpoint that is being written.

    Attributes:
        path: where it will be, complete; until then nothing of that name is there.
        step: its number.
        nbytes: bytes of its arrays.
    """

    path: Path
    step: int
    nbytes: int
    _directory: _Directory

    def wait(self) -> None:
        """Until the checkpoint is complete, and those that it pushes out are gone.

        Raises:
            CheckpointError: it could not be written; those before it are still there.
        """
        with _lock:
            self._directory.wait()


def save(
    directory: str | Path, state: Any, *, step: int, keep: int | None = None, wait: bool = False
) -> Saving:
    """A checkpoint on its way to ``directory/step``, written by Orbax while training goes on.

    When this returns, the arrays may be donated, deleted or changed in place. A checkpoint is there
    as a whole or not at all. It has checksums of all arrays, which :func:`restore` verifies.

    Wait for the last one: from Python 3.12 on, Orbax cannot complete it once Python has begun to
    end, and then a line on stderr says that it is not there.

    Args:
        directory: where all checkpoints of a run are; it is made.
        state: a pytree of arrays, numbers and texts, NNX objects, or all of them. Arrays may be
            split over a mesh and live in host memory, as a plan wants them.
        step: the number of the checkpoint; larger than those that are there.
        keep: so many checkpoints are left, the newest; all for ``None``. An older one goes when
            the new one is complete.
        wait: return when it is complete.

    Raises:
        CheckpointError: a leaf cannot be saved; the step is there already or a later one is; the
            disk has less room than the arrays take; the checkpoint before could not be written.
        MissingExtraError: Orbax is not installed.

    Cost:
        Host memory for a copy of what is on devices, and for that of pinned host memory, until
        the checkpoint is written; one pass over all arrays for the checksums.

    >>> import tempfile
    >>> import jaxmem
    >>> import jax.numpy as jnp
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     jaxmem.save(directory, {"w": jnp.arange(3.0), "epoch": 2}, step=7).wait()
    ...     jaxmem.restore(directory, {"w": jnp.zeros(3), "epoch": 0})
    {'epoch': 2, 'w': Array([0., 1., 2.], dtype=float32)}
    """
    _check_processes("save")
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise CheckpointError(f"step={step!r}: give the number of the checkpoint, 0 or more.")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise CheckpointError(f"keep={keep!r}: give how many checkpoints are left, 1 or more.")
    contents = contents_of(state)
    lacking = [name for name, a in contents.arrays.items() if leaves.is_abstract(a)]
    if lacking:
        raise CheckpointError(f"{lacking[0]} has a shape and no data. Save a state of arrays.")
    gone = [name for name, a in contents.arrays.items() if _is_deleted(a)]
    if gone:
        raise CheckpointError(
            f"{gone[0]} was donated or deleted and holds no data. Save what the step returned."
        )
    if not any(a.size for a in contents.arrays.values()):
        raise CheckpointError("the state holds no arrays, so there is nothing to save.")
    with _lock:
        saving = _directory(directory, keep).save(contents, step)
    if wait:
        saving.wait()
    return saving


def restore(directory: str | Path, like: Any, *, step: int | None = None) -> Any:
    """The state of a checkpoint, in the form, the places and the memory of ``like``.

    Each leaf is read once, to where it belongs: the mesh, the memory kind and the plan may be
    others than those it was saved from. Nothing of ``like`` is changed before all is verified.

    Args:
        directory: that of :func:`save`.
        like: a tree of the same leaves, by name, shape and dtype: arrays, which say where theirs
            go, or ``jax.ShapeDtypeStruct`` with or without a sharding, which need no memory. NNX
            objects in it are given the arrays in place.
        step: the checkpoint; the newest by default.

    Raises:
        CheckpointError: there is none; it is damaged, by leaf; it was written by another version;
            leaves are missing, or of another shape or dtype.
        MissingExtraError: Orbax is not installed.

    Cost:
        About 1 GiB of host memory beside the state, or the largest leaf if that is more.
    """
    _check_processes("restore")
    path = _resolved(directory)
    with _lock:
        writing = _open.get(path)
        if writing is not None:
            writing.wait()
    found = _steps(path)
    if not found:
        raise CheckpointError(f"{path} holds no complete checkpoint.")
    if step is not None and step not in found:
        there = ", ".join(map(str, found))
        raise CheckpointError(f"{path} holds no complete checkpoint {step}; there are: {there}.")
    place = path / str(found[-1] if step is None else step)
    contents = contents_of(like)
    manifest = _manifest(place)
    manifest.check(contents, place)
    arrays = _arrays(place, contents)
    damaged = [
        name
        for name, total in {name: Sum(a) for name, a in arrays.items()}.items()
        if str(total) != manifest.arrays[name]
    ]
    if damaged:
        raise _damaged(place, damaged, found)
    return contents.rebuilt({**arrays, **manifest.values})


class _Directory:
    """The checkpoints of a run, while they are being written.

    Attributes:
        path: where they are.
        keep: how many are left.
        needed: bytes of the last one.
        failed: why it could not be written.
    """

    def __init__(self, path: Path, keep: int | None):
        ocp = _orbax()
        self.path, self.keep, self.needed = path, keep, 0
        self.manager: Any = None
        self.failed: CheckpointError | None = None
        if path.exists() and not path.is_dir():
            raise CheckpointError(
                f"{path} is a file, and cannot hold checkpoints: give a directory."
            )
        self._check_own()
        with self._failing():
            self.manager = ocp.CheckpointManager(
                path,
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=keep, cleanup_tmp_directories=True
                ),
                item_handlers={
                    _ARRAYS: ocp.PyTreeCheckpointHandler(),
                    _LIST: ocp.JsonCheckpointHandler(),
                },
            )

    def _check_own(self) -> None:
        """Orbax takes every directory with a number for a checkpoint, and deletes old ones."""
        inside = self.path.iterdir() if self.path.is_dir() else ()
        for found in sorted(p for p in inside if p.name.isdecimal() and p.is_dir()):
            if not (found / _LIST).is_dir() or found.name != str(int(found.name)):
                raise CheckpointError(
                    f"{found} is no checkpoint of jaxmem.save, and would count as one. Give a "
                    "directory of its own."
                )

    def save(self, contents: Contents, step: int) -> Saving:
        ocp = _orbax()
        self.wait()
        there = _steps(self.path)
        if there != sorted(self.manager.all_steps()):
            self.manager.reload()  # Somebody else wrote or deleted some.
        if there and step <= there[-1]:
            raise CheckpointError(
                f"step {step} does not come after {there[-1]}, the newest in {self.path}. Save "
                "under a larger number, or into another directory."
            )
        self._check_room(contents.nbytes)
        self.needed = contents.nbytes
        sums = {name: Sum(a) for name, a in contents.arrays.items()}
        manifest = Manifest.of(contents, {name: str(total) for name, total in sums.items()})
        arrays = {name: _written(a) for name, a in contents.arrays.items() if a.size}
        with self._failing():
            self.manager.save(
                step,
                args=ocp.args.Composite(
                    **{
                        _ARRAYS: ocp.args.PyTreeSave(arrays),
                        _LIST: ocp.args.JsonSave(manifest.to_json()),
                    }
                ),
                force=True,
            )
        return Saving(self.path / str(step), step, contents.nbytes, self)

    def wait(self) -> None:
        if self.failed is not None:
            raise self.failed
        with self._failing():
            self.manager.wait_until_finished()

    def close(self) -> None:
        if self.manager is not None:
            self.manager.close()

    @contextlib.contextmanager
    def _failing(self) -> Any:
        """Says what failed; the next one to save here begins anew."""
        try:
            yield
        except Exception as error:
            _open.pop(self.path, None)
            with contextlib.suppress(Exception):  # It is the same error again.
                self.close()
            free = ""
            with contextlib.suppress(OSError):
                free = f"; {format_bytes(shutil.disk_usage(self.path).free)} are free there"
            left = "unknown"
            with contextlib.suppress(Exception):  # Not where Python is about to end.
                left = ", ".join(map(str, _steps(self.path))) or "none"
            self.failed = CheckpointError(
                f"a checkpoint in {self.path} could not be written: {error}\n  Its arrays take "
                f"{format_bytes(self.needed)}{free}. Complete checkpoints that are there: {left}."
            )
            raise self.failed from error

    def _check_room(self, nbytes: int) -> None:
        free = shutil.disk_usage(self.path).free
        if free < nbytes:
            raise CheckpointError(
                f"a checkpoint in {self.path} takes up to {format_bytes(nbytes)}, and "
                f"{format_bytes(free)} are free there. Make room, or save less often with keep=."
            )


def _directory(directory: str | Path, keep: int | None) -> _Directory:
    path = _resolved(directory)
    found = _open.get(path)
    if found is not None:
        found.wait()
        if found.keep == keep and path.is_dir():
            return found
        found.close()
    found = _open[path] = _Directory(path, keep)
    return found


def _resolved(directory: str | Path) -> Path:
    """One name for each directory, whatever links lead there."""
    if "://" in str(directory):
        raise CheckpointError(f"{directory} is a URL; checkpoints are in directories.")
    return Path(directory).expanduser().resolve()


@_compat.at_shutdown
def _finish() -> None:
    """Let what is being written end, and say what could not."""
    for found in list(_open.values()) if os.getpid() == _PROCESS else ():
        try:
            found.wait()
            found.close()
        except Exception as error:  # There is nobody left to raise it to.
            what = f"jaxmem: the last checkpoint in {found.path} is not complete"
            print(f"{what}; wait() for it before Python ends ({error})", file=sys.stderr)


def _steps(path: Path) -> list[int]:
    """The complete checkpoints of a directory, in order."""
    if not path.is_dir():
        return []
    return sorted(_orbax().utils.checkpoint_steps(path))


def _manifest(place: Path) -> Manifest:
    ocp = _orbax()
    try:
        written = ocp.JsonCheckpointHandler().restore(place / _LIST)
    except Exception as error:
        if (place / _LIST).is_dir():
            raise CheckpointError(
                f"{place} is damaged: the list of what it holds cannot be read ({error})."
            ) from error
        raise CheckpointError(
            f"{place} was not written by jaxmem.save: it has no list of checksums. Read it with "
            "Orbax."
        ) from error
    return Manifest.from_json(written, place)


def _arrays(place: Path, contents: Contents) -> dict[str, Any]:
    """All arrays of a checkpoint, where they belong."""
    wanted = {name: a for name, a in contents.arrays.items() if a.size}
    try:
        found = _read(place, wanted)
    except Exception as error:
        alone = [name for name, a in wanted.items() if not _is_readable(place, name, a)]
        if not alone:
            raise
        raise _damaged(place, alone, _steps(place.parent)) from error
    empty = {name: a for name, a in contents.arrays.items() if not a.size}
    found.update((name, np.zeros(a.shape, a.dtype)) for name, a in empty.items())
    return {name: _placed(found[name], a) for name, a in contents.arrays.items()}


def _is_readable(place: Path, name: str, like: Any) -> bool:
    try:
        _read(place, {name: like})
    except Exception:  # Whatever it was, it is said by who asked.
        return False
    return True


def _read(place: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    ocp = _orbax()
    largest = max(a.size * jnp.dtype(a.dtype).itemsize for a in wanted.values())
    most = math.ceil(max(_READ_BYTES, largest) / 10**9) + 1
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=most)
    return handler.restore(
        place / _ARRAYS,
        args=ocp.args.PyTreeRestore(
            item=dict.fromkeys(wanted, 0),
            restore_args={name: _restoring(a) for name, a in wanted.items()},
            partial_restore=True,
        ),
    )


def _restoring(like: Any) -> Any:
    ocp = _orbax()
    sharding = _sharding(like)
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=like.shape, dtype=like.dtype)


def _sharding(like: Any) -> Any:
    """Where a leaf must be; ``None`` for NumPy's, and for those that JAX may put anywhere."""
    committed = not isinstance(like, jax.Array) or like.committed
    return getattr(like, "sharding", None) if committed else None


def _placed(found: Any, like: Any) -> Any:
    """What was read as ``like`` is."""
    if isinstance(like, np.generic):
        return np.asarray(found).astype(like.dtype)[()]
    if isinstance(like, np.ndarray):
        return np.asarray(found)
    sharding = _sharding(like)
    if not isinstance(found, jax.Array):
        found = jnp.asarray(found) if sharding is None else jax.device_put(found, sharding)
    is_weak = getattr(like, "weak_type", False)
    return _compat.weakly_typed(found) if is_weak else found


def _written(array: Any) -> Any:
    return np.asarray(array) if isinstance(array, np.generic) else array


def _is_deleted(array: Any) -> bool:
    return isinstance(array, jax.Array) and array.is_deleted()


def _damaged(place: Path, names: list[str], steps: list[int]) -> CheckpointError:
    others = [str(step) for step in steps if str(step) != place.name]
    named = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    hint = f" Try step={others[-1]}." if others else ""
    return CheckpointError(f"{place} is damaged: what was read of {named} was not saved.{hint}")


def _check_processes(verb: str) -> None:
    if jax.process_count() > 1:
        raise CheckpointError(
            f"jaxmem.{verb} works in one process, and this is one of {jax.process_count()}. Use "
            "Orbax's CheckpointManager there."
        )


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise MissingExtraError(
            "checkpoints are written by Orbax, which is not installed: pip install 'jaxmem[flax]'"
        ) from error
    return orbax.checkpoint
