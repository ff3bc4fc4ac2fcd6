"""What `model.export` of Keras 3 wrote, as a layer stack: a graph of TensorFlow's operations.

It has no description of layers. Every layer's operations are in a scope of its own, so that the
operations of a scope, counted, say what the layer computes. A graph is read only where all of them
are exactly those of known layers, each reading the one before it; anything else is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastlstm.errors import FormatError
from fastlstm.exchange.keras_layers import KerasLayer, read_layer
from fastlstm.exchange.protobuf import message, text
from fastlstm.exchange.tensor_bundle import SavedObject, TensorBundle
from fastlstm.exchange.tensorflow_graph import (
    ADVICE,
    PASSED,
    SHAPING,
    Function,
    Node,
    Scope,
    main_function,
    node_of,
    read_library,
    scopes_of,
    window,
)
from fastlstm.sequence.layer_stack import Layer, LayerStack

_NOTE = (
    "a SavedModel of Keras 3 does not describe its layers: they, their activations and directions"
    " were read from the operations of its graph; dropout is not in it"
)
_HARD_SIGMOID = Counter(AddV2=1, Relu6=1, RealDiv=1)
_FUNCTIONS: dict[str, Counter[str]] = {
    "linear": Counter(),
    **{"relu": Counter(Relu=1), "tanh": Counter(Tanh=1), "sigmoid": Counter(Sigmoid=1)},
    **{"softsign": Counter(Softsign=1), "softplus": Counter(Softplus=1), "elu": Counter(Elu=1)},
    **{"selu": Counter(Selu=1), "exponential": Counter(Exp=1), "softmax": Counter(Softmax=1)},
    **{"hard_sigmoid": _HARD_SIGMOID, "silu": Counter(Mul=2, Sigmoid=1)},
}
"""Operations of an activation of Keras 3."""
_ORDER = ("embeddings", "kernel", "recurrent_kernel", "bias", "gamma", "beta")
"""Variables of layers in Keras' order."""
_CELL = Counter(MatMul=2, AddV2=2, Split=1, Mul=3)
_LAYER_NORM = Counter(Mean=2, SquaredDifference=1, AddV2=3, Rsqrt=1, Mul=3, Neg=1)
_MERGES = {
    "concat": Counter(ConcatV2=1), "sum": Counter(AddV2=1), "mul": Counter(Mul=1),
    "ave": Counter(AddV2=1, RealDiv=1),
}  # fmt: skip
_INDEXING = (
    *("/Tensordot/concat", "/loop_body/add", "/strided_slice_1/pfor/", "/MatMul/pfor/split"),
    "/MatMul/pfor/mul",
)
"""Operations of a Dense layer that compute places, not values."""
_DENSE_MOVES: tuple[Counter[str], ...] = (
    Counter(),
    Counter(Transpose=1, Reshape=2),
    Counter(Transpose=2, TensorListStack=1, Reshape=2),
)
"""How a Dense layer moves its rows: two axes, three, or three within TimeDistributed, which takes
known numbers of steps one by one."""
_EMBEDDING_MOVES = Counter(GatherV2=1, SelectV2=1)
_LSTM_MOVES = Counter(Transpose=1, TensorListFromTensor=1, TensorListStack=1)
_LOOP = Counter(TensorListGetItem=1, TensorListSetItem=1, AddV2=2)


def read_graph(
    data: memoryview, bundle: TensorBundle, objects: list[SavedObject], path: Path
) -> LayerStack:
    """Returns the layers of a graph.

    Raises:
        FormatError: operations that are not those of known layers; the layer is named.
        DamagedMessage: no SavedModel.
    """
    graph = message(data, 2)
    library = read_library(message(graph, 2, 2))
    main, variables = main_function(graph, library, objects, path)
    scopes, returned = scopes_of(main, variables, path)
    reader = _Reader(library, bundle, path)
    layers: list[Layer] = []
    for k, scope in enumerate(scopes):
        layers += reader.layers(scope, scopes[k + 1].reads if k + 1 < len(scopes) else returned)
    return LayerStack(
        tuple(layers), f"Keras 3 (TensorFlow {text(message(graph, 1), 5):.20})", window(graph),
        notes=(_NOTE, *reader.notes),
    )  # fmt: skip


class _Reader:
    """Turns scopes into layers, by way of a layer of Keras and its settings."""

    def __init__(self, library: Mapping[str, Function], bundle: TensorBundle, path: Path) -> None:
        self._library, self._bundle, self._path = library, bundle, path
        self.notes: list[str] = []

    def layers(self, scope: Scope, outputs: set[str]) -> list[Layer]:
        """Returns the layers of one scope, of which the next layer reads these operations."""
        names = {_last(variable) for variable in scope.variables}
        if not names:
            return self._function(scope)
        if not names <= set(_ORDER):
            raise self._unknown(scope, f"variables {', '.join(sorted(names))[:80]}")
        ways = 2 if len(scope.variables) == 2 * len(names) else 1
        parts = [scope.variables[k * len(names) :][: len(names)] for k in range(ways)]
        is_whole = ways * len(names) == len(scope.variables)
        if not is_whole or any({_last(variable) for variable in part} != names for part in parts):
            raise self._unknown(scope, "variables of several layers")
        scope.variables = [v for part in parts for v in sorted(part, key=_place)]
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

    def _made(self, scope: Scope, kind: str, **config: Any) -> list[Layer]:
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

    def _function(self, scope: Scope) -> list[Layer]:
        kinds = Counter(node.kind for node in scope.nodes if node.kind not in PASSED)
        casts = sum(node.kind == "Cast" for node in scope.nodes)
        if casts > scope.name.rpartition("/")[2].startswith("Cast"):  # Keras casts inputs there
            raise self._unknown(scope, f"{casts} Cast")
        name = self._function_of(scope, kinds)
        return self._made(scope, "Activation", activation=name)

    def _embedding(self, scope: Scope) -> list[Layer]:
        counted = scope.counted()
        if counted - Counter(Less=1, AddV2=1, Cast=1):
            raise self._unknown(scope, _listed(counted))
        self._check_moves(scope, _EMBEDDING_MOVES)
        return self._made(scope, "Embedding")

    def _dense(self, scope: Scope) -> list[Layer]:
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
        self._check_moves(scope, *_DENSE_MOVES, Counter(Transpose=2, StridedSlice=copies, Pack=1))
        function = self._function_of(scope, counted - Counter(linear))
        return self._made(scope, "Dense", activation=function, use_bias=has_bias)

    def _layer_norm(self, scope: Scope) -> list[Layer]:
        floats = scope.floats()
        axes = {node.value for node in scope.nodes if node.name.endswith("/reduction_indices")}
        if axes not in ({-1}, {2}):
            raise self._unknown(scope, "an axis that is not known to be the last")
        if scope.counted() != _LAYER_NORM or len(floats) != 1:
            raise self._unknown(scope, _listed(scope.counted()))
        self._check_moves(scope, Counter())
        return self._made(scope, "LayerNormalization", epsilon=floats.pop())

    def _recurrent(self, scope: Scope, outputs: set[str]) -> list[Layer]:
        ways = [node for node in scope.nodes if node.kind == "While"]
        output = [node for node in scope.nodes if node.name in outputs]
        if len(ways) == 1:
            config = self._lstm(scope, ways[0], output)
            self._check_moves(scope, *_lstm_moves(1))
            return self._made(scope, "LSTM", **config)
        if len(ways) != 2:
            raise self._unknown(scope, f"{len(ways)} loops")
        # Each way is in a scope within; what remains joins them.
        inner = [node.name.rpartition("/")[0] for node in ways]
        half = len(scope.variables) // 2
        parts = [
            Scope(name, [node for node in scope.nodes if node.name.startswith(f"{name}/")],
                   scope.variables[k * half : (k + 1) * half])
            for k, name in enumerate(inner)
        ]  # fmt: skip
        joining = Scope(
            scope.name, [n for n in scope.nodes if all(n not in p.nodes for p in parts)]
        )
        read = {node_of(name) for node in joining.nodes for name in node.inputs}
        configs = [
            self._lstm(part, way, [node for node in part.nodes if node.name in read
                                   and node.kind in ("Transpose", "StridedSlice")
                                   and not node.name.endswith("/transpose")])
            for part, way in zip(parts, ways, strict=True)
        ]  # fmt: skip
        self._check_moves(scope, *_lstm_moves(2))
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

    def _lstm(self, scope: Scope, way: Node, output: list[Node]) -> dict[str, Any]:
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
            node.kind for node in body.nodes if node not in inside and node.kind not in SHAPING
        )
        cell = Scope(scope.name, inside)
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

    def _function_of(self, scope: Scope, kinds: Counter[str]) -> str:
        name = next((name for name, known in _FUNCTIONS.items() if known == kinds), None)
        is_other = name == "hard_sigmoid" and scope.floats() != {3.0, 6.0}
        if name is None or is_other or (name == "silu" and scope.floats() != {1.0}):
            raise self._unknown(scope, _listed(kinds))
        return name

    def _check_moves(self, scope: Scope, *known: Counter[str]) -> None:
        found = scope.moves()
        if found not in known:
            raise self._unknown(scope, _listed(found))

    def _unknown(self, scope: Scope, found: str) -> FormatError:
        return FormatError(
            f"{self._path}: the layer '{_shown(scope)}' has {found or 'operations'}, which are not"
            f" those of a layer that is read from a graph; {ADVICE}"
        )


def _shown(scope: Scope) -> str:
    """Returns the name of a layer: that in its variables, to which its scope may add a number."""
    name = scope.name.rpartition("/")[2]
    parts = scope.variables[0].full_name.split("/") if scope.variables else []
    return next((part for part in parts if part and name.startswith(part)), name)[:80]


def _lstm_moves(ways: int) -> list[Counter[str]]:
    """Returns how an LSTM moves its steps: with an output for each, or for the last one."""
    kinds = (_LSTM_MOVES + Counter([kind]) for kind in ("Transpose", "StridedSlice"))
    return [Counter({kind: count * ways for kind, count in one.items()}) for one in kinds]


def _place(variable: SavedObject) -> int:
    return _ORDER.index(_last(variable))


def _last(variable: SavedObject) -> str:
    return variable.full_name.rpartition("/")[2]


def _listed(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))[:120]
