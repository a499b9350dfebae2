"""Files that are replaced as a whole: nobody ever reads half of one."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

try:
    import fcntl
except ImportError:  # Windows: there nothing tells a part that is written from one that is left.
    fcntl = None

_YOUNG_SECONDS = 60.0


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], errors: str = "strict") -> Iterator[TextIO]:
    r"""A text file that takes the place of ``path`` at the end: UTF-8, with lines as written.

    Until then, and for ever where the block raises or the disk is full, what was at ``path`` stays.
    A link is followed, a file that was there keeps its mode, and what is no file (a pipe, a
    terminal) is written to as it is. A process that is killed meanwhile leaves its part behind,
    a hidden file beside ``path``; the next one that writes there, a minute later, removes it.

    Raises:
        OSError: there is no such folder, nothing can be made in it, or ``path`` is a folder or not
            to be written.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "a.csv"
    >>> with replacing(file) as out:
    ...     _ = out.write("a,b\r\n")
    >>> file.read_bytes()
    b'a,b\r\n'
    """
    file = Path(os.path.realpath(path))
    if file.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    is_old = file.is_file()
    if file.exists() and not is_old:
        with file.open("w", encoding="utf-8", errors=errors, newline="") as out:
            yield out
        return
    if is_old and not os.access(file, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    # The name may be too long, or no text, to be a part of another one.
    stem = f".jaxmem-{zlib.crc32(os.fsencode(file.name)):08x}"
    _remove_left(file.parent, f"{stem}-*.part")
    part = file.with_name(f"{stem}-{secrets.token_hex(8)}.part")
    try:
        with part.open("x", encoding="utf-8", errors=errors, newline="") as out:
            _hold(out)
            yield out
        if is_old:
            part.chmod(file.stat().st_mode & 0o7777)
        part.replace(file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _hold(file: TextIO) -> bool:
    """Lock a file for as long as it is open; whether that could be done."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # Another process writes it, or the file system has no locks.
        return False
    return True


def _remove_left(folder: Path, parts: str) -> None:
    """Remove the parts that nobody writes any more."""
    for part in folder.glob(parts):
        with contextlib.suppress(OSError), part.open("r+", encoding="utf-8") as file:
            # One that was made just now may not be locked yet.
            if time.time() - part.stat().st_mtime > _YOUNG_SECONDS and _hold(file):
                part.unlink(missing_ok=True)


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """See that :func:`replacing` could begin; nothing is left behind.

    Raises:
        OSError: as that.
    """
    file = Path(path)
    if file.exists() and not file.is_file() and not file.is_dir():
        return  # Opening a pipe would wait for its reader.
    with contextlib.suppress(_Seen), replacing(path):
        raise _Seen


class _Seen(Exception):
    """All is known: the file is not to be replaced."""
