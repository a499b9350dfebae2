"""The buffer assignment of a compiled JAX function, as bytes of XLA's BufferAssignmentProto.

XLA:CPU tells it in the memory statistics. XLA:GPU tells it only in the serialized executable: a
message that XLA splits into records (``split_proto``), in a Riegeli file, compressed with Snappy;
where the executable is wrapped with its options (jaxlib 0.12) such a file is inside of another one.
Nothing of that is a promise of XLA's, so what does not read as expected raises, and says where.

Formats: https://github.com/google/riegeli/blob/master/doc/riegeli_records_file_format.md,
https://github.com/google/snappy/blob/main/format_description.txt
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from typing import Any

import jax

from jaxmem.errors import ReportError
from jaxmem.hlo.wire import WireError, bytes_of, fields, text, varint

_SIGNATURE = bytes.fromhex("83af70d10d884a3f")  # the hash of the first header: always the same
_BLOCK_BYTES, _BLOCK_HEADER_BYTES, _CHUNK_HEADER_BYTES = 1 << 16, 24, 40
_SIMPLE_CHUNK, _SNAPPY, _PLAIN = ord("r"), ord("s"), 0
_GPU_EXECUTABLE = "xla.gpu.GpuExecutableProto"


def buffer_assignment(executable: jax.stages.Compiled) -> bytes:
    """The compiler's buffer assignment of a compiled function.

    Cost:
        A copy of the executable, for a GPU: about 20 ms for each MB of its program.

    Raises:
        ReportError: this jaxlib does not tell it, or not in a form that is known.
    """
    stats: Any = executable.memory_analysis()
    told = getattr(stats, "serialized_buffer_assignment_proto", b"")
    if told:
        return told
    loaded: Any = executable.runtime_executable()
    try:
        found = _in_message(loaded.serialize())
    except (jax.errors.JaxRuntimeError, NotImplementedError, WireError, IndexError) as error:
        raise ReportError(f"{unreadable()}: {error}") from error
    if found is None:
        raise ReportError(f"{unreadable()}: it has none")
    return found


def unreadable() -> str:
    """What errors say of a jaxlib that does not tell the buffers, or in another form."""
    return (
        f"jaxlib {metadata.version('jaxlib')} does not tell the compiler's buffers in a form that "
        "jaxmem reads (those of 0.10.2 to 0.12 do)"
    )


def _in_message(data: bytes) -> bytes | None:
    """The buffer assignment in a serialized executable, however it is wrapped."""
    at = data.find(_SIGNATURE)
    if at < 0:
        return None
    records = _records(data[at:])
    manifest = list(fields(next(records)))
    parts = [bytes_of(value) for number, value in manifest if number == 2]
    name = next((text(value) for number, value in manifest if number == 1), "")
    # A part with a field 2 is a piece of the message itself, one with a field 3 is one large field.
    body = []
    for part, record in zip(parts, records, strict=False):
        if name != _GPU_EXECUTABLE and record.startswith(_SIGNATURE):
            return _in_message(record)
        if any(number == 2 for number, _ in fields(part)):
            body.append(record)
    if name != _GPU_EXECUTABLE:
        return None
    return next((bytes_of(v) for number, v in fields(b"".join(body)) if number == 2), None)


def _records(data: bytes) -> Iterator[bytes]:
    """The records of a Riegeli file that starts here, until what follows is none of it."""
    # Each block of the file starts with a header, wherever that falls in a chunk.
    blocks = range(0, len(data), _BLOCK_BYTES)
    stream = b"".join(data[b + _BLOCK_HEADER_BYTES : b + _BLOCK_BYTES] for b in blocks)
    at = 0
    while at + _CHUNK_HEADER_BYTES <= len(stream):
        size = int.from_bytes(stream[at + 8 : at + 16], "little")
        kind = stream[at + 24]
        count = int.from_bytes(stream[at + 25 : at + 32], "little")
        at += _CHUNK_HEADER_BYTES
        if count:
            if kind != _SIMPLE_CHUNK or at + size > len(stream):
                raise WireError(f"a chunk of kind {kind:#x} with {size} bytes at {at}")
            yield from _of_chunk(stream[at : at + size])
        at += size


def _of_chunk(data: bytes) -> Iterator[bytes]:
    taken, at = varint(data, 1)
    sizes = _decompressed(data[0], data[at : at + taken])
    values = _decompressed(data[0], data[at + taken :])
    at = start = 0
    while at < len(sizes):
        size, at = varint(sizes, at)
        yield values[start : start + size]
        start += size


def _decompressed(compression: int, data: bytes) -> bytes:
    if compression == _PLAIN:
        return data
    if compression != _SNAPPY:
        raise WireError(f"records are compressed in the unknown way {compression:#x}")
    return unsnapped(data[varint(data, 0)[1] :])


def unsnapped(data: bytes) -> bytes:
    """What Snappy compressed.

    Raises:
        WireError: it is not Snappy's.

    >>> unsnapped(bytes([7, 0b1000]) + b"abc" + bytes([0b1, 3]))
    b'abcabca'
    """
    size, at = varint(data, 0)
    out, end = bytearray(), len(data)
    while at < end:
        tag = data[at]
        at += 1
        kind, length = tag & 3, (tag >> 2) + 1
        if kind == 0:
            if length > 60:
                wide = length - 60
                length = int.from_bytes(data[at : at + wide], "little") + 1
                at += wide
            out += data[at : at + length]
            at += length
            continue
        if kind == 1:
            length = ((tag >> 2) & 7) + 4
            back = (tag >> 5) << 8 | data[at]
            at += 1
        else:
            wide = 2 * kind - 2 if kind == 2 else 4
            back = int.from_bytes(data[at : at + wide], "little")
            at += wide
        start = len(out) - back
        if start < 0 or not back:
            raise WireError(f"a copy of Snappy reaches back {back} bytes of {len(out)}")
        piece = out[start : start + length]
        if back < length:
            piece = (piece * (length // back + 1))[:length]
        out += piece
    if len(out) != size:
        raise WireError(f"Snappy gave {len(out)} bytes in place of {size}")
    return bytes(out)
