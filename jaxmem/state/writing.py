"""Write checkpoints with Orbax's manager, one directory at a time, while training goes on."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from jaxmem import _compat
from jaxmem.errors import CheckpointError, JaxmemError
from jaxmem.state import ondisk, seal
from jaxmem.state.contents import Contents
from jaxmem.state.manifest import Manifest
from jaxmem.units import format_bytes

# Threads save one after the other: Orbax's manager of a directory is for one at a time.
lock = threading.RLock()
_open: dict[Path, Writer] = {}
# A fork of it has none of the threads that write.
_PROCESS = os.getpid()
# Old checkpoints are moved here and then deleted. That goes file by file, and what is left of one
# where the process is killed meanwhile would have a number, and be none.
_OLD = "old.orbax-checkpoint-tmp"


class Writer(Protocol):
    """What writes the checkpoints of a directory."""

    path: Path
    keep: int | None

    def settle(self) -> None:
        """Until the last one is complete; raises why it could not be written."""
        ...

    def wait(self) -> None:
        """The same, and until those that it pushes out are gone."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Others:
    """How process 0 writes together with others.

    Attributes:
        written: called when its own arrays are written; returns when all are, with the checksums
            of the files that others wrote.
        ended: returns when nobody else writes any more, whatever came of it.
    """

    written: Callable[[], Mapping[str, str]]
    ended: Callable[[], None]


def forget(writer: Writer) -> None:
    """Have the next one to save in its directory begin anew."""
    if _open.get(writer.path) is writer:
        del _open[writer.path]


def settle(path: Path) -> None:
    """Wait for what is being written in a directory.

    Raises:
        CheckpointError: it could not be written; it is said once.
    """
    found = _open.get(path)
    if found is not None:
        found.settle()


def ready(path: Path, keep: int | None, make: Callable[[], Writer]) -> Any:
    """What writes in a directory, waiting for the checkpoint before."""
    settle(path)
    found = _open.get(path)
    if found is not None:
        if found.keep == keep and path.is_dir():
            return found
        found.close()
    found = _open[path] = make()
    return found


class Directory:
    """The checkpoints of a run, while they are being written.

    Attributes:
        path: where they are.
        keep: how many are left.
        needed: bytes of the last one.
        failed: why it could not be written.
    """

    def __init__(self, path: Path, keep: int | None, others: Others | None = None):
        ocp = ondisk.orbax()
        self.path, self.keep, self.needed = path, keep, 0
        self._others = others
        self._step, self._sealed = -1, True
        self.manager: Any = None
        self._deleting: threading.Thread | None = None
        self.failed: JaxmemError | None = None
        if path.exists() and not path.is_dir():
            raise CheckpointError(
                f"{path} is a file, and cannot hold checkpoints: give a directory."
            )
        ondisk.check_writable(path)
        with self._failing():
            path.mkdir(parents=True, exist_ok=True)
            self._delete_old()
            self.manager = ocp.CheckpointManager(
                path,
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=keep,
                    cleanup_tmp_directories=True,
                    todelete_subdir=_OLD,
                    **_options(others, self._seal),
                ),
                item_handlers={
                    ondisk.ARRAYS: ocp.PyTreeCheckpointHandler(),
                    ondisk.LIST: ocp.JsonCheckpointHandler(),
                },
            )
        # It would tell jax.distributed of a step that may be long past, from another thread:
        # the step at which all processes are to stop is found from what each has told last.
        self.manager.reached_preemption = lambda step: False

    def save(self, contents: Contents, sums: Mapping[str, str], step: int) -> None:
        """Begin to write a checkpoint; when it returns the arrays may be changed.

        Raises:
            CheckpointError: the step does not come after those that are there, the disk has no
                room, or the checkpoint before could not be written.
        """
        ocp = ondisk.orbax()
        self.settle()
        self._deleting = threading.Thread(target=self._delete_old, name="jaxmem_delete")
        self._deleting.start()
        there = ondisk.steps(self.path)
        if there != sorted(self.manager.all_steps()):
            self.manager.reload()  # Somebody else wrote or deleted some.
        if there and step <= there[-1]:
            raise CheckpointError(
                f"step {step} does not come after {there[-1]}, the newest in {self.path}. Save "
                "under a larger number, or into another directory."
            )
        self._check_room(contents.nbytes)
        self.needed, self._step, self._sealed = contents.nbytes, step, False
        arrays = {name: written(a) for name, a in contents.arrays.items() if a.size}
        with self._failing():
            self.manager.save(
                step,
                args=ocp.args.Composite(
                    **{
                        ondisk.ARRAYS: ocp.args.PyTreeSave(arrays),
                        ondisk.LIST: ocp.args.JsonSave(Manifest.of(contents, sums).to_json()),
                    }
                ),
                force=True,
            )

    def wait(self) -> None:
        self.settle()
        if self._deleting is not None:
            self._deleting.join()
        self._delete_old()
        with contextlib.suppress(OSError):
            (self.path / _OLD).rmdir()

    def settle(self) -> None:
        if self.failed is not None:
            raise self.failed
        with self._failing():
            self.manager.wait_until_finished()
        if not self._sealed:
            self._sealed = True
            with contextlib.suppress(Exception):  # The checkpoint is complete without it.
                seal.write_around(self.path / str(self._step))

    def _seal(self, known: Mapping[str, str]) -> None:
        """Called when all of a checkpoint is written, before it is complete."""
        seal.write_items(ondisk.half_of(self.path, self._step), known)

    def _delete_old(self) -> None:
        """Delete what was moved away, by this process or by one before it."""
        for old in (self.path / _OLD).glob("*"):
            shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        if self.manager is not None:
            self.manager.close()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Says what failed; the next one to save here begins anew."""
        try:
            yield
        except Exception as error:  # Raised to whoever waits for this checkpoint.
            forget(self)
            with contextlib.suppress(Exception):  # It is the same error again.
                self.close()
            if self._others is not None:
                self._others.ended()  # TensorStore hangs where directories go from under it.
            ondisk.delete_half_written(self.path)
            told = isinstance(error, JaxmemError)
            self.failed = error if told else ondisk.unwritten(self.path, self.needed, error)
            raise self.failed from (None if told else error)

    def _check_room(self, nbytes: int) -> None:
        free = shutil.disk_usage(self.path).free
        if free < nbytes and self._deleting is not None:
            self._deleting.join()
            free = shutil.disk_usage(self.path).free
        if free < nbytes:
            raise CheckpointError(
                f"a checkpoint in {self.path} takes up to {format_bytes(nbytes)}, and "
                f"{format_bytes(free)} are free there. Make room, keep fewer with keep=, or give "
                "another directory. Those that are there stay until the new one is complete."
            )


def _options(
    others: Others | None, completing: Callable[[Mapping[str, str]], None]
) -> dict[str, Any]:
    """Orbax's; ``completing`` is called with the checksums that are known of files.

    Process 0 of several takes itself for the only one. Its own barriers are collectives of devices,
    or wait for five minutes. The two that are left are in the thread that commits, and are those of
    :class:`Others`.
    """
    ocp, known = ondisk.orbax(), dict[str, str]()

    def complete() -> None:
        completing(known)

    if others is None:
        return {"async_options": ocp.options.AsyncOptions(post_finalization_callback=complete)}

    def meet(*, key: str, timeout_ms: int) -> None:
        del timeout_ms
        if "async_write_complete" in key:
            known.clear()
            known.update(others.written())

    alone = ocp.options.MultiprocessingOptions(primary_host=0, active_processes={0})
    within = ocp.options.AsyncOptions(
        timeout_secs=10**9,
        barrier_sync_fn=meet,
        post_finalization_callback=complete,
        create_directories_asynchronously=False,
    )
    return {"create": False, "multiprocessing_options": alone, "async_options": within}


def written(array: Any) -> Any:
    """What Orbax is given of an array."""
    alone = isinstance(array, np.generic) or (
        jax.process_count() > 1 and isinstance(array, jax.Array) and array.is_fully_addressable
    )
    return np.array(array) if alone else array


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
