"""An ONNX file as its constants and its nodes in order, checked; nothing is computed yet.

Runs in the process of `converter`, whose memory is limited.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from numpy.typing import NDArray

from fastlstm.errors import FormatError

_MAX_NODES = 20_000
_DOMAINS = ("", "ai.onnx")
INTEGERS, FLOATS = (2, 3, 4, 5, 6, 7, 12, 13), (1, 10, 11, 16)
"""Types of elements, as ONNX numbers them."""
OPSETS = range(7, 27)
"""Versions of the operators that are read."""


@dataclass(frozen=True)
class Operation:
    """One node.

    Attributes:
        kind: name of the operator, with its domain where that is not ONNX's.
        label: kind and name, for errors.
        name: of the node, or of its first output.
        inputs: names; "" is one that is left out.
        outputs: names.
        attributes: numbers, texts and lists; others are None.
        proto: the node itself.
    """

    kind: str
    label: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    proto: Any


@dataclass(frozen=True)
class OnnxInput:
    """An input of the graph; a size is None where callers choose it."""

    name: str
    is_integer: bool
    shape: tuple[int | None, ...] | None


@dataclass(frozen=True)
class OnnxFile:
    """Content of a file; `opset` is the version of its operators."""

    inputs: list[OnnxInput]
    outputs: list[str]
    constants: dict[str, NDArray[Any]]
    operations: list[Operation]
    opset: int
    made_by: str


def read_onnx_file(data: bytes, folder: Path, allow: Callable[[int], None]) -> OnnxFile:
    """Returns what a file holds.

    Args:
        data: the file.
        folder: where it is: arrays outside the file are read from here and from below only.
        allow: is told how many bytes these arrays have, before they are read.

    Raises:
        FormatError: damaged, or no model that is read.
    """
    import onnx

    try:
        model = onnx.load_model_from_string(data)
    except MemoryError:
        raise
    except Exception:  # protobuf's own DecodeError
        raise FormatError("it is damaged, or no ONNX file") from None
    if model.functions:
        from onnx import inliner

        model = inliner.inline_local_functions(model)
    versions = [item.version for item in model.opset_import if item.domain in _DOMAINS]
    if not model.HasField("graph") or len(versions) != 1 or versions[0] not in OPSETS:
        said = f"opset {versions[0]}" if len(versions) == 1 else "no opset"
        raise FormatError(
            f"it has {said}, expected a model of opset {OPSETS[0]} to {OPSETS[-1]}"
            if model.HasField("graph")
            else "it is damaged: it has no graph"
        )
    graph = model.graph
    if len(graph.node) > _MAX_NODES or graph.sparse_initializer:
        raise FormatError(
            f"it has {len(graph.node)} nodes, no more than {_MAX_NODES} are read; were its loops"
            " unrolled?"
            if len(graph.node) > _MAX_NODES
            else "it has sparse arrays, which are not read"
        )
    constants = _constants(onnx, graph, folder, allow)
    inputs = [_input(i) for i in graph.input if i.name not in constants]
    operations = [_operation(onnx, node, versions[0]) for node in graph.node]
    _check_order(inputs, constants, operations, [output.name for output in graph.output])
    maker = _printable(f"{model.producer_name} {model.producer_version}") or "ONNX"
    return OnnxFile(
        inputs, [output.name for output in graph.output], constants, operations, versions[0],
        f"{maker}, opset {versions[0]}",
    )  # fmt: skip


def _constants(
    onnx: Any, graph: Any, folder: Path, allow: Callable[[int], None]
) -> dict[str, NDArray[Any]]:
    external = onnx.TensorProto.EXTERNAL
    outside = [tensor for tensor in graph.initializer if tensor.data_location == external]
    places = [_place(tensor, folder) for tensor in outside]
    allow(sum(size for _, _, size in places))
    for tensor, (file, start, size) in zip(outside, places, strict=True):
        with file.open("rb") as stream:
            stream.seek(start)
            tensor.raw_data = stream.read(size)
        tensor.data_location = onnx.TensorProto.DEFAULT
    found: dict[str, NDArray[Any]] = {}
    for tensor in graph.initializer:
        name = _printable(tensor.name)
        if tensor.name in found:
            raise FormatError(f"it has two arrays '{name}'")
        if any(size < 0 for size in tensor.dims):
            raise FormatError(f"the array '{name}' has a negative size: {list(tensor.dims)}")
        try:
            found[tensor.name] = onnx.numpy_helper.to_array(tensor)
        except MemoryError:
            raise
        except Exception:  # sizes and bytes that do not fit, unknown types
            raise FormatError(
                f"the array '{name}' of the sizes {list(tensor.dims)[:8]} is damaged, or of a type"
                " that is not read"
            ) from None
    return found


def _place(tensor: Any, folder: Path) -> tuple[Path, int, int]:
    """Returns the file of an array that is stored outside, where it begins there, its bytes."""
    about = {item.key: item.value for item in tensor.external_data}
    location, name = about.get("location", ""), _printable(tensor.name)
    path = PurePosixPath(location.replace("\\", "/"))
    where = f"the array '{name}' is in the file {location!r:.80}"
    if not location or path.is_absolute() or ".." in path.parts or ":" in path.parts[0]:
        raise FormatError(f"{where}, outside of the model's directory, which is not read")
    file = folder / path
    if os.path.realpath(file) != os.path.join(os.path.realpath(folder), *path.parts):
        raise FormatError(f"{where}, a link, which is not followed")
    if not file.is_file():
        raise FormatError(f"{where}, which is not there; it belongs beside the model")
    held = file.stat().st_size
    try:
        start = int(about.get("offset", "0"))
        size = int(about.get("length", str(held - start)))
    except ValueError:
        raise FormatError(f"{where}, at no number") from None
    if start < 0 or size < 0 or start + size > held:
        raise FormatError(f"{where}, which ends before it")
    return file, start, size


def _input(value: Any) -> OnnxInput:
    tensor = value.type.tensor_type
    shape = None
    if tensor.HasField("shape"):
        shape = tuple(
            dim.dim_value if dim.HasField("dim_value") and dim.dim_value > 0 else None
            for dim in tensor.shape.dim
        )
    return OnnxInput(value.name, tensor.elem_type in INTEGERS, shape)


def _operation(onnx: Any, node: Any, opset: int) -> Operation:
    kind = _printable(node.op_type if node.domain in _DOMAINS else f"{node.domain}.{node.op_type}")
    name = _printable(node.name or next((out for out in node.output if out), ""))
    plain = onnx.AttributeProto
    for item in node.attribute:
        tensors = (item.t, *item.tensors)
        if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in tensors):
            raise FormatError(
                f"{kind} '{name}' has an array outside of the file, which is not read"
            )
    simple = (plain.FLOAT, plain.INT, plain.STRING, plain.FLOATS, plain.INTS, plain.STRINGS)
    attributes = {
        item.name: onnx.helper.get_attribute_value(item) if item.type in simple else None
        for item in node.attribute
    }
    if kind in ("Softmax", "LogSoftmax"):
        attributes.setdefault("axis", 1 if opset < 13 else -1)
    return Operation(
        kind, f"{kind} '{name}'", name, tuple(node.input), tuple(node.output), attributes, node
    )


def _check_order(
    inputs: list[OnnxInput], constants: dict[str, Any], operations: list[Operation], ends: list[str]
) -> None:
    """Raises FormatError where a value is read before it is made, or is made twice."""
    made = {*constants, *(item.name for item in inputs)}
    for operation in operations:
        for name in operation.inputs:
            if name and name not in made:
                raise FormatError(f"{operation.label} reads '{_printable(name)}' before it is made")
        for name in operation.outputs:
            if name and name in made:
                raise FormatError(f"{operation.label} makes '{_printable(name)}' a second time")
            made.add(name)
    if not ends or any(name not in made for name in ends):
        raise FormatError("it is damaged: it has no output that its nodes make")


def _printable(text: str | bytes) -> str:
    """Returns a name of the file for people: one line, not endless; bytes are no UTF-8."""
    text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    return "".join(c if c.isprintable() else " " for c in text).strip()[:80]
