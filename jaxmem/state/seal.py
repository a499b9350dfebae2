"""Checksums of a checkpoint's files: damage where no array is is noticed, and named by file.

One list is of what is in the items. It is written before a checkpoint is complete, so that it is
there whenever that is. Another is of the two files that Orbax writes when it completes one. It is
written when that is next waited for; until then those two are not verified, and nothing is read
from them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxmem import files

# Beside the items of a checkpoint.
ITEMS, AROUND = "jaxmem_files.txt", "jaxmem_committed.txt"
# What Orbax writes there last.
_LAST = ("_CHECKPOINT_METADATA", "commit_success.txt")
# A file's checksum is that of the checksums of its pieces, which are read beside each other. Lists
# that were written depend on it.
_PIECE_BYTES = 2**23
_READ_BYTES = 2**20
_AT_A_TIME = min(8, os.cpu_count() or 1)
# Fewer pieces are read by the thread that asks: when Python ends there are no others.
_FEW = 8


def sums_of(folder: Path, names: Iterable[str] | None = None) -> dict[str, str]:
    """The checksum and the size of files in a folder, by their name in it; of all by default.

    Raises:
        OSError: one cannot be read.
    """
    wanted = list(_all_in(folder) if names is None else names)
    return _sums(folder, {name: (folder / name).stat().st_size for name in wanted}, _piece)


def write_items(place: Path, known: Mapping[str, str]) -> None:
    """Write the list of what is in the items; of ``known`` files the checksums are taken as said.

    Raises:
        OSError: one cannot be read, or the list not be written.
    """
    others = [name for name in _all_in(place) if "/" in name and name not in known]
    _write(place / ITEMS, {**known, **sums_of(place, others)})


def write_around(place: Path) -> None:
    """Write the list of the files beside the items, of a complete checkpoint.

    Raises:
        OSError: one cannot be read, or the list not be written.
    """
    names = [name for name in (ITEMS, *_LAST) if (place / name).is_file()]
    _write(place / AROUND, sums_of(place, names))


def changed(
    place: Path, part: int = 0, parts: int = 1, stop: threading.Event | None = None
) -> list[str]:
    """The files of a checkpoint that are not as they were written, cannot be read, or are gone.

    Args:
        place: the checkpoint.
        part: which of ``parts`` shares of the files is looked at.
        parts: how many look at one each.
        stop: once it is set, nobody wants to know any more.
    """
    wrong, said = set[str](), dict[str, str]()
    for name in (ITEMS, AROUND):
        try:
            said.update(_read(place / name))
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            wrong.add(name)

    def look(path: Path, start: int) -> int:
        try:
            return 0 if stop is not None and stop.is_set() else _piece(path, start)
        except OSError:
            wrong.add(path.relative_to(place).as_posix())
            return 0

    sizes: dict[str, int] = {}
    for name in sorted(said)[part::parts]:
        try:
            sizes[name] = (place / name).stat().st_size
        except OSError:
            wrong.add(name)
    found = _sums(place, sizes, look)
    return sorted(wrong.union(name for name in found if found[name] != said[name]))


@contextlib.contextmanager
def changing(place: Path, part: int = 0, parts: int = 1) -> Iterator[Callable[[], list[str]]]:
    """:func:`changed`, while the block runs: what it is given waits for that, and returns it."""
    stop = threading.Event()
    with ThreadPoolExecutor(1, "jaxmem_changed") as pool:
        looking = pool.submit(changed, place, part, parts, stop)
        try:
            yield looking.result
            looking.result()
        finally:
            stop.set()


def _sums(
    folder: Path, sizes: Mapping[str, int], sum_of: Callable[[Path, int], int]
) -> dict[str, str]:
    pieces = [(n, start) for n, size in sizes.items() for start in range(0, size, _PIECE_BYTES)]
    arguments = [folder / name for name, _ in pieces], [start for _, start in pieces]
    if len(pieces) <= _FEW:
        sums = list(map(sum_of, *arguments))
    else:
        with ThreadPoolExecutor(_AT_A_TIME, "jaxmem_files") as pool:
            sums = list(pool.map(sum_of, *arguments))
    found = dict.fromkeys(sizes, 0)
    for (name, _), total in zip(pieces, sums, strict=True):
        found[name] = zlib.crc32(total.to_bytes(4, "big"), found[name])
    return {name: f"{found[name]:08x} {size}" for name, size in sizes.items()}


def _all_in(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def _piece(path: Path, start: int) -> int:
    """The checksum of a piece of a file."""
    total, left = 0, _PIECE_BYTES
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (read := file.read(min(left, _READ_BYTES))):
            total, left = zlib.crc32(read, total), left - len(read)
    return total


def _write(path: Path, sums: Mapping[str, str]) -> None:
    text = "".join(f"{total} {name}\n" for name, total in sorted(sums.items()))
    with files.replacing(path) as out:
        out.write(f"{_digest(text)}\n{text}")


def _read(path: Path) -> dict[str, str]:
    """A list.

    Raises:
        OSError: it cannot be read, or there is none.
        ValueError: it is not as it was written.
    """
    digest, _, text = path.read_bytes().decode().partition("\n")
    if digest != _digest(text):
        raise ValueError(f"{path} was changed")
    lines = [line.split(" ", 2) for line in text.split("\n")[:-1]]
    return {name: f"{total} {size}" for total, size, name in lines}


def _digest(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
