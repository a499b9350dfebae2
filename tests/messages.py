"""Messages in the wire format of protocol buffers, written down."""

from __future__ import annotations


def written(value: int) -> bytes:
    """A number as the wire format has it."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field_bytes(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return written(number << 3) + written(value)
    return written(number << 3 | 2) + written(len(value)) + value
