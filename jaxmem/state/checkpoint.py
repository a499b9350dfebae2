"""Save a state with Orbax, and restore it anywhere: another mesh, other memory, checked."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxmem import processes
from jaxmem.errors import CheckpointError
from jaxmem.program import leaves
from jaxmem.state import ondisk, reading, seal, together, writing
from jaxmem.state.contents import Contents, contents_of
from jaxmem.state.sums import Sum


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
    _writer: writing.Writer

    def wait(self) -> None:
        """Until the checkpoint is complete, and those that it pushes out are gone.

        Raises:
            CheckpointError: it could not be written; those before it are still there.
            ProcessError: of several processes some did not write their part.
        """
        with writing.lock:
            self._writer.wait()


def save(
    directory: str | Path,
    state: Any,
    *,
    step: int,
    keep: int | None = None,
    wait: bool = False,
    timeout: float = processes.TIMEOUT_SECONDS,
) -> Saving:
    """A checkpoint on its way to ``directory/step``, written by Orbax while training goes on.

    When this returns, the arrays may be donated, deleted or changed in place. A checkpoint is there
    as a whole or not at all. It has checksums of all arrays and of all files, which
    :func:`restore` verifies.

    Wait for the last one: from Python 3.12 on, Orbax cannot complete it once Python has begun to
    end, and then a line on stderr says that it is not there.

    Under ``jax.distributed`` all processes call this with the same step, for a directory that all
    of them see. Each writes its parts of the arrays that are over several processes. Everything
    else (numbers, texts, NumPy arrays, arrays that a process has alone) must be equal on all.

    Args:
        directory: where all checkpoints of a run are; it is made.
        state: a pytree of arrays, numbers and texts, NNX objects, or all of them. Arrays may be
            split over a mesh and live in host memory, as a plan wants them.
        step: the number of the checkpoint; larger than those that are there.
        keep: so many checkpoints are left, the newest; all for ``None``. An older one goes when
            the new one is complete.
        wait: return when it is complete.
        timeout: of several processes, seconds that they wait for those that do not come here, or
            have not written their part when others have.

    Raises:
        CheckpointError: a leaf cannot be saved; the step is there already or a later one is; the
            disk has less room than the arrays take; the checkpoint before could not be written.
        ProcessError: some processes are missing, do something else, or have other values.
        MissingExtraError: Orbax is not installed.
        ArgumentError: ``timeout`` is no positive number.

    Cost:
        Host memory for a copy of what is on devices, and for that of pinned host memory, until
        the checkpoint is written; one pass over all arrays for their checksums, and one over all
        files, before the checkpoint is complete, for those of files.

    >>> import tempfile
    >>> import jaxmem
    >>> import jax.numpy as jnp
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     jaxmem.save(directory, {"w": jnp.arange(3.0), "epoch": 2}, step=7).wait()
    ...     jaxmem.restore(directory, {"w": jnp.zeros(3), "epoch": 0})
    {'epoch': 2, 'w': Array([0., 1., 2.], dtype=float32)}
    """
    processes.check_timeout(timeout)
    path = ondisk.resolved(directory)
    step, keep = ondisk.number_of(step), ondisk.number_of(keep)
    take = functools.partial(_contents, state, step, keep)
    with writing.lock:
        if processes.several():
            contents, writer = together.save(path, take, step, keep, timeout)
        else:
            contents = take()
            writer = writing.ready(path, keep, lambda: writing.Directory(path, keep))
            sums = {name: Sum(a) for name, a in contents.arrays.items()}
            writer.save(contents, {name: str(total) for name, total in sums.items()}, step)
    saving = Saving(path / str(step), step, contents.nbytes, writer)
    if wait:
        saving.wait()
    return saving


def restore(
    directory: str | Path,
    like: Any,
    *,
    step: int | None = None,
    timeout: float = processes.TIMEOUT_SECONDS,
) -> Any:
    """The state of a checkpoint, in the form, the places and the memory of ``like``.

    Each leaf is read once, to where it belongs: the mesh, the memory kind, the number of processes
    and the plan may be others than those it was saved from. Nothing of ``like`` is changed before
    all is verified, on all processes.

    Args:
        directory: that of :func:`save`.
        like: a tree of the same leaves, by name, shape and dtype: arrays, which say where theirs
            go, or ``jax.ShapeDtypeStruct`` with or without a sharding, which need no memory. NNX
            objects in it are given the arrays in place.
        step: the checkpoint; the newest by default.
        timeout: of several processes, seconds that they wait for those that do not come here, or
            have not read their part when others have.

    Raises:
        CheckpointError: there is none; it is damaged, by leaf and by file, also where no array
            needs that file; it was written by another version;
            leaves are missing, of another shape or dtype, or cannot be put where they are to go.
        ProcessError: some processes are missing, or do something else.
        MissingExtraError: Orbax is not installed.
        ArgumentError: ``timeout`` is no positive number.

    Cost:
        About 1 GiB of host memory beside the state, 2 if it is NumPy's, or the largest leaf if
        that is more. Files are read twice at the same time, by Orbax and for their checksums.
    """
    processes.check_timeout(timeout)
    path, step = ondisk.resolved(directory), ondisk.number_of(step)
    if processes.several():
        with writing.lock:
            return together.restore(path, like, step, timeout)
    with writing.lock:
        writing.settle(path)
    place = ondisk.place_of(path, step)
    contents = contents_of(like)
    manifest = ondisk.manifest_of(place)
    manifest.check(contents, place)
    with seal.changing(place) as changed:
        arrays = reading.arrays_of(place, contents, changed)
        sums = {name: Sum(a) for name, a in arrays.items()}
        wrong = [name for name, total in sums.items() if str(total) != manifest.arrays[name]]
    if wrong or changed():
        raise ondisk.damaged(place, wrong, changed())
    return contents.rebuilt({**arrays, **manifest.values})


def _contents(state: Any, step: Any, keep: Any) -> Contents:
    """What is to be saved, checked."""
    ondisk.check_number(step)
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise CheckpointError(f"keep={keep!r}: give how many checkpoints are left, 1 or more.")
    contents = contents_of(state)
    if traced := [n for n, a in contents.arrays.items() if _is_traced(a)]:
        raise CheckpointError(
            f"{traced[0]} is being traced and holds no data. Save outside of jax.jit and fit, what "
            "the step returned."
        )
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
    return contents


def _is_traced(array: Any) -> bool:
    return isinstance(array, jax.core.Tracer)  # pyright: ignore[reportAttributeAccessIssue]


def _is_deleted(array: Any) -> bool:
    return isinstance(array, jax.Array) and array.is_deleted()
