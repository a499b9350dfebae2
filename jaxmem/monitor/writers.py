"""Where samples go: lines of JSON, TensorBoard."""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path
from typing import Any, Protocol

from jaxmem.errors import ArgumentError, MissingExtraError, TrackError
from jaxmem.monitor.figures import Figure
from jaxmem.monitor.samples import Sample

_FLUSH_SECONDS = 10.0
_FIGURES = ("in_use", "peak", "reserved", "largest_free")


class Writer(Protocol):
    """Keeps samples."""

    def write(self, sample: Sample) -> None:
        """Keep one."""
        ...

    def close(self) -> None:
        """There are no more."""
        ...


class Lines:
    """A file with one sample a line; what was in it stays.

    Raises:
        TrackError: it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]):
        try:
            self.path = Path(path)
        except TypeError as error:
            raise ArgumentError(
                f"track(..., jsonl={path!r}): it takes the name of a file."
            ) from error
        try:
            with self.path.open("a"):
                pass
        except OSError as error:
            raise TrackError(
                f"track(..., jsonl={str(path)!r}): the file cannot be written ({error.strerror}). "
                "Name one in a folder that exists and is yours."
            ) from error

    def write(self, sample: Sample) -> None:
        # Opened anew, for 30 us a few times a second: nobody has to remember to close it.
        with self.path.open("a", encoding="utf-8") as file:
            file.write(sample.to_json() + "\n")

    def close(self) -> None:
        """Nothing is open."""


class Scalars:
    """A writer of TensorBoard: anything with ``add_scalar(tag, value, step)``."""

    def __init__(self, to: Any):
        self._own = not hasattr(to, "add_scalar")
        self._writer = _summary_writer(to) if self._own else to
        self._count, self._flushed = 0, time.monotonic()

    def write(self, sample: Sample) -> None:
        self._count += 1
        for device in sample.devices:
            for name in _FIGURES:
                figure: Figure | None = getattr(device, name)
                if figure is not None:
                    self._add(f"{sample.name}/{device.device}/{name}", figure)
        if sample.host.rss is not None:
            self._add(f"{sample.name}/host/rss", sample.host.rss)
        self._add(f"{sample.name}/host/pinned", sample.host.pinned)
        if self._own and time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._writer.flush()
            self._flushed = time.monotonic()

    def _add(self, tag: str, figure: Figure) -> None:
        kind = figure.how.replace(" ", "_")
        self._writer.add_scalar(f"{tag}_bytes_{kind}", figure.nbytes, self._count)

    def close(self) -> None:
        if self._own:
            self._writer.close()
        elif hasattr(self._writer, "flush"):
            self._writer.flush()


def _summary_writer(folder: Any) -> Any:
    """A writer into a folder.

    Raises:
        ArgumentError: this is no folder's name.
        MissingExtraError: no library is installed that writes for TensorBoard.
    """
    if not isinstance(folder, str | os.PathLike):
        raise ArgumentError(
            f"track(..., tensorboard={type(folder).__name__}): it takes a folder, or a writer with "
            "add_scalar(tag, value, step), such as a SummaryWriter."
        )
    try:
        library = importlib.import_module("tensorboardX")
    except ImportError as error:
        raise MissingExtraError(
            'track(..., tensorboard="folder") needs tensorboardX, which is not installed: '
            'pip install "jaxmem[tracking]". Or pass a writer that you have, with add_scalar.'
        ) from error
    return library.SummaryWriter(os.fspath(folder))
