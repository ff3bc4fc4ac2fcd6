"""A writer of SavedModels as Keras 2 makes them, without TensorFlow: for the tests of import."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastlstm.exchange.checksum import crc32c, masked

OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
Tree = dict[str, Any]
"""Objects by the names of the attributes that hold them; arrays are variables."""


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def field(number: int, value: int | bytes | str) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def fixed32(number: int, value: int) -> bytes:
    return varint(number << 3 | 5) + value.to_bytes(4, "little")


def entry(data: bytes, shape: Sequence[int], dtype: int, offset: int, crc: int) -> bytes:
    """Returns a BundleEntryProto."""
    sizes = b"".join(field(2, field(1, size)) for size in shape)
    place = field(4, offset) + field(5, len(data))
    return field(1, dtype) + field(2, sizes) + place + fixed32(6, masked(crc))


def block(pairs: Mapping[str, bytes], kind: int = 0) -> bytes:
    """Returns a block of a table, with what follows it."""
    content = b"".join(
        varint(0) + varint(len(name)) + varint(len(value)) + name.encode() + value
        for name, value in sorted(pairs.items())
    )
    content += (0).to_bytes(4, "little") + (1).to_bytes(4, "little") + bytes([kind])
    return content + masked(crc32c(content)).to_bytes(4, "little")


def index(entries: Mapping[str, bytes], kind: int = 0, num_shards: int = 1) -> bytes:
    """Returns the content of variables.index."""
    data = block({"": field(1, num_shards), **entries}, kind)
    handles = block({"~": varint(0) + varint(len(data) - 5)})
    end = varint(0) + varint(0) + varint(len(data)) + varint(len(handles) - 5)
    return data + handles + end.ljust(40, b"\0") + 0xDB4775248B80FB57.to_bytes(8, "little")


def bundle(tree: Tree) -> tuple[dict[str, bytes], bytes]:
    """Returns the entries of an index and the bytes that they describe."""
    nodes: list[bytes] = []
    entries: dict[str, bytes] = {}
    data = b""

    def add(item: Any, path: str) -> int:
        nonlocal data
        number = len(nodes)
        nodes.append(b"")
        if isinstance(item, np.ndarray):
            key = f"{path}/.ATTRIBUTES/VARIABLE_VALUE"
            stored = item.tobytes()
            dtype = {"float32": 1, "float16": 19}[item.dtype.name]
            entries[key] = entry(stored, item.shape, dtype, len(data), crc32c(stored))
            data += stored
            nodes[number] = field(2, field(1, "VARIABLE_VALUE") + field(2, path) + field(3, key))
        else:
            children = {name: add(inner, f"{path}/{name}") for name, inner in item.items()}
            nodes[number] = b"".join(
                field(1, field(1, child) + field(2, name)) for name, child in children.items()
            )
        return number

    add(tree, "model")
    graph = b"".join(field(1, node) for node in nodes)
    size = len(graph).to_bytes(4, "little")
    checksum = masked(crc32c(size)).to_bytes(4, "little")
    stored = varint(len(graph)) + checksum + graph
    crc = crc32c(graph, crc32c(checksum, crc32c(size)))
    entries[OBJECT_GRAPH] = entry(stored, (), 7, len(data), crc)
    return entries, data + stored


def write_saved_model(folder: Path, tree: Tree, config: Mapping[str, Any], layers: Any) -> Path:
    """Writes a SavedModel of Keras 2.

    Args:
        folder: to be made.
        tree: the objects of the model.
        config: description of the model.
        layers: names of layers by their paths from "root".
    """
    entries, data = bundle(tree)
    (folder / "variables").mkdir(parents=True)
    (folder / "variables/variables.index").write_bytes(index(entries))
    (folder / "variables/variables.data-00000-of-00001").write_bytes(data)
    (folder / "saved_model.pb").write_bytes(field(1, 1))
    described = {"root": config, **{path: {"name": name} for path, name in layers.items()}}
    nodes = (field(3, path) + field(5, json.dumps(about)) for path, about in described.items())
    (folder / "keras_metadata.pb").write_bytes(b"".join(field(1, node) for node in nodes))
    return folder
