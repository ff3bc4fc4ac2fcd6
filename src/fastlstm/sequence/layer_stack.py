"""`LayerStack`: a model from another framework as plain layers with NumPy weights.

Weights are float32 in torch's layout: `(4H, I)` with gates in the order i, f, g, o. Activations
have the names of `fastlstm.ops.cell_options`; more functions are possible after a Dense layer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fastlstm.ops.cell_options import Activation

Weights = NDArray[np.float32]
Merge = Literal["concat", "sum", "ave", "mul"]

FUNCTIONS = (
    *("linear", "relu", "tanh", "sigmoid", "hard_sigmoid", "hard_sigmoid_0.2", "softsign"),
    *("softplus", "elu", "selu", "silu", "gelu", "exponential", "softmax", "log_softmax"),
)
"""Functions after a layer. `hard_sigmoid` is clip(x / 6 + 0.5), `hard_sigmoid_0.2` (Keras 1 and 2)
is clip(0.2 x + 0.5)."""


@dataclass(frozen=True)
class Embedding:
    """A table `(V, E)` of vectors, whose input is token ids; with `masks_zero` the following layers
    leave out steps with token 0."""

    name: str
    weight: Weights
    masks_zero: bool = False


@dataclass(frozen=True)
class CellWeights:
    """One LSTM in one direction: `weight_ih` `(4H, I)`, `weight_hh` `(4H, H)`, `bias` `(4H,)`."""

    weight_ih: Weights
    weight_hh: Weights
    bias: Weights


@dataclass(frozen=True)
class LSTMLayer:
    """An LSTM in one or both directions.

    Attributes:
        forward: weights of the only, or first, direction.
        backward: weights of the second direction, or None.
        merge: how the outputs of both directions are combined.
        every_step: return the output of every step, not only of the last.
        reverses: read the sequence from its end and write in that order; one direction only.
        activation: function of candidate and cell.
        recurrent_activation: function of the gates.
    """

    name: str
    forward: CellWeights
    backward: CellWeights | None = None
    merge: Merge = "concat"
    every_step: bool = True
    reverses: bool = False
    activation: Activation = "tanh"
    recurrent_activation: Activation = "sigmoid"

    @property
    def input_size(self) -> int:
        """I, columns of a step."""
        return int(self.forward.weight_ih.shape[1])

    @property
    def hidden_size(self) -> int:
        """H, hidden units of each direction."""
        return int(self.forward.weight_hh.shape[1])

    @property
    def output_size(self) -> int:
        """Columns of the output."""
        return self.hidden_size * (2 if self.backward is not None and self.merge == "concat" else 1)


@dataclass(frozen=True)
class Dense:
    """A linear layer for every step: `weight` `(K, F)`, `bias` `(K,)`."""

    name: str
    weight: Weights
    bias: Weights


@dataclass(frozen=True)
class Function:
    """One of `FUNCTIONS`, elementwise or over the last axis."""

    name: str
    function: str


@dataclass(frozen=True)
class LayerNorm:
    """Layer normalization over the last axis: `weight`, `bias` `(F,)`, `epsilon`."""

    name: str
    weight: Weights
    bias: Weights
    epsilon: float


@dataclass(frozen=True)
class Dropout:
    """Dropout in training; `is_spatial`: one mask for all steps of a sequence."""

    name: str
    rate: float
    is_spatial: bool = False


@dataclass(frozen=True)
class Steps:
    """Reduces the steps to one vector, or reverses them."""

    name: str
    part: Literal["last", "mean", "max", "reversed"]


Layer = Embedding | LSTMLayer | Dense | Function | LayerNorm | Dropout | Steps


@dataclass(frozen=True)
class LayerStack:
    """A model: its layers in order.

    Attributes:
        made_by: framework and version, to show to the user.
        window: steps of the input that the model was built for, or None.
        is_time_major: the time axis comes first, not second.
        shape: output shape for one sequence if the model ends in a Reshape or Squeeze of Keras.
    """

    layers: tuple[Layer, ...]
    made_by: str
    window: int | None = None
    is_time_major: bool = False
    notes: tuple[str, ...] = ()
    shape: tuple[int, ...] | None = None

    @property
    def answers_once(self) -> bool:
        """Whether the model returns one vector per sequence."""
        return any(
            (isinstance(layer, LSTMLayer) and not layer.every_step)
            or (isinstance(layer, Steps) and layer.part != "reversed")
            for layer in self.layers
        )

    @property
    def masks_zero(self) -> bool:
        """Whether the model leaves out steps with token 0."""
        first = self.layers[0] if self.layers else None
        return isinstance(first, Embedding) and first.masks_zero

    @property
    def logits(self) -> LayerStack:
        """The stack without a final softmax."""
        return replace(self, layers=self.layers[:-1]) if self.ends_in_softmax else self

    @property
    def ends_in_softmax(self) -> bool:
        """Whether the last layer is a softmax or log-softmax."""
        last = self.layers[-1] if self.layers else None
        return isinstance(last, Function) and last.function in ("softmax", "log_softmax")


Arrays = dict[str, NDArray[Any]]
_KINDS = {kind.__name__: kind for kind in get_args(Layer)}


def pack(stack: LayerStack) -> tuple[Arrays, dict[str, Any]]:
    """Returns the arrays of a stack by name, and everything else as JSON values."""
    arrays: Arrays = {}
    layers = [
        {"kind": type(layer).__name__, **_packed(layer, str(k), arrays)}
        for k, layer in enumerate(stack.layers)
    ]
    return arrays, {**vars(replace(stack, layers=())), "layers": layers, "notes": [*stack.notes]}


def unpack(arrays: Arrays, about: dict[str, Any]) -> LayerStack:
    """Returns the stack from the results of `pack`; raises KeyError or TypeError for others."""
    layers = []
    for k, item in enumerate(about["layers"]):
        kind = _KINDS[item["kind"]]
        layers.append(kind(**_unpacked(kind, item, str(k), arrays)))
    return LayerStack(**{**about, "layers": tuple(layers), "notes": tuple(about["notes"])})


def _packed(part: Any, prefix: str, arrays: Arrays) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, value in vars(part).items():
        if isinstance(value, np.ndarray):
            arrays[f"{prefix}.{name}"] = np.ascontiguousarray(value, np.float32)
        elif isinstance(value, CellWeights):
            _packed(value, f"{prefix}.{name}", arrays)
        else:
            plain[name] = value
    return plain


def _unpacked(kind: Any, item: dict[str, Any], prefix: str, arrays: Arrays) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in (field.name for field in fields(kind)):
        path = f"{prefix}.{name}"
        if path in arrays:
            found[name] = arrays[path]
        elif f"{path}.weight_ih" in arrays:
            names = [field.name for field in fields(CellWeights)]
            found[name] = CellWeights(**{n: arrays[f"{path}.{n}"] for n in names})
        elif name in item:
            found[name] = item[name]
    return found
