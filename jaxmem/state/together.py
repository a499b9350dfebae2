"""Checkpoints of several processes: each writes its parts, and all raise the same errors.

Process 0 has Orbax's manager, as one process alone would; the others write their arrays' parts into
the directory that it is filling. It completes a checkpoint when all have written.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxmem import processes
from jaxmem.errors import CheckpointError, JaxmemError, ProcessError
from jaxmem.processes import Meeting
from jaxmem.state import ondisk, reading, seal, writing
from jaxmem.state.contents import Contents, contents_of
from jaxmem.state.manifest import Manifest
from jaxmem.state.sums import Sum, added, kind_of

_HINT = (
    "What each process has for itself must be equal on all; make one array over all processes of "
    "what differs."
)

# The round in which each process says that it writes no more.
_WRITTEN = "written"


def save(
    path: Path, take: Callable[[], Contents], step: int, keep: int | None, timeout: float
) -> tuple[Contents, writing.Writer]:
    """Begin to save on all processes what ``take`` returns on each."""
    meeting = processes.meet(f"save checkpoint {step} in {path}", timeout)
    # That the one before failed may be known here and not there: all say so, or none.
    writers: list[Shared] = []

    def before() -> None:
        writers.append(writing.ready(path, keep, lambda: Shared(path, keep)))

    meeting.together("before", before)
    writer, taken = writers[0], list[Contents]()

    def check() -> dict[str, str]:
        taken.append(take())
        return _sums(taken[0].arrays)

    said = meeting.together("check", check)
    contents, mine = taken[0], said[processes.number()]
    meeting.check_same("leaves", _lines(contents, mine), "the state", _HINT)
    writer.save(contents, _added(contents, said), step, meeting)
    return contents, writer


def restore(path: Path, like: Any, step: int | None, timeout: float) -> Any:
    """The state of a checkpoint on all processes, or the same error on all of them."""
    which = "the newest checkpoint" if step is None else f"checkpoint {step}"
    meeting = processes.meet(f"restore {which} of {path}", timeout)
    meeting.together("before", lambda: writing.settle(path))
    number = meeting.by_first("which", lambda: int(ondisk.place_of(path, step).name))
    taken: list[tuple[Path, Contents, Manifest]] = []

    def check() -> None:
        place = ondisk.place_of(path, number)
        contents, manifest = contents_of(like), ondisk.manifest_of(place)
        manifest.check(contents, place)
        taken.append((place, contents, manifest))

    meeting.together("check", check)
    place, contents, manifest = taken[0]
    meeting.check_same("leaves", _lines(contents, None), "the state that is asked for", _HINT)
    arrays: dict[str, Any] = {}

    def read() -> tuple[dict[str, str], list[str]]:
        with seal.changing(place, processes.number(), jax.process_count()) as changed:
            # Where they cannot be read, all say the same: of all files, not of a share.
            arrays.update(reading.arrays_of(place, contents, lambda: seal.changed(place)))
            sums = _sums(arrays)
        return sums, changed()

    said, parts = zip(*meeting.together("read", read), strict=True)
    changed = sorted({name for part in parts for name in part})
    whole = _added(contents, said)
    wrong = [
        name
        for name, total in whole.items()
        if total != manifest.arrays[name]
        or not (_is_split(contents.arrays[name]) or all(its[name] == total for its in said))
    ]
    meeting.left()
    if wrong or changed:
        raise ondisk.damaged(place, wrong, changed)
    return contents.rebuilt({**arrays, **manifest.values})


def _is_split(array: Any) -> bool:
    """Whether it is one array over several processes."""
    sharding = getattr(array, "sharding", None)
    return sharding is not None and not sharding.is_fully_addressable


def _sums(arrays: Mapping[str, Any]) -> dict[str, str]:
    sums = {name: Sum(a) for name, a in arrays.items()}
    return {name: str(total) for name, total in sums.items()}


def _added(contents: Contents, said: Sequence[dict[str, str]]) -> dict[str, str]:
    """The checksums of whole arrays."""
    return {
        name: added([its[name] for its in said]) if _is_split(a) else said[0][name]
        for name, a in contents.arrays.items()
    }


def _lines(contents: Contents, sums: Mapping[str, str] | None) -> list[str]:
    """What must be the same on all processes, a line for each leaf; without values if no sums."""
    lines = []
    for name, array in contents.arrays.items():
        split = _is_split(array)
        what = kind_of(array) if split or sums is None else f"checksum {sums[name]}"
        where = "over several processes" if split else "of each process alone"
        lines.append(f"{name or 'the state'} {where}, {what} {contents.keys.get(name, '')}".strip())
    if sums is not None:
        lines.extend(f"{name} = {value!r}" for name, value in contents.values.items())
    return lines


class Shared:
    """The checkpoints of a run, while several processes write them.

    Attributes:
        path: where they are.
        keep: how many are left.
        failed: why the last one could not be written.
    """

    def __init__(self, path: Path, keep: int | None):
        self.path, self.keep = path, keep
        self.failed: JaxmemError | None = None
        self._meeting: Meeting | None = None
        self._manager: writing.Directory | None = None
        self._thread: threading.Thread | None = None
        self._others_write = False

    def save(
        self, contents: Contents, sums: Mapping[str, str], step: int, meeting: Meeting
    ) -> None:
        """Begin to write a checkpoint; when it returns the arrays may be changed."""
        if self._meeting is not None:
            self._meeting.left()  # All have come here, so all have waited for it.
        self._meeting, self._others_write = meeting, False

        def begin() -> str:
            if self._manager is None:
                others = writing.Others(self._written, self._ended)
                self._manager = writing.Directory(self.path, self.keep, others)
            self._manager.save(contents, sums, step)
            return (
                next(self.path.glob(f"{step}.*/{ondisk.ARRAYS}*")).relative_to(self.path).as_posix()
            )

        place = self.path / meeting.by_first("begin", begin, patient=True)
        self._others_write = True
        copied = threading.Event()
        if self._manager is not None:
            copied.set()
            work = functools.partial(self._complete, self._manager, meeting)
        else:
            split = {n: a for n, a in contents.arrays.items() if a.size and _is_split(a)}
            nbytes = contents.nbytes
            work = functools.partial(_write, split, nbytes, place, meeting, copied)
        self._thread = threading.Thread(target=self._failing, args=(work,), name="jaxmem_save")
        self._thread.start()
        copied.wait()

    def settle(self) -> None:
        self.wait()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
        if self.failed is not None:
            writing.forget(self)  # Only now: it must have been said once.
            raise self.failed

    def close(self) -> None:
        if self._manager is not None:
            self._manager.close()

    def _written(self) -> dict[str, str]:
        """Called by Orbax on process 0 when its own arrays are written."""
        assert self._meeting is not None
        try:
            said = self._meeting.together(_WRITTEN, dict)
            return {name: total for sums in said for name, total in sums.items()}
        finally:
            self._others_write = False  # All have said so, or were waited for.

    def _ended(self) -> None:
        """On process 0, before it deletes what could not be completed."""
        if self._meeting is not None and self._others_write:
            # Who says nothing for so long is dead or stopped, and is named where it is waited for.
            with contextlib.suppress(ProcessError):
                self._meeting.hear(_WRITTEN, range(1, jax.process_count()))

    def _complete(self, manager: writing.Directory, meeting: Meeting) -> None:
        """On process 0: until the checkpoint is complete, and have the others know."""

        def finish() -> None:
            try:
                manager.wait()
            except Exception:
                meeting.tell(_WRITTEN, [None, None])  # They need not wait for it.
                raise

        meeting.by_first("complete", finish)

    def _failing(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            told = isinstance(error, JaxmemError)
            self.failed = error if told else CheckpointError(f"{self.path}: {error}")


def _write(
    split: Mapping[str, Any], nbytes: int, place: Path, meeting: Meeting, copied: threading.Event
) -> None:
    """On the other processes: write parts of arrays into the directory of process 0."""
    sums, error = {}, None
    try:
        futures = _begin(split, place)
        copied.set()
        for future in futures:
            future.result()
        sums = _files(place) if split else {}
    except Exception as found:
        told, path = isinstance(found, JaxmemError), place.parent.parent
        error = found if told else ondisk.unwritten(path, nbytes, found)
        copied.set()
    meeting.exchange(_WRITTEN, meeting.report(sums, error))
    # It says what went wrong on any of them, when it has merged, renamed and deleted.
    meeting.by_first("complete", lambda: None, patient=True)


def _files(place: Path) -> dict[str, str]:
    """The checksums of the files that this process alone has written into ``place``."""
    mine = place / f"ocdbt.process_{processes.number()}"
    return {f"{ondisk.ARRAYS}/{mine.name}/{name}": s for name, s in seal.sums_of(mine).items()}


def _begin(split: Mapping[str, Any], place: Path) -> list[Any]:
    """When it returns, arrays are copied; what it returns are being written."""
    if not place.is_dir():
        raise CheckpointError(
            f"process {processes.number()} does not see {place.parent}, where process 0 writes. "
            "Give a directory that all processes see."
        )
    if not split:
        return []
    from etils import epath

    ocp = ondisk.orbax()
    arguments = ocp.args.PyTreeSave(dict(split))
    writing_arrays = ocp.PyTreeCheckpointHandler().async_save(epath.Path(place), args=arguments)
    return asyncio.run(writing_arrays) or []
