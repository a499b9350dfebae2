"""Write a page to a file, and say what to do where that fails."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from jaxmem.errors import ReportFileError
from jaxmem.files import replacing


def write_page(path: str | os.PathLike[str], text: str) -> Path:
    """Write a page to ``path``, as a whole or not at all, and return that.

    Raises:
        ReportFileError: it cannot be written there; the message says why and what to do.
    """
    file = Path(path)
    try:
        with replacing(file) as out:
            out.write(text)
    except OSError as error:
        raise ReportFileError(
            f"the report cannot be written to {file}: {_fix(file, error)}"
        ) from error
    return file


def _fix(file: Path, error: OSError) -> str:
    folder = file.parent
    if isinstance(error, IsADirectoryError):
        return f"it is a folder. Name a file in it: {file / 'report.html'}"
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return f"there is no folder {folder}. Make it first, or choose another path."
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return f"no permission ({error.strerror}). Choose a path in a folder you may write to."
    return f"{error.strerror or error}."
