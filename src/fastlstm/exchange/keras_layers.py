"""One layer of Keras 1, 2 or 3: settings and arrays as layers of a stack."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import FormatError
from fastlstm.ops.cell_options import ACTIVATIONS
from fastlstm.sequence import layer_stack as ls

Arrays = list[NDArray[np.float32]]
_OTHER_NAMES = {"swish": "silu", "exp": "exponential"}
IN_KERAS = "`fastlstm.keras.accelerate(model)` runs its LSTM layers in Keras"
_INSTEAD = {
    "Masking": "save the model without it and give `lengths`",
    "Normalization": "save the model without it, and scale the values before",
}
_HARD_SIGMOID_SCALE = 1.2
"""At y = 1.2 x, clip(0.2 x + 0.5) of Keras 1 and 2 equals clip(y / 6 + 0.5) of Keras 3 and ours."""


@dataclass
class KerasLayer:
    """A layer while it is read, of the class `kind`.

    `arrays` are in Keras' order; reading removes them, and appends to `notes` for the user.
    `version` is the major version of Keras that wrote the layer.
    """

    kind: str
    name: str
    config: Mapping[str, Any]
    version: int
    arrays: Arrays
    notes: list[str] = field(default_factory=list)

    def take(self, what: str, *shape: int | None) -> NDArray[np.float32]:
        """Returns the next array after a check of its shape; None allows any size."""
        if not self.arrays:
            raise FormatError(f"the layer '{self.name}' ({self.kind}) lacks its {what}")
        array = self.arrays.pop(0)
        is_right = array.ndim == len(shape) and all(
            want in (None, size) for want, size in zip(shape, array.shape, strict=True)
        )
        if not is_right or 0 in array.shape:
            expected = ", ".join("any" if size is None else str(size) for size in shape)
            raise FormatError(
                f"the {what} of the layer '{self.name}' ({self.kind}) has the shape {array.shape},"
                f" its settings describe ({expected})"
            )
        return array

    def whole(self, *names: str) -> int:
        value = self._setting(names)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise FormatError(
                f"{names[0]} of the layer '{self.name}' is {value!r:.60}, expected a whole number"
            )
        return value

    def _setting(self, names: tuple[str, ...]) -> Any:
        return next((self.config[name] for name in names if name in self.config), None)

    def number(self, *names: str, default: float) -> float:
        value = self._setting(names)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise FormatError(
                f"{names[0]} of the layer '{self.name}' is {value!r:.60}, expected a number"
            )
        try:
            return float(value)
        except OverflowError:
            raise FormatError(
                f"{names[0]} of the layer '{self.name}' is too large a number"
            ) from None

    def is_set(self, name: str, default: bool = False) -> bool:
        return bool(self.config.get(name, default))

    def inner(self, name: str) -> KerasLayer:
        """Returns a wrapped layer, which shares the arrays."""
        settings = self.config.get(name)
        if not isinstance(settings, dict):
            raise FormatError(f"the layer '{self.name}' ({self.kind}) lacks the layer it wraps")
        kind, config = class_of(settings), settings.get("config")
        inner_name = f"{self.name}/{name_of(settings)}"
        config = config if isinstance(config, dict) else {}
        return KerasLayer(kind, inner_name, config, self.version, self.arrays, self.notes)


def class_of(settings: Mapping[str, Any]) -> str:
    """Returns the class of a described layer."""
    kind, registered = settings.get("class_name"), settings.get("registered_name")
    module = settings.get("module")
    if not isinstance(kind, str):
        raise FormatError(f"a layer has the class {kind!r:.60}")
    is_kerass = module is None or str(module).split(".")[0] in ("keras", "tf_keras", "tensorflow")
    if not is_kerass or registered not in (None, kind):
        raise FormatError(
            f"the layer '{name_of(settings)}' is of a class of its own, {registered or kind}"
            f"{f' ({module})' if module else ''}; only Keras' own layers are imported; {IN_KERAS}"
        )
    return kind


def name_of(settings: Mapping[str, Any]) -> str:
    """Returns the name of a described layer."""
    config = settings.get("config")
    named = config.get("name") if isinstance(config, dict) else None
    return str(named or settings.get("name") or settings.get("class_name"))[:80]


def read_layer(layer: KerasLayer) -> list[ls.Layer]:
    """Returns a Keras layer as layers of a stack."""
    reader = _READERS.get(layer.kind)
    if reader is None:
        raise FormatError(
            f"the layer '{layer.name}' is {_article(layer.kind)} {layer.kind}, which cannot be"
            f" imported (docs/exchange.md lists the layers); {_INSTEAD.get(layer.kind, IN_KERAS)}"
        )
    return reader(layer)


def output_shape(layer: KerasLayer, before: list[ls.Layer]) -> tuple[int, ...]:
    """Returns the output shape of one sequence after a Reshape of a Dense layer, or after a Squeeze
    of its one column."""
    if layer.kind == "Squeeze":
        dense = next((la for la in before[::-1] if not isinstance(la, ls.Function)), None)
        if not isinstance(dense, ls.Dense) or len(dense.weight) > 1:
            raise FormatError(
                f"the layer '{layer.name}' is a Squeeze; expected one at the end, behind a Dense"
                " layer of one unit"
            )
        return ()
    last = before[-1] if before else None
    shape: Any = layer.config.get("target_shape")
    is_shape = isinstance(shape, list) and all(type(size) is int for size in shape)
    if not is_shape or not isinstance(last, ls.Dense):
        raise FormatError(
            f"the layer '{layer.name}' is a Reshape to {shape!r:.60}; expected one at the end,"
            " behind a Dense layer"
        )
    known = math.prod(size for size in shape if size != -1)
    width = len(last.weight)
    sizes = tuple(width // known if size == -1 and known > 0 else size for size in shape)
    if not sizes or min(sizes) < 1 or math.prod(sizes) != width:
        raise FormatError(f"the layer '{layer.name}' makes {shape!r:.60} of {width} columns")
    return sizes


def _article(word: str) -> str:
    return "an" if word[:1] in "AEIOU" else "a"


def _embedding(layer: KerasLayer) -> list[ls.Layer]:
    sizes = layer.whole("input_dim"), layer.whole("output_dim")
    weight = np.ascontiguousarray(layer.take("embeddings", *sizes))
    return [ls.Embedding(layer.name, weight, layer.is_set("mask_zero"))]


def _dense(layer: KerasLayer) -> list[ls.Layer]:
    units = layer.whole("units", "output_dim")
    weight = np.ascontiguousarray(layer.take("kernel", None, units).T)
    has_bias = layer.is_set("use_bias", layer.is_set("bias", True))
    bias = layer.take("bias", units) if has_bias else np.zeros(units, np.float32)
    dense = ls.Dense(layer.name, weight, bias)
    return [dense, *_function(layer)]


def _function(layer: KerasLayer) -> list[ls.Layer]:
    function = _activation_of(layer, "activation", "linear")
    if function == "linear":
        return []
    if function == "hard_sigmoid" and layer.version < 3:
        function = "hard_sigmoid_0.2"
    if function not in ls.FUNCTIONS:
        raise _unknown_activation(layer, "activation", function, ls.FUNCTIONS)
    return [ls.Function(layer.name, function)]


def _softmax(layer: KerasLayer) -> list[ls.Layer]:
    if layer.config.get("axis", -1) not in (-1, 2):
        raise FormatError(
            f"the layer '{layer.name}' is a softmax over the axis {layer.config['axis']!r:.20},"
            " expected the last one"
        )
    return [ls.Function(layer.name, "softmax")]


def _relu(layer: KerasLayer) -> list[ls.Layer]:
    for name in ("max_value", "negative_slope", "threshold"):
        if layer.config.get(name):
            raise FormatError(f"{name} of the layer '{layer.name}' (ReLU) cannot be imported")
    return [ls.Function(layer.name, "relu")]


def _layer_norm(layer: KerasLayer) -> list[ls.Layer]:
    axis = layer.config.get("axis", -1)
    if (axis[0] if isinstance(axis, list) and len(axis) == 1 else axis) not in (-1, 2):
        raise FormatError(
            f"the layer '{layer.name}' normalises the axis {axis!r:.20}, expected the last one"
        )
    if layer.is_set("rms_scaling"):
        raise FormatError(f"rms_scaling of the layer '{layer.name}' cannot be imported")
    scales, centers = layer.is_set("scale", True), layer.is_set("center", True)
    weight = layer.take("gamma", None) if scales else None
    bias = layer.take("beta", None) if centers else None
    known = weight if weight is not None else bias
    if known is None:
        raise FormatError(f"the layer '{layer.name}' has neither scale nor center: no width")
    weight = np.ones_like(known) if weight is None else weight
    bias = np.zeros_like(known) if bias is None else bias
    return [ls.LayerNorm(layer.name, weight, bias, layer.number("epsilon", default=1e-3))]


def _pooling(layer: KerasLayer) -> list[ls.Layer]:
    if layer.config.get("data_format") == "channels_first" or layer.is_set("keepdims"):
        raise FormatError(f"data_format or keepdims of the layer '{layer.name}' cannot be imported")
    return [ls.Steps(layer.name, "mean" if "Average" in layer.kind else "max")]


def _dropout(layer: KerasLayer) -> list[ls.Layer]:
    rate = layer.number("rate", "p", default=0.0)
    if not 0 <= rate < 1:
        raise FormatError(f"rate of the layer '{layer.name}' is {rate}, expected one in [0, 1)")
    return [ls.Dropout(layer.name, rate, layer.kind != "Dropout")] if rate else []


def _time_distributed(layer: KerasLayer) -> list[ls.Layer]:
    inner = layer.inner("layer")
    if inner.kind not in _PER_STEP:
        raise FormatError(
            f"the layer '{layer.name}' applies {_article(inner.kind)} {inner.kind} to every step,"
            f" which cannot be imported; expected one of {', '.join(_PER_STEP)}"
        )
    return read_layer(inner)


def _lstm(layer: KerasLayer) -> list[ls.Layer]:
    weights, options = _cell_of(layer)
    every_step = layer.is_set("return_sequences")
    reverses = layer.is_set("go_backwards")
    return [ls.LSTMLayer(layer.name, weights, every_step=every_step, reverses=reverses, **options)]


def _bidirectional(layer: KerasLayer) -> list[ls.Layer]:
    merge = layer.config.get("merge_mode", "concat")
    if merge not in get_args(ls.Merge):
        raise FormatError(
            f"merge_mode of the layer '{layer.name}' is {merge!r:.20}, expected one of"
            f" {', '.join(get_args(ls.Merge))}"
        )
    first = layer.inner("layer")
    # Keras stores a backward layer only if one was given.
    second = layer.inner("backward_layer" if layer.config.get("backward_layer") else "layer")
    for way in (first, second):
        if way.kind not in ("LSTM", "CuDNNLSTM"):
            raise FormatError(
                f"the layer '{layer.name}' wraps {_article(way.kind)} {way.kind}, which cannot be"
                " imported; expected LSTM or CuDNNLSTM"
            )
    is_reversed = first.is_set("go_backwards")
    if is_reversed or (second.config is not first.config and not second.is_set("go_backwards")):
        raise FormatError(f"the layer '{layer.name}' reads both ways in the same direction")
    forward, options = _cell_of(first)
    backward, others = _cell_of(second)
    if options != others or forward.weight_hh.shape != backward.weight_hh.shape:
        raise FormatError(f"the two layers in '{layer.name}' are of different kinds or sizes")
    every_step = first.is_set("return_sequences")
    return [ls.LSTMLayer(layer.name, forward, backward, merge, every_step, **options)]


def _cell_of(layer: KerasLayer) -> tuple[ls.CellWeights, dict[str, Any]]:
    """Returns the weights of an LSTM, and its activations by their names in `LSTMLayer`."""
    _note_dropout(layer)
    if layer.is_set("stateful"):
        layer.notes.append(
            f"'{layer.name}' is stateful: a text run carries the state through a text; a sequence"
            " run or a module starts each call at zero"
        )
    H = layer.whole("units", "output_dim")
    if layer.kind == "CuDNNLSTM":
        weights = _cudnn_weights(layer, H)
        return weights, {}
    if layer.arrays and layer.arrays[0].shape[1:] == (H,):
        weights = _keras_1_weights(layer, H)
    else:
        kernel = layer.take("kernel", None, 4 * H)
        recurrent = layer.take("recurrent kernel", H, 4 * H)
        has_bias = layer.is_set("use_bias", True)
        bias = layer.take("bias", 4 * H) if has_bias else np.zeros(4 * H, np.float32)
        weights = ls.CellWeights(
            np.ascontiguousarray(kernel.T), np.ascontiguousarray(recurrent.T), bias
        )
    activation = _activation_of(layer, "activation", "tanh")
    default = "hard_sigmoid" if layer.version < 2 else "sigmoid"
    name = "inner_activation" if "inner_activation" in layer.config else "recurrent_activation"
    gates = _activation_of(layer, name, default)
    for setting, value in (("activation", activation), (name, gates)):
        if value not in ACTIVATIONS:
            raise _unknown_activation(layer, setting, value, ACTIVATIONS)
    if layer.version < 3:
        if activation == "hard_sigmoid":
            raise FormatError(
                f"activation of the layer '{layer.name}' is the hard_sigmoid of Keras"
                f" {layer.version}, clip(0.2 x + 0.5), which fastlstm.LSTM lacks"
            )
        if gates == "hard_sigmoid":
            weights = _steeper(weights, H)
    return weights, {"activation": activation, "recurrent_activation": gates}


def _note_dropout(layer: KerasLayer) -> None:
    rates = {
        name: layer.number(*names, default=0.0)
        for name, names in {
            "dropout": ("dropout", "dropout_W"),
            "recurrent_dropout": ("recurrent_dropout", "dropout_U"),
        }.items()
    }
    given = ", ".join(f"{name} {rate:g}" for name, rate in rates.items() if rate)
    if given:
        layer.notes.append(f"'{layer.name}' had {given} in training: not imported")


def _keras_1_weights(layer: KerasLayer, H: int) -> ls.CellWeights:
    """Returns weights from twelve arrays: W, U and b of the gates i, c, f, o."""
    gates: dict[str, tuple[ls.Weights, ls.Weights, ls.Weights]] = {}
    for gate in "icfo":
        kernel = layer.take(f"W_{gate}", None, H)
        gates[gate] = kernel, layer.take(f"U_{gate}", H, H), layer.take(f"b_{gate}", H)
    if len({kernel.shape for kernel, _, _ in gates.values()}) > 1:
        raise FormatError(f"the kernels of the layer '{layer.name}' have different widths")
    W, U, b = zip(*(gates[gate] for gate in "ifco"), strict=True)
    join = [np.concatenate([part.T for part in parts]) for parts in (W, U)]
    return ls.CellWeights(join[0], join[1], np.concatenate(b))


def _cudnn_weights(layer: KerasLayer, H: int) -> ls.CellWeights:
    """Returns weights from cuDNN's layout: every gate transposed, two biases."""
    kernel = layer.take("kernel", None, 4 * H)
    recurrent = layer.take("recurrent kernel", H, 4 * H)
    biases = layer.take("bias", 8 * H)
    # Each gate `(I, H)` is stored in the memory order of `(H, I)`, the recurrent one as it is.
    parts = [part.reshape(H, -1) for part in np.split(kernel, 4, axis=1)]
    hidden = np.concatenate(np.split(recurrent, 4, axis=1))
    return ls.CellWeights(np.concatenate(parts), hidden, biases[: 4 * H] + biases[4 * H :])


def _steeper(weights: ls.CellWeights, H: int) -> ls.CellWeights:
    """Returns weights whose gates under Keras 3's hard sigmoid equal those of Keras 1 and 2."""
    scale = np.full(4 * H, _HARD_SIGMOID_SCALE, np.float32)
    scale[2 * H : 3 * H] = 1.0  # the candidate
    column = scale[:, None]
    return ls.CellWeights(
        weights.weight_ih * column, weights.weight_hh * column, weights.bias * scale
    )


def _activation_of(layer: KerasLayer, setting: str, default: str) -> str:
    """Returns the name of an activation, which is stored as a text or as a described function."""
    value = layer.config.get(setting, default)
    if value is None:
        return "linear"
    if isinstance(value, dict):
        if value.get("class_name") != "function" or value.get("registered_name") not in (
            *(None, "function"),
            value.get("config"),
        ):
            named = value.get("registered_name") or value.get("class_name")
            raise _unknown_activation(layer, setting, named, ())
        value = value.get("config")
    return _OTHER_NAMES.get(str(value), str(value))


def _unknown_activation(
    layer: KerasLayer, setting: str, value: Any, known: tuple[str, ...]
) -> FormatError:
    expected = [name for name in known if name != "hard_sigmoid_0.2"]
    hint = f"; expected one of {', '.join(expected)}" if expected else ""
    return FormatError(
        f"{setting} of the layer '{layer.name}' is {value!s:.60}, which cannot be imported{hint}"
    )


_READERS: dict[str, Callable[[KerasLayer], list[ls.Layer]]] = {
    "Embedding": _embedding,
    "LSTM": _lstm,
    "CuDNNLSTM": _lstm,
    "Bidirectional": _bidirectional,
    "Dense": _dense,
    "TimeDistributed": _time_distributed,
    "TimeDistributedDense": _dense,
    "Dropout": _dropout,
    "SpatialDropout1D": _dropout,
    "Activation": _function,
    "Softmax": _softmax,
    "ReLU": _relu,
    "LayerNormalization": _layer_norm,
    "GlobalAveragePooling1D": _pooling,
    "GlobalMaxPooling1D": _pooling,
    "InputLayer": lambda layer: [],
}
_PER_STEP = ("Dense", "Dropout", "Activation", "Softmax", "ReLU", "LayerNormalization")
