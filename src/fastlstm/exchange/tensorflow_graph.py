"""The graph of a SavedModel: the function of its signature, cut into the scopes of layers."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fastlstm.errors import FormatError
from fastlstm.exchange.protobuf import (
    DamagedMessage,
    fields,
    message,
    messages,
    number,
    text,
    varint,
)
from fastlstm.exchange.tensor_bundle import SavedObject

ADVICE = "save the model itself: model.save('model.keras')"
_SIGNATURE = "serving_default"
_CALLS = ("StatefulPartitionedCall", "PartitionedCall")
_MAX_NODES, _MAX_CALLS = 200_000, 8
PASSED = {"Const", "NoOp", "Identity", "IdentityN", "Cast", "StopGradient"}
"""Operations that leave values as they are."""
SHAPING = PASSED - {"Cast"} | {
    *("ReadVariableOp", "Shape", "StridedSlice", "Pack", "Fill", "Transpose", "Reshape", "Range"),
    *("Rank", "Max", "Prod", "GatherV2", "Greater", "SelectV2", "PlaceholderWithDefault"),
    *("TensorListReserve", "TensorListFromTensor", "TensorListStack", "While"),
}
"""Operations of layers with variables that move values, or compute shapes."""


_SIZES = {"Shape", "Rank", "Size"}
"""Operations whose result depends on the shape of what they read, not on its values."""


@dataclass(frozen=True)
class Node:
    """An operation: `inputs` are names of others; `function` is what it calls or repeats."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    function: str = ""
    value: float | int | None = None


@dataclass(frozen=True)
class Function:
    """A part of the graph: names of its arguments, operations in order, what it returns."""

    arguments: tuple[str, ...]
    nodes: tuple[Node, ...]
    returned: tuple[str, ...]


@dataclass
class Scope:
    """The operations of one layer, and the variables that they read."""

    name: str
    nodes: list[Node] = field(default_factory=list)
    variables: list[SavedObject] = field(default_factory=list)
    reads: set[str] = field(default_factory=set)

    def counted(self, *without: str) -> Counter[str]:
        """Returns how many operations there are by kind, those of shapes and of scopes left out."""
        names = [node for node in self.nodes if not any(part in node.name for part in without)]
        return Counter(node.kind for node in names if node.kind not in SHAPING)

    def moves(self) -> Counter[str]:
        """Returns how many operations move what the scope reads, by kind, not what shapes it has:
        two layers may have the same arithmetic and differ in these."""
        values, found = set(self.reads), Counter[str]()
        for node in self.nodes:
            if node.kind not in _SIZES and values.intersection(map(node_of, node.inputs)):
                values.add(node.name)
                found[node.kind] += node.kind in SHAPING - PASSED - {"While"}
        return +found

    def floats(self) -> set[float]:
        return {node.value for node in self.nodes if isinstance(node.value, float)}


def _nodes(data: memoryview, number_of_nodes: int) -> Iterator[Node]:
    for node in messages(data, number_of_nodes):
        function, value = "", None
        for attribute in messages(node, 5):
            name, content = text(attribute, 1), message(attribute, 2)
            if name in ("f", "body"):
                function = text(message(content, 10), 1)
            elif name == "value":
                value = _scalar(message(content, 8))
        inputs = tuple(str(part, "utf-8", "replace") for part in messages(node, 3))
        yield Node(text(node, 1), text(node, 2), inputs, function, value)


def _scalar(tensor: memoryview) -> float | int | None:
    """Returns a constant of one float or of one int32, or None."""
    packed = message(tensor, 5)
    if number(tensor, 1) == 1 and len(packed) == 4:
        return float(struct.unpack("<f", packed)[0])
    whole = _packed(message(tensor, 7)) if number(tensor, 1) == 3 else []
    return (whole[0] + (1 << 31)) % (1 << 32) - (1 << 31) if len(whole) == 1 else None


def read_library(data: memoryview) -> dict[str, Function]:
    """Returns the functions of a graph by their names."""
    found, count = {}, 0
    for function in messages(data, 1):
        signature = message(function, 1)
        nodes = tuple(_nodes(function, 3))
        count += len(nodes)
        if count > _MAX_NODES:
            raise DamagedMessage("its graph has too many operations")
        arguments = tuple(text(argument, 1) for argument in messages(signature, 2))
        returned = tuple(text(pair, 2) for pair in messages(function, 4))
        found[text(signature, 1)] = Function(arguments, nodes, returned)
    return found


def main_function(
    graph: memoryview, library: Mapping[str, Function], objects: list[SavedObject], path: Path
) -> tuple[Function, dict[str, SavedObject]]:
    """Returns the function of the signature, and the variables by the names of its arguments."""
    outputs = list(messages(_signature(graph), 2))
    if len(outputs) != 1:
        raise FormatError(
            f"{path} has {len(outputs)} outputs in its signature {_SIGNATURE}, expected one;"
            f" {ADVICE}"
        )
    end = node_of(text(message(outputs[0], 2), 1))
    call = next((node for node in _nodes(message(graph, 2), 1) if node.name == end), None)
    given: dict[str, SavedObject] = {}
    for depth in range(_MAX_CALLS):
        if call is None or call.kind not in _CALLS or call.function not in library:
            break
        main = library[call.function]
        if depth == 0:
            bound = _bound(message(graph, 7), call.function, objects)
            start = max(len(main.arguments) - len(bound), 0)
            pairs = zip(main.arguments[start:], bound, strict=False)
            given = {name: variable for name, variable in pairs if variable.key}
        else:
            passed = zip(main.arguments, map(node_of, call.inputs), strict=False)
            given = {name: given[source] for name, source in passed if source in given}
        calls = [node for node in main.nodes if node.kind not in PASSED]
        if len(calls) != 1 or calls[0].kind not in _CALLS:
            return main, given
        call = calls[0]
    raise FormatError(f"{path}: its signature {_SIGNATURE} calls no function; {ADVICE}")


def _signature(graph: memoryview) -> memoryview:
    for entry in messages(graph, 5):
        if text(entry, 1) == _SIGNATURE:
            return message(entry, 2)
    return memoryview(b"")


def window(graph: memoryview) -> int | None:
    """Returns the steps that the input is said to have."""
    sizes = [number(size, 1) for size in messages(message(_signature(graph), 1, 2, 3), 2)]
    return sizes[1] if len(sizes) > 1 and 0 < sizes[1] < 1 << 31 else None


def _bound(graph: memoryview, function: str, objects: list[SavedObject]) -> list[SavedObject]:
    """Returns the variables that a function is called with behind its inputs."""
    numbers: list[int] = []
    for entry in messages(graph, 2):
        if text(entry, 1) == function:
            for field_number, value in fields(message(entry, 2)):
                if field_number == 2:
                    numbers += _packed(value)
    # The variables' file and the graph list the same objects; else the numbers mean nothing.
    for k, node in enumerate(messages(graph, 1)):
        if k == len(objects):
            break  # constants follow
        children = {text(child, 2): number(child, 1) for child in messages(node, 1)}
        if children != objects[k].children:
            raise DamagedMessage("its variables are those of another graph")
    return [objects[at] if at < len(objects) else SavedObject() for at in numbers]


def _packed(value: int | memoryview) -> list[int]:
    if isinstance(value, int):
        return [value]
    numbers, at = [], 0
    while at < len(value):
        one, at = varint(value, at)
        numbers.append(one)
    return numbers


def node_of(name: str) -> str:
    """Returns the operation of `name:output:0`."""
    return name.partition(":")[0]


def scopes_of(
    main: Function, variables: Mapping[str, SavedObject], path: Path
) -> tuple[list[Scope], set[str]]:
    """Returns the scopes in order, each reading one value of the one before it, and the operation
    whose value is returned.

    Raises:
        FormatError: layers that read others too.
    """
    found: dict[str, Scope] = {}
    scope_of: dict[str, str] = {}
    ends = []
    for node in _used(main):
        parts = node.name.split("/")
        if len(parts) == 1 and node.kind in PASSED:
            ends.append(node)
            continue
        name = "/".join(parts[:2])
        scope = found.setdefault(name, Scope(name))
        scope.nodes.append(node)
        scope_of[node.name] = name
    order = list(found)
    sources = {node.name: node_of(node.inputs[0]) for node in ends if node.inputs}
    for k, name in enumerate(order):
        scope = found[name]
        for node in scope.nodes:
            for given in map(node_of, node.inputs):
                if given.startswith("^") or scope_of.get(given) == name:
                    continue
                if given in variables:
                    if variables[given] not in scope.variables:
                        scope.variables.append(variables[given])
                    continue
                scope.reads.add(given)
                before = order[k - 1] if k else None
                if len(scope.reads) > 1 or scope_of.get(given) != before:
                    raise FormatError(
                        f"{path}: the layer '{name}' reads {min(scope.reads)!r:.80} beside or"
                        " instead of the layer before it; imported are models of one path, in"
                        f" which every layer reads the output of the one before it; {ADVICE}"
                    )
    returned = {node_of(name) for name in main.returned}
    returned = {sources.get(name, name) for name in returned}
    if not order or {scope_of.get(name) for name in returned} != {order[-1]}:
        raise FormatError(f"{path}: its last layer is not its output; {ADVICE}")
    return [found[name] for name in order], returned


def _used(main: Function) -> Iterator[Node]:
    """Yields the operations that the result depends on: not the random numbers of dropout."""
    by_name = {node.name: node for node in main.nodes}
    used: set[str] = set()
    waiting = [node_of(name) for name in main.returned]
    while waiting:
        name = waiting.pop()
        if name not in used and name in by_name:
            used.add(name)
            waiting += [node_of(given) for given in by_name[name].inputs if given[:1] != "^"]
    return (node for node in main.nodes if node.name in used)
