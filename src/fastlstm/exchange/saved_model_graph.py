"""What `model.export` of Keras 3 wrote, as a layer stack: a graph of TensorFlow's operations.

It has no description of layers. Every layer's operations are in a scope of its own, so that the
operations of a scope, counted, say what the layer computes. A graph is read only where all of them
are exactly those of known layers, each reading the one before it; anything else is refused.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastlstm.errors import FormatError
from fastlstm.exchange.keras_layers import KerasLayer, read_layer
from fastlstm.exchange.layer_stack import Layer, LayerStack
from fastlstm.exchange.protobuf import (
    DamagedMessage,
    fields,
    message,
    messages,
    number,
    text,
    varint,
)
from fastlstm.exchange.tensor_bundle import SavedObject, TensorBundle

_ADVICE = "save the model itself: model.save('model.keras')"
_NOTE = (
    "a SavedModel of Keras 3 does not describe its layers: they, their activations and directions"
    " were read from the operations of its graph; dropout is not in it"
)
_SIGNATURE = "serving_default"
_CALLS = ("StatefulPartitionedCall", "PartitionedCall")
_MAX_NODES, _MAX_CALLS = 200_000, 8
_HARD_SIGMOID = Counter(AddV2=1, Relu6=1, RealDiv=1)
_FUNCTIONS: dict[str, Counter[str]] = {
    "linear": Counter(),
    **{"relu": Counter(Relu=1), "tanh": Counter(Tanh=1), "sigmoid": Counter(Sigmoid=1)},
    **{"softsign": Counter(Softsign=1), "softplus": Counter(Softplus=1), "elu": Counter(Elu=1)},
    **{"selu": Counter(Selu=1), "exponential": Counter(Exp=1), "softmax": Counter(Softmax=1)},
    **{"hard_sigmoid": _HARD_SIGMOID, "silu": Counter(Mul=2, Sigmoid=1)},
}
"""Operations of an activation of Keras 3."""
_CELL = Counter(MatMul=2, AddV2=2, Split=1, Mul=3)
_LAYER_NORM = Counter(Mean=2, SquaredDifference=1, AddV2=3, Rsqrt=1, Mul=3, Neg=1)
_MERGES = {
    "concat": Counter(ConcatV2=1), "sum": Counter(AddV2=1), "mul": Counter(Mul=1),
    "ave": Counter(AddV2=1, RealDiv=1),
}  # fmt: skip
_PASSED = {"Const", "NoOp", "Identity", "IdentityN", "Cast", "StopGradient"}
_SHAPING = _PASSED - {"Cast"} | {
    *("ReadVariableOp", "Shape", "StridedSlice", "Pack", "Fill", "Transpose", "Reshape", "Range"),
    *("Rank", "Max", "Prod", "GatherV2", "Greater", "SelectV2", "PlaceholderWithDefault"),
    *("TensorListReserve", "TensorListFromTensor", "TensorListStack", "While"),
}
_INDEXING = (
    *("/Tensordot/concat", "/loop_body/add", "/strided_slice_1/pfor/", "/MatMul/pfor/split"),
    "/MatMul/pfor/mul",
)
"""Operations of a Dense layer that compute places, not values."""
_LOOP = Counter(TensorListGetItem=1, TensorListSetItem=1, AddV2=2)


@dataclass(frozen=True)
class _Node:
    """An operation: `inputs` are names of others; `function` is what it calls or repeats."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    function: str = ""
    value: float | None = None


@dataclass(frozen=True)
class _Function:
    """A part of the graph: names of its arguments, operations in order, what it returns."""

    arguments: tuple[str, ...]
    nodes: tuple[_Node, ...]
    returned: tuple[str, ...]


@dataclass
class _Scope:
    """The operations of one layer, and the variables that they read."""

    name: str
    nodes: list[_Node] = field(default_factory=list)
    variables: list[SavedObject] = field(default_factory=list)
    reads: set[str] = field(default_factory=set)

    def counted(self, *without: str) -> Counter[str]:
        """Returns how many operations there are by kind, those of shapes and of scopes left out."""
        names = [node for node in self.nodes if not any(part in node.name for part in without)]
        return Counter(node.kind for node in names if node.kind not in _SHAPING)

    def floats(self) -> set[float]:
        return {node.value for node in self.nodes if node.value is not None}


def read_graph(
    data: memoryview, bundle: TensorBundle, objects: list[SavedObject], path: Path
) -> LayerStack:
    """Returns the layers of a graph.

    Raises:
        FormatError: operations that are not those of known layers; the layer is named.
        DamagedMessage: no SavedModel.
    """
    graph = message(data, 2)
    library = _library(message(graph, 2, 2))
    main, variables = _main(graph, library, objects, path)
    scopes, returned = _scopes(main, variables, path)
    reader = _Reader(library, bundle, path)
    layers: list[Layer] = []
    for k, scope in enumerate(scopes):
        layers += reader.layers(scope, scopes[k + 1].reads if k + 1 < len(scopes) else returned)
    return LayerStack(
        tuple(layers), f"Keras 3 (TensorFlow {text(message(graph, 1), 5):.20})", _window(graph),
        notes=(_NOTE, *reader.notes),
    )  # fmt: skip


# the graph ----------------------------------------------------------------------------------------


def _nodes(data: memoryview, number_of_nodes: int) -> Iterator[_Node]:
    for node in messages(data, number_of_nodes):
        function, value = "", None
        for attribute in messages(node, 5):
            name, content = text(attribute, 1), message(attribute, 2)
            if name in ("f", "body"):
                function = text(message(content, 10), 1)
            elif name == "value":
                value = _scalar(message(content, 8))
        inputs = tuple(str(part, "utf-8", "replace") for part in messages(node, 3))
        yield _Node(text(node, 1), text(node, 2), inputs, function, value)


def _scalar(tensor: memoryview) -> float | None:
    """Returns a constant of one float, or None."""
    packed = message(tensor, 5)
    if number(tensor, 1) == 1 and len(packed) == 4:
        return float(struct.unpack("<f", packed)[0])
    return None


def _library(data: memoryview) -> dict[str, _Function]:
    found, count = {}, 0
    for function in messages(data, 1):
        signature = message(function, 1)
        nodes = tuple(_nodes(function, 3))
        count += len(nodes)
        if count > _MAX_NODES:
            raise DamagedMessage("its graph has too many operations")
        arguments = tuple(text(argument, 1) for argument in messages(signature, 2))
        returned = tuple(text(pair, 2) for pair in messages(function, 4))
        found[text(signature, 1)] = _Function(arguments, nodes, returned)
    return found


def _main(
    graph: memoryview, library: Mapping[str, _Function], objects: list[SavedObject], path: Path
) -> tuple[_Function, dict[str, SavedObject]]:
    """Returns the function of the signature, and the variables by the names of its arguments."""
    outputs = list(messages(_signature(graph), 2))
    if len(outputs) != 1:
        raise FormatError(
            f"{path} has {len(outputs)} outputs in its signature {_SIGNATURE}, expected one;"
            f" {_ADVICE}"
        )
    end = _node_of(text(message(outputs[0], 2), 1))
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
            passed = zip(main.arguments, map(_node_of, call.inputs), strict=False)
            given = {name: given[source] for name, source in passed if source in given}
        calls = [node for node in main.nodes if node.kind not in _PASSED]
        if len(calls) != 1 or calls[0].kind not in _CALLS:
            return main, given
        call = calls[0]
    raise FormatError(f"{path}: its signature {_SIGNATURE} calls no function; {_ADVICE}")


def _signature(graph: memoryview) -> memoryview:
    for entry in messages(graph, 5):
        if text(entry, 1) == _SIGNATURE:
            return message(entry, 2)
    return memoryview(b"")


def _window(graph: memoryview) -> int | None:
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


def _node_of(name: str) -> str:
    """Returns the operation of `name:output:0`."""
    return name.partition(":")[0]


def _scopes(
    main: _Function, variables: Mapping[str, SavedObject], path: Path
) -> tuple[list[_Scope], set[str]]:
    """Returns the scopes in order, each reading one value of the one before it, and the operation
    whose value is returned.

    Raises:
        FormatError: layers that read others too.
    """
    found: dict[str, _Scope] = {}
    scope_of: dict[str, str] = {}
    ends = []
    for node in _used(main):
        parts = node.name.split("/")
        if len(parts) == 1 and node.kind in _PASSED:
            ends.append(node)
            continue
        name = "/".join(parts[:2])
        scope = found.setdefault(name, _Scope(name))
        scope.nodes.append(node)
        scope_of[node.name] = name
    order = list(found)
    sources = {node.name: _node_of(node.inputs[0]) for node in ends if node.inputs}
    for k, name in enumerate(order):
        scope = found[name]
        for node in scope.nodes:
            for given in map(_node_of, node.inputs):
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
                        f" which every layer reads the output of the one before it; {_ADVICE}"
                    )
    returned = {_node_of(name) for name in main.returned}
    returned = {sources.get(name, name) for name in returned}
    if not order or {scope_of.get(name) for name in returned} != {order[-1]}:
        raise FormatError(f"{path}: its last layer is not its output; {_ADVICE}")
    return [found[name] for name in order], returned


def _used(main: _Function) -> Iterator[_Node]:
    """Yields the operations that the result depends on: not the random numbers of dropout."""
    by_name = {node.name: node for node in main.nodes}
    used: set[str] = set()
    waiting = [_node_of(name) for name in main.returned]
    while waiting:
        name = waiting.pop()
        if name not in used and name in by_name:
            used.add(name)
            waiting += [_node_of(given) for given in by_name[name].inputs if given[:1] != "^"]
    return (node for node in main.nodes if node.name in used)


# the layers ---------------------------------------------------------------------------------------


class _Reader:
    """Turns scopes into layers, by way of a layer of Keras and its settings."""

    def __init__(self, library: Mapping[str, _Function], bundle: TensorBundle, path: Path) -> None:
        self._library, self._bundle, self._path = library, bundle, path
        self.notes: list[str] = []

    def layers(self, scope: _Scope, outputs: set[str]) -> list[Layer]:
        """Returns the layers of one scope, of which the next layer reads these operations."""
        names = {_last(variable) for variable in scope.variables}
        if not names:
            return self._function(scope)
        if "recurrent_kernel" in names:
            return self._recurrent(scope, outputs)
        for read, expected in (
            (self._embedding, {"embeddings"}),
            (self._dense, {"kernel"}),
            (self._layer_norm, {"gamma", "beta"}),
        ):
            if names - {"bias"} == expected and len(scope.variables) == len(names):
                return read(scope)
        raise self._unknown(scope, f"variables {', '.join(sorted(names))[:80]}")

    def _made(self, scope: _Scope, kind: str, **config: Any) -> list[Layer]:
        arrays = [self._bundle.array(variable.key) for variable in scope.variables]
        if kind == "Embedding":
            config |= dict(zip(("input_dim", "output_dim"), arrays[0].shape, strict=False))
        elif kind == "Dense":
            config["units"] = arrays[0].shape[-1]
        layer = KerasLayer(kind, _shown(scope), config, 3, arrays, self.notes)
        layers = read_layer(layer)
        if arrays:
            raise self._unknown(scope, "weights too many")
        return layers

    def _function(self, scope: _Scope) -> list[Layer]:
        kinds = Counter(node.kind for node in scope.nodes if node.kind not in _PASSED)
        name = self._function_of(scope, kinds)
        return self._made(scope, "Activation", activation=name)

    def _embedding(self, scope: _Scope) -> list[Layer]:
        counted = scope.counted()
        if counted - Counter(Less=1, AddV2=1, Cast=1) or _kinds(scope)["GatherV2"] != 1:
            raise self._unknown(scope, _listed(counted))
        return self._made(scope, "Embedding")

    def _dense(self, scope: _Scope) -> list[Layer]:
        """A Dense layer, for the last axis; TimeDistributed repeats it for every step."""
        counted = scope.counted(*_INDEXING)
        copies = counted["MatMul"]
        if not copies or any(count % copies for count in counted.values()):
            raise self._unknown(scope, _listed(counted))
        counted = Counter({kind: count // copies for kind, count in counted.items()})
        linear = ["MatMul"]
        if has_bias := len(scope.variables) == 2:
            linear.append("BiasAdd" if counted["BiasAdd"] else "AddV2")  # of one unit
        if any(not counted[kind] for kind in linear):
            raise self._unknown(scope, _listed(counted))
        function = self._function_of(scope, counted - Counter(linear))
        return self._made(scope, "Dense", activation=function, use_bias=has_bias)

    def _layer_norm(self, scope: _Scope) -> list[Layer]:
        floats = scope.floats()
        if scope.counted() != _LAYER_NORM or len(floats) != 1:
            raise self._unknown(scope, _listed(scope.counted()))
        return self._made(scope, "LayerNormalization", epsilon=floats.pop())

    def _recurrent(self, scope: _Scope, outputs: set[str]) -> list[Layer]:
        ways = [node for node in scope.nodes if node.kind == "While"]
        output = [node for node in scope.nodes if node.name in outputs]
        if len(ways) == 1:
            config = self._lstm(scope, ways[0], output)
            return self._made(scope, "LSTM", **config)
        if len(ways) != 2:
            raise self._unknown(scope, f"{len(ways)} loops")
        # Each way is in a scope within; what remains joins them.
        inner = [node.name.rpartition("/")[0] for node in ways]
        parts = [
            _Scope(name, [node for node in scope.nodes if node.name.startswith(f"{name}/")],
                   scope.variables[3 * k : 3 * k + 3])
            for k, name in enumerate(inner)
        ]  # fmt: skip
        joining = _Scope(
            scope.name, [n for n in scope.nodes if all(n not in p.nodes for p in parts)]
        )
        read = {_node_of(name) for node in joining.nodes for name in node.inputs}
        configs = [
            self._lstm(part, way, [node for node in part.nodes if node.name in read
                                   and node.kind in ("Transpose", "StridedSlice")
                                   and not node.name.endswith("/transpose")])
            for part, way in zip(parts, ways, strict=True)
        ]  # fmt: skip
        counted = joining.counted()
        turned = counted.pop("ReverseV2", 0)
        merge = next((name for name, kinds in _MERGES.items() if kinds == counted), None)
        if merge is None or turned != configs[0]["return_sequences"] or (
            merge == "ave" and joining.floats() - {0.0} != {2.0}
        ):  # fmt: skip
            raise self._unknown(scope, _listed(counted))
        layers = [{"class_name": "LSTM", "config": config} for config in configs]
        return self._made(
            scope, "Bidirectional", merge_mode=merge, layer=layers[0], backward_layer=layers[1]
        )

    def _lstm(self, scope: _Scope, way: _Node, output: list[_Node]) -> dict[str, Any]:
        """Returns the settings of an LSTM: from its loop, and from which of its values is read."""
        kinds = {node.kind for node in output}
        body = self._library.get(way.function)
        outside = scope.counted("/lstm_cell")
        turned = outside.pop("ReverseV2", 0)
        if body is None or outside or turned > 1 or kinds not in ({"Transpose"}, {"StridedSlice"}):
            raise self._unknown(
                scope, _listed(outside) or f"an output by {_listed(Counter(kinds))}"
            )
        inside = [node for node in body.nodes if "/lstm_cell" in node.name]
        loop = Counter(
            node.kind for node in body.nodes if node not in inside and node.kind not in _SHAPING
        )
        cell = _Scope(scope.name, inside)
        counted = cell.counted()
        has_bias = bool(counted.pop("BiasAdd", 0))
        names = [
            (gates, activation)
            for gates, three in _FUNCTIONS.items()
            for activation, two in _FUNCTIONS.items()
            if counted == _CELL + three + three + three + two + two
        ]
        if loop != _LOOP or len(names) != 1:
            raise self._unknown(scope, _listed(counted + loop - _LOOP))
        gates, activation = names[0]
        if "hard_sigmoid" in names[0] and cell.floats() != {3.0, 6.0}:
            raise self._unknown(scope, "a hard_sigmoid of other numbers")
        hidden = [v for v in scope.variables if _last(v) == "recurrent_kernel"]
        units = self._bundle.array(hidden[0].key).shape[0] if hidden else 0
        return {
            "units": units, "activation": activation, "recurrent_activation": gates,
            "use_bias": has_bias, "return_sequences": kinds == {"Transpose"},
            "go_backwards": bool(turned),
        }  # fmt: skip

    def _function_of(self, scope: _Scope, kinds: Counter[str]) -> str:
        name = next((name for name, known in _FUNCTIONS.items() if known == kinds), None)
        is_other = name == "hard_sigmoid" and scope.floats() != {3.0, 6.0}
        if name is None or is_other or (name == "silu" and scope.floats() != {1.0}):
            raise self._unknown(scope, _listed(kinds))
        return name

    def _unknown(self, scope: _Scope, found: str) -> FormatError:
        return FormatError(
            f"{self._path}: the layer '{_shown(scope)}' has {found or 'operations'}, which are not"
            f" those of a layer that is read from a graph; {_ADVICE}"
        )


def _shown(scope: _Scope) -> str:
    """Returns the name of a layer: that in its variables, to which its scope may add a number."""
    name = scope.name.rpartition("/")[2]
    parts = scope.variables[0].full_name.split("/") if scope.variables else []
    return next((part for part in parts if part and name.startswith(part)), name)[:80]


def _last(variable: SavedObject) -> str:
    return variable.full_name.rpartition("/")[2]


def _kinds(scope: _Scope) -> Counter[str]:
    return Counter(node.kind for node in scope.nodes)


def _listed(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))[:120]
