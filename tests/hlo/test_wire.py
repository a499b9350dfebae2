"""Messages are read as they were written, and what is none is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem.hlo.serialized import unsnapped
from jaxmem.hlo.wire import WireError, bytes_of, fields, number, numbers, varint
from tests.messages import field_bytes, written

Field = st.tuples(st.integers(1, 2**20), st.one_of(st.integers(0, 2**64 - 1), st.binary()))


@given(st.lists(Field))
def test_a_message_is_read_as_written(message: list[tuple[int, int | bytes]]):
    assert list(fields(b"".join(field_bytes(*field) for field in message))) == message


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_packed_numbers(values: list[int]):
    assert numbers(b"".join(map(written, values))) == values


@given(st.lists(Field, min_size=1), st.data())
def test_a_message_that_is_cut_short_is_no_longer_message(message, data):
    whole = b"".join(field_bytes(*field) for field in message)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    try:
        assert list(fields(cut)) == message[: len(list(fields(cut)))]
    except WireError:
        pass


def test_what_is_no_message_is_refused():
    for data in (b"\x0b", b"\x80", b"\x12\x05ab", b"\x09abc"):
        with pytest.raises(WireError):
            list(fields(data))
    with pytest.raises(WireError, match="where a number"):
        number(b"x")
    with pytest.raises(WireError, match="where bytes"):
        bytes_of(1)


@st.composite
def snapped(draw) -> tuple[bytes, bytes]:
    """Bytes, and one of the ways in which Snappy may have written them."""
    plain, out = bytearray(), bytearray()
    for _ in range(draw(st.integers(0, 12))):
        if plain and draw(st.booleans()):
            back = draw(st.integers(1, min(len(plain), 2047)))
            length = draw(st.integers(4, 11))
            out += bytes([1 | (length - 4) << 2 | back >> 8 << 5, back & 0xFF])
            start = len(plain) - back
            for n in range(length):
                plain.append(plain[start + n])
        else:
            piece = draw(st.binary(min_size=1, max_size=90))
            long = len(piece) > 60
            out += bytes([60 << 2, len(piece) - 1] if long else [(len(piece) - 1) << 2]) + piece
            plain += piece
    return bytes(plain), written(len(plain)) + bytes(out)


@given(snapped())
def test_snappy_is_undone(both: tuple[bytes, bytes]):
    plain, data = both
    assert unsnapped(data) == plain
    assert varint(data, 0)[0] == len(plain)


def test_broken_snappy_is_refused():
    for data in (b"\x05\x00a", b"\x04\x01\x03", b"\x08\x04ab\x01\x05"):
        with pytest.raises(WireError, match="Snappy"):
            unsnapped(data)
