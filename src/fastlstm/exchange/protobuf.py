"""Protocol buffers without a schema: fields of a message by their numbers, read when asked for."""

from __future__ import annotations

from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class DamagedMessage(ValueError):
    """Bytes that are no protocol buffer."""


def varint(data: memoryview, at: int) -> tuple[int, int]:
    """Returns the number that starts at a place, and the place behind it."""
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
    raise DamagedMessage("a number has no end")


def fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yields the fields of a message: its number and a whole number or bytes.

    Raises:
        DamagedMessage: the bytes are no message.
    """
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = varint(data, at)
            yield key >> 3, value
            continue
        size = {_FIXED64: 8, _FIXED32: 4}.get(kind)
        if kind == _BYTES:
            size, at = varint(data, at)
        if size is None or size > len(data) - at:
            raise DamagedMessage("a field leads out of its message")
        part = data[at : at + size]
        yield key >> 3, part if kind == _BYTES else int.from_bytes(part, "little")
        at += size


def messages(data: memoryview, number: int) -> Iterator[memoryview]:
    """Yields the values of a field that are bytes: texts and messages."""
    for found, value in fields(data):
        if found == number:
            if isinstance(value, int):
                raise DamagedMessage(f"field {number} is a number, expected bytes")
            yield value


def message(data: memoryview, *path: int) -> memoryview:
    """Returns the last value of a field, or of one within it, and so on; empty where none is."""
    for number in path:
        last = memoryview(b"")
        for value in messages(data, number):
            last = value
        data = last
    return data


def text(data: memoryview, number: int) -> str:
    """Returns a field that is a text."""
    return str(message(data, number), "utf-8", "replace")


def number(data: memoryview, field: int) -> int:
    """Returns a field that is a whole number from 0 on, 0 where it is missing."""
    value: int | memoryview = 0
    for found, given in fields(data):
        value = given if found == field else value
    if not isinstance(value, int):
        raise DamagedMessage(f"field {field} holds bytes, expected a number")
    return value
