"""Protocol buffers' wire format, as far as reading takes it.

XLA gives its programs as such messages. A reader of them without their definitions is a page; the
definitions would be a dependency that has to match the jaxlib that is there.
https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class WireError(ValueError):
    """Bytes that are no message."""


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that starts at a place, and the place behind it.

    >>> varint(bytes([0x96, 0x01, 0xFF]), 0)
    (150, 2)
    """
    value = shift = 0
    try:
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
            shift += 7
    except IndexError:
        raise WireError(f"a number runs past the end of {len(data)} bytes") from None


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and content of each field of a message, in order.

    What has a length (text, messages, packed numbers) and numbers of fixed size are bytes.

    Raises:
        WireError: these bytes are no message.

    >>> list(fields(bytes([0x08, 0x96, 0x01, 0x12, 0x02]) + b"hi"))
    [(1, 150), (2, b'hi')]
    """
    at, end = 0, len(data)
    while at < end:
        key = data[at]
        at += 1
        if key >= 0x80:
            key, at = varint(data, at - 1)
        kind = key & 7
        if kind == _BYTES:
            size, at = varint(data, at)
            value: int | bytes = data[at : at + size]
            at += size
        elif kind == _VARINT:
            value, at = varint(data, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
            value = data[at : at + size]
            at += size
        else:
            raise WireError(f"no field starts at byte {at - 1}: {key:#x}")
        if at > end:
            raise WireError(f"a field runs past the end of {end} bytes")
        yield key >> 3, value


def numbers(packed: int | bytes) -> list[int]:
    """Numbers of a repeated field; one that is not packed comes one at a time.

    >>> numbers(bytes([0x01, 0x96, 0x01])), numbers(7)
    ([1, 150], [7])
    """
    if isinstance(packed, int):
        return [packed]
    found, at = [], 0
    while at < len(packed):
        value, at = varint(packed, at)
        found.append(value)
    return found


def text(value: int | bytes) -> str:
    """A text field; what is not UTF-8 in it becomes a replacement character."""
    return bytes_of(value).decode("utf-8", "replace")


def number(value: int | bytes) -> int:
    """A field that is one number.

    Raises:
        WireError: it is something else.
    """
    if isinstance(value, int):
        return value
    raise WireError(f"{len(value)} bytes where a number was expected")


def bytes_of(value: int | bytes) -> bytes:
    """A field that has a length.

    Raises:
        WireError: it is a number.
    """
    if isinstance(value, int):
        raise WireError(f"the number {value} where bytes were expected")
    return value
