"""The cell of an LSTM layer of Keras 1, 2 or 3, and of CuDNNLSTM: its weights and activations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastlstm.errors import FormatError
from fastlstm.exchange.keras_activation import activation_of, unknown_activation
from fastlstm.ops.cell_options import ACTIVATIONS
from fastlstm.sequence.layer_stack import CellWeights

if TYPE_CHECKING:
    from fastlstm.exchange.keras_layers import KerasLayer
    from fastlstm.sequence.layer_stack import Weights

_HARD_SIGMOID_SCALE = 1.2
"""clip(0.2 x + 0.5) of Keras 1 and 2 is clip(y / 6 + 0.5), Keras 3's and ours, at y = 1.2 x."""


def cell_of(layer: KerasLayer) -> tuple[CellWeights, dict[str, Any]]:
    """Returns the weights of an LSTM and its activations by the names of `LSTMLayer`."""
    _note_dropout(layer)
    if layer.is_set("stateful"):
        layer.notes.append(
            f"'{layer.name}' is stateful: here the state starts at zero in each call"
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
        weights = CellWeights(
            np.ascontiguousarray(kernel.T), np.ascontiguousarray(recurrent.T), bias
        )
    activation = activation_of(layer, "activation", "tanh")
    default = "hard_sigmoid" if layer.version < 2 else "sigmoid"
    name = "inner_activation" if "inner_activation" in layer.config else "recurrent_activation"
    gates = activation_of(layer, name, default)
    for setting, value in (("activation", activation), (name, gates)):
        if value not in ACTIVATIONS:
            raise unknown_activation(layer, setting, value, ACTIVATIONS)
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


def _keras_1_weights(layer: KerasLayer, H: int) -> CellWeights:
    """Returns weights stored as twelve arrays: W, U and b of the gates i, c, f, o."""
    gates: dict[str, tuple[Weights, Weights, Weights]] = {}
    for gate in "icfo":
        kernel = layer.take(f"W_{gate}", None, H)
        gates[gate] = kernel, layer.take(f"U_{gate}", H, H), layer.take(f"b_{gate}", H)
    if len({kernel.shape for kernel, _, _ in gates.values()}) > 1:
        raise FormatError(f"the kernels of the layer '{layer.name}' have different widths")
    W, U, b = zip(*(gates[gate] for gate in "ifco"), strict=True)
    join = [np.concatenate([part.T for part in parts]) for parts in (W, U)]
    return CellWeights(join[0], join[1], np.concatenate(b))


def _cudnn_weights(layer: KerasLayer, H: int) -> CellWeights:
    """Returns weights stored as cuDNN reads them: every gate transposed, two biases."""
    kernel = layer.take("kernel", None, 4 * H)
    recurrent = layer.take("recurrent kernel", H, 4 * H)
    biases = layer.take("bias", 8 * H)
    # Of each gate `(I, H)` the memory is that of `(H, I)`, and the recurrent one is not transposed.
    parts = [part.reshape(H, -1) for part in np.split(kernel, 4, axis=1)]
    hidden = np.concatenate(np.split(recurrent, 4, axis=1))
    return CellWeights(np.concatenate(parts), hidden, biases[: 4 * H] + biases[4 * H :])


def _steeper(weights: CellWeights, H: int) -> CellWeights:
    """Returns weights whose gates, in the hard sigmoid of Keras 3, are those of Keras 1 and 2."""
    scale = np.full(4 * H, _HARD_SIGMOID_SCALE, np.float32)
    scale[2 * H : 3 * H] = 1.0  # the candidate
    column = scale[:, None]
    return CellWeights(weights.weight_ih * column, weights.weight_hh * column, weights.bias * scale)
