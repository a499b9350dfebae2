"""Files that are replaced as a whole: nobody ever reads half of one."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], errors: str = "strict") -> Iterator[TextIO]:
    r"""A text file that takes the place of ``path`` at the end: UTF-8, with lines as written.

    Until then, and for ever where the block raises or the disk is full, what was at ``path`` stays.
    A link is followed, a file that was there keeps its mode, and what is no file (a pipe, a
    terminal) is written to as it is.

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
    part = file.with_name(f".jaxmem-{secrets.token_hex(8)}.part")
    try:
        with part.open("x", encoding="utf-8", errors=errors, newline="") as out:
            yield out
        if is_old:
            part.chmod(file.stat().st_mode & 0o7777)
        part.replace(file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


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
