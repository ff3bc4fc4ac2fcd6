"""`TensorBundle`: the variables of a SavedModel, or of a checkpoint of TensorFlow 2.

Two kinds of files: `variables.index` is a table in LevelDB's format from names to what each entry
is and where, `variables.data-0000N-of-0000M` hold the bytes. Checksums are checked. The objects
that own the variables are a message in one of the entries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import CorruptFileError, FormatError, StorageError
from fastlstm.exchange.checksum import crc32c, masked
from fastlstm.exchange.protobuf import DamagedMessage, message, messages, number, text, varint
from fastlstm.system.storage import read_bytes

INDEX, OBJECT_GRAPH = "variables.index", "_CHECKPOINTABLE_OBJECT_GRAPH"
_MAGIC = 0xDB4775248B80FB57
_FOOTER_BYTES, _TRAILER_BYTES = 48, 5
_MAX_INDEX_BYTES, _MAX_ENTRIES, _MAX_RANK = 64 << 20, 100_000, 8
_STRING = 7
_DTYPES = {1: "<f4", 2: "<f8", 19: "<f2"}


class DamagedBundle(DamagedMessage):
    """Files that are no bundle, or that claim what they do not hold."""


@dataclass
class SavedObject:
    """An object of the program that saved the variables.

    Attributes:
        children: numbers of other objects by the names of the attributes that held them.
        key: entry of its value, if it is a variable, else "".
        full_name: of the variable.
    """

    children: dict[str, int] = field(default_factory=dict)
    key: str = ""
    full_name: str = ""


class TensorBundle:
    """Reads a bundle.

    Args:
        folder: the directory `variables` of a SavedModel.

    Raises:
        DamagedBundle: an index that is none.
        FormatError: a file is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shards: dict[int, memoryview] = {}
        self._entries = dict(_table(memoryview(_read(folder / INDEX, _MAX_INDEX_BYTES))))
        header = self._entries.pop("", None)
        if header is None:
            raise DamagedBundle("the index has no header")
        self._num_shards = number(header, 1)
        if not 0 < self._num_shards <= 1000 or number(header, 2):
            raise DamagedBundle(
                f"it has {self._num_shards} parts, or numbers in another byte order"
            )
        self._taken = 0

    def objects(self) -> list[SavedObject]:
        """Returns the objects; the first is the model itself."""
        if OBJECT_GRAPH not in self._entries:
            raise DamagedBundle(f"the index lacks {OBJECT_GRAPH}")
        found = []
        for node in messages(self._string(OBJECT_GRAPH), 1):
            known = SavedObject()
            for child in messages(node, 1):
                known.children[text(child, 2)] = number(child, 1)
            for value in messages(node, 2):
                known.key, known.full_name = text(value, 3), text(value, 2)
            found.append(known)
            if len(found) > _MAX_ENTRIES:
                raise DamagedBundle("it has too many objects")
        if not found:
            raise DamagedBundle("it has no objects")
        return found

    def array(self, key: str) -> NDArray[np.float32]:
        """Returns a variable in float32.

        Raises:
            DamagedBundle: there is none, its checksum is wrong, or it claims more than there is.
        """
        entry = self._entries.get(key)
        if entry is None:
            raise DamagedBundle(f"the index lacks '{key:.120}'")
        dtype = _DTYPES.get(number(entry, 1))
        shape = [number(dim, 1) for dim in messages(message(entry, 2), 2)]
        if dtype is None or len(shape) > _MAX_RANK or any(True for _ in messages(entry, 7)):
            raise DamagedBundle(f"'{key:.120}' is no array of floats in one piece")
        data = self._bytes(entry, key)
        if math.prod(shape) * np.dtype(dtype).itemsize != len(data):
            raise DamagedBundle(f"'{key:.120}' has {len(data)} bytes for the shape {shape}")
        if masked(crc32c(data)) != number(entry, 6):
            raise DamagedBundle(f"'{key:.120}' has another checksum than the index says")
        return np.frombuffer(data, dtype).astype(np.float32).reshape(shape)

    def _string(self, key: str) -> memoryview:
        """Returns the one text of an entry: its length, a checksum of that, and its bytes."""
        entry = self._entries[key]
        data = self._bytes(entry, key)
        size, at = varint(data, 0)
        length = size.to_bytes(4 if size < 1 << 32 else 8, "little")
        content = data[at + 4 :]
        if number(entry, 1) != _STRING or size != len(content):
            raise DamagedBundle(f"'{key:.120}' is not one text")
        stored = bytes(data[at : at + 4])
        whole = crc32c(content, crc32c(stored, crc32c(length)))
        if masked(crc32c(length)) != int.from_bytes(stored, "little") or (
            masked(whole) != number(entry, 6)
        ):
            raise DamagedBundle(f"'{key:.120}' has another checksum than the index says")
        return content

    def _bytes(self, entry: memoryview, key: str) -> memoryview:
        shard, offset, size = (number(entry, field) for field in (3, 4, 5))
        if shard >= self._num_shards:
            raise DamagedBundle(f"'{key:.120}' is in part {shard} of {self._num_shards}")
        if shard not in self._shards:
            name = f"variables.data-{shard:05d}-of-{self._num_shards:05d}"
            self._shards[shard] = memoryview(_read(self._folder / name))
        data = self._shards[shard]
        self._taken += size
        if offset + size > len(data) or self._taken > 4 * sum(map(len, self._shards.values())):
            raise DamagedBundle(f"'{key:.120}' claims more than its file holds")
        return data[offset : offset + size]


def _read(path: Path, limit: int | None = None) -> bytes:
    try:
        return read_bytes(path, limit)
    except (OSError, StorageError, CorruptFileError) as error:
        reason = str(error).splitlines()[0][:200]
        raise FormatError(f"{path} cannot be read ({reason})") from None


# the table ----------------------------------------------------------------------------------------


def _table(data: memoryview) -> Iterator[tuple[str, memoryview]]:
    """Yields the entries of a table in LevelDB's format."""
    footer = data[-_FOOTER_BYTES:]
    if len(footer) < _FOOTER_BYTES or int.from_bytes(footer[40:], "little") != _MAGIC:
        raise DamagedBundle("the index is no table of TensorFlow")
    _, at = varint(footer, 0)  # of filters: none are read
    _, at = varint(footer, at)
    count = claimed = 0
    for _, handle in _block(data, footer[at:]):
        claimed += varint(handle, varint(handle, 0)[1])[0]
        if claimed > len(data):
            raise DamagedBundle("the blocks of the index overlap")
        for name, value in _block(data, handle):
            count += 1
            if count > _MAX_ENTRIES:
                raise DamagedBundle("the index has too many entries")
            yield name, value


def _block(data: memoryview, handle: memoryview) -> Iterator[tuple[str, memoryview]]:
    """Yields the entries of a block; a name shares its first bytes with the one before it."""
    start, at = varint(handle, 0)
    size, _ = varint(handle, at)
    if start + size + _TRAILER_BYTES > len(data):
        raise DamagedBundle("a block of the index leads out of it")
    kind, checksum = data[start + size], data[start + size + 1 : start + size + _TRAILER_BYTES]
    if kind:
        raise DamagedBundle("the index is compressed with Snappy, which is not read")
    if masked(crc32c(data[start : start + size + 1])) != int.from_bytes(checksum, "little"):
        raise DamagedBundle("a block of the index has another checksum than it says")
    block = data[start : start + size]
    restarts = int.from_bytes(block[-4:], "little")
    end = size - 4 - 4 * restarts
    name, at = b"", 0
    while at < end:
        shared, at = varint(block, at)
        own, at = varint(block, at)
        length, at = varint(block, at)
        if shared > len(name) or at + own + length > end or shared + own > 10_000:
            raise DamagedBundle("an entry of the index leads out of its block")
        name = name[:shared] + bytes(block[at : at + own])
        yield name.decode("utf-8", "replace"), block[at + own : at + own + length]
        at += own + length


def child(objects: list[SavedObject], at: int, name: str) -> int:
    """Returns the number of the object that another holds under a name, -1 where there is none."""
    found = objects[at].children.get(name, -1)
    return found if found < len(objects) else -1
