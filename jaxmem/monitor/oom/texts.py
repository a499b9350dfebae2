"""Read what XLA, its allocators and NumPy say when memory runs out.

The class of the exception says nothing: it is ValueError, RuntimeError or JaxRuntimeError, by the
place where it happens. So the text decides, in the forms that jaxlib 0.4 to 0.12 have for GPUs,
CPUs and TPUs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from jaxmem.errors import JaxmemError
from jaxmem.units import parse_bytes

Where = Literal["device", "compile", "pinned host", "host"]

# Exhausted, and no memory of the device or host: a kernel's scratch space, a message.
_OTHER = re.compile(
    r"shared memory|memory space (?!hbm)\w+|message larger than|registers|too many", re.IGNORECASE
)
_OUT = re.compile(
    r"RESOURCE_EXHAUSTED|Resource exhausted|CUDA_ERROR_OUT_OF_MEMORY|[Oo]ut of memory|"
    r"[Rr]an out of memory|Unable to allocate|Failed to allocate"
)
_PINNED = re.compile(
    r"pinned|host memory|gpu_host_bfc|host_bfc|HOST_MEMORY_LIMIT|host offloading", re.IGNORECASE
)
_COMPILING = re.compile(r"compil|autotun|memory space hbm", re.IGNORECASE)
_AMOUNT = r"([\d.]+\s?(?:bytes|[KMGT]i?B|[KMGT]|B)?)"
# The exact number of bytes first, where both are there.
_REQUESTED = tuple(
    re.compile(pattern)
    for pattern in (
        r"\((\d+)B\) on device ordinal",
        r"rounded to (\d+)\)",
        r"(?:allocating|allocate an?|allocate|alloc|allocation of) (\d+)[- ]bytes?",
        rf"(?:trying to allocate|Failed to allocate request for|Unable to allocate) {_AMOUNT}",
        rf"Attempting to (?:allocate|reserve) {_AMOUNT}",
        rf"Exceeded hbm capacity by {_AMOUNT}",
    )
)
_FREE = re.compile(rf"There (?:are|is) {_AMOUNT} free")
_USED_OF = re.compile(rf"Used {_AMOUNT} of {_AMOUNT} hbm")
_ALLOCATOR = re.compile(r"Allocator \(([\w ]+)\)")
_STAT = re.compile(rf"^\s*([a-z_]+(?: temp)?) allocation:\s+{_AMOUNT}", re.MULTILINE)
_BUFFER = re.compile(r"^\s*(?:Buffer \d+:|\d+\. Size:)", re.MULTILINE)
_SIZE = re.compile(rf"Size: {_AMOUNT}")
_OPERATOR = re.compile(r'op_name="([^"]*)"')
_SOURCE = re.compile(r'source_file="([^"]*)"(?: source_line=(\d+))?')
_SHAPE = re.compile(r"(?:Shape|Subshape): (\w+\[[\d,]*\])")
_LABEL = re.compile(r"XLA [Ll]abel: (.+)")


@dataclass(frozen=True)
class ReportedBuffer:
    """A buffer of a compiled program, as an allocation report of XLA lists it.

    Attributes:
        nbytes: its size.
        operation: name stack of the operation that makes it, ``""`` for a parameter.
        source: ``file.py:line`` of the user's line, ``""`` if unknown.
        shape: such as ``"f32[4096,128]"``.
        label: XLA's own name for it.
    """

    nbytes: int
    operation: str
    source: str
    shape: str
    label: str


@dataclass(frozen=True)
class Told:
    """What the text of an exception says.

    Attributes:
        where: which memory ran out; ``"compile"`` is the device's, while a program was compiled.
        requested_bytes: what was asked for when it did; ``None`` where the text does not say.
        free_bytes: what was free then; ``None`` likewise.
        limit_bytes: what there is; ``None`` likewise.
        program_bytes: what the program needs that did not compile; ``None`` likewise.
        allocator: name of the allocator, or ``""``.
        stats: bytes of parameters, constants, results and temporaries of the program, by name.
        buffers: its largest buffers, where XLA lists them.
        message: the first line.
    """

    where: Where
    requested_bytes: int | None
    free_bytes: int | None
    limit_bytes: int | None
    program_bytes: int | None
    allocator: str
    stats: dict[str, int]
    buffers: tuple[ReportedBuffer, ...]
    message: str


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory of a device or of the host ran out.

    >>> is_out_of_memory(RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes."))
    True
    >>> is_out_of_memory(RuntimeError("RESOURCE_EXHAUSTED: Shared memory size limit exceeded"))
    False
    """
    if isinstance(error, JaxmemError) or not isinstance(error, Exception):
        return False
    if isinstance(error, MemoryError):
        return True
    text = str(error)
    return bool(_OUT.search(text)) and not _OTHER.search(text.split("\n", 1)[0])


def read(error: BaseException) -> Told:
    """What the text of an out-of-memory exception says.

    >>> text = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 16.00GiB."
    >>> told = read(RuntimeError(text))
    >>> told.where, told.requested_bytes == 16 * 2**30
    ('device', True)
    """
    text = str(error)
    used, free = _USED_OF.search(text), _FREE.search(text)
    allocator = _ALLOCATOR.search(text)
    requested = (_first(pattern, text) for pattern in _REQUESTED)
    return Told(
        where=_where(error, text),
        requested_bytes=next((amount for amount in requested if amount is not None), None),
        free_bytes=_bytes(free[1]) if free else None,
        limit_bytes=_bytes(used[2]) if used else None,
        program_bytes=_bytes(used[1]) if used else None,
        allocator=allocator[1] if allocator else "",
        stats={name.strip(): _bytes(size) or 0 for name, size in _STAT.findall(text)},
        buffers=tuple(_buffers(text)),
        message=(text.strip().splitlines() or [type(error).__name__])[0][:300],
    )


def _where(error: BaseException, text: str) -> Where:
    if isinstance(error, MemoryError) or text.lstrip().startswith("Unable to allocate"):
        return "host"
    if _PINNED.search(text):
        return "pinned host"
    return "compile" if _COMPILING.search(text) else "device"


def _first(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    return _bytes(match[1]) if match else None


def _bytes(amount: str) -> int | None:
    """A size as XLA writes it: TPUs say ``1.5G`` for GiB, GPUs say ``1.50GiB`` or bytes."""
    number = amount.rstrip(".").strip().removesuffix("bytes").strip()
    if number and number[-1] in "KMGT":
        number += "iB"
    try:
        value = float(number.rstrip("BKMGTi"))
    except ValueError:
        return None
    return parse_bytes(number) if value >= 1e-9 else 0


def _buffers(text: str) -> Iterator[ReportedBuffer]:
    """Of the reports "Peak buffers" (GPUs) and "Largest program allocations" (TPUs)."""
    starts = [match.start() for match in _BUFFER.finditer(text)]
    for start, end in pairwise([*starts, len(text)]):
        part = text[start:end]
        size, operator, source = _SIZE.search(part), _OPERATOR.search(part), _SOURCE.search(part)
        shape, label = _SHAPE.search(part), _LABEL.search(part)
        nbytes = _bytes(size[1]) if size else None
        if nbytes is None:
            continue
        line = ""
        if source:
            line = source[1].rsplit("/", 1)[-1] + (f":{source[2]}" if source[2] else "")
        yield ReportedBuffer(
            nbytes,
            operator[1] if operator else "",
            line,
            shape[1] if shape else "",
            label[1].strip()[:80] if label else "",
        )
