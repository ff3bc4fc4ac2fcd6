"""A layer stack as a torch module that computes the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlstm.errors import FormatError, ShapeError, UsageError
from fastlstm.nn.dropout import dropped
from fastlstm.nn.lstm import LSTM
from fastlstm.sequence.layer_stack import (
    CellWeights,
    Dense,
    Dropout,
    Embedding,
    Function,
    Layer,
    LayerNorm,
    LayerStack,
    LSTMLayer,
    Steps,
    Weights,
    pack,
    unpack,
)

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: x,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "hard_sigmoid": F.hardsigmoid,
    "hard_sigmoid_0.2": lambda x: (0.2 * x + 0.5).clamp(0.0, 1.0),
    "softsign": F.softsign,
    "softplus": F.softplus,
    "elu": F.elu,
    "selu": F.selu,
    "silu": F.silu,
    "gelu": F.gelu,
    "exponential": torch.exp,
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
}


class ImportedModel(nn.Module):
    """A model of another framework: its layers, on `fastlstm.LSTM`.

    Args:
        stack: the layers; a softmax at the end is left out, so that the outputs are logits.

    Attributes:
        layers: the layers in order; LSTMs are `fastlstm.LSTM`.
        made_by: framework that made the file, and its version.
        returns_logits: there was a softmax at the end: `softmax(-1)` gives its probabilities.
        notes: what was not taken over, and what it was read as.

    Raises:
        FormatError: widths of layers that follow each other differ.
    """

    def __init__(self, stack: LayerStack) -> None:
        super().__init__()
        check_widths(stack)
        self.made_by, self.notes = stack.made_by, stack.notes
        self.returns_logits = stack.ends_in_softmax
        self._is_time_major = stack.is_time_major
        self.layers = nn.ModuleList(_module(layer) for layer in stack.logits.layers)
        self._shape, self._masks_zero = stack.shape, stack.masks_zero
        self._answers_once = stack.answers_once
        self._reads_tokens = isinstance(stack.layers[0], Embedding)
        self.eval()

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Returns what the model returned where it was made, logits instead of a softmax.

        Args:
            x: token ids `(B, T)` of any integer dtype, or of a model without an embedding values
                `(B, T, C)`; `(T, B)` and `(T, B, C)` if it was made time-major.
            lengths: steps of each sequence, `(B,)`, of a model that answers once; the rest is
                padding. Default T.

        Returns:
            `(B, T, K)`, or `(B, K)` where only the last step has an output, or what a Reshape at
            the end makes of it.

        Raises:
            ShapeError: another shape, or token 0 in a model that leaves it out and answers at every
                step, or a sequence without other tokens.
        """
        if x.dim() != (2 if self._reads_tokens else 3):
            shape = "token ids (B, T)" if self._reads_tokens else "values (B, T, C)"
            raise ShapeError(f"the input has the shape {tuple(x.shape)}, the model reads {shape}")
        x = x.long() if self._reads_tokens else x
        x = x.transpose(0, 1) if self._is_time_major else x
        is_read = None
        if lengths is not None:
            is_read = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        if self._masks_zero and bool((x == 0).any()):
            is_read = x != 0 if is_read is None else is_read & (x != 0)
        x = self._run(x) if is_read is None else self._read_parts(x, is_read)
        if self._shape is not None:
            x = x.unflatten(-1, self._shape) if self._shape else x.squeeze(-1)
        return x.transpose(0, 1) if self._is_time_major and x.dim() == 3 else x

    def _run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def _read_parts(self, x: Tensor, is_read: Tensor) -> Tensor:
        """Returns the answers to the steps that are read, sequences with as many at once."""
        if not self._answers_once:
            raise ShapeError(
                "the input has the token 0, which this model leaves out (mask_zero): such steps are"
                " not computed here; give sequences without it"
            )
        counts = is_read.sum(1)
        if bool((counts == 0).any()):
            raise ShapeError("a sequence has no token but 0, which this model leaves out")
        answers: dict[int, Tensor] = {}
        for count in counts.unique().tolist():
            rows = counts == count
            part = x[rows][is_read[rows]].unflatten(0, (-1, count))
            answers |= zip(rows.nonzero()[:, 0].tolist(), self._run(part), strict=True)
        return torch.stack([answers[row] for row in range(len(x))])


class ImportedLSTM(nn.Module):
    """An LSTM as a layer of Keras: one output, of every step or of the last.

    Attributes:
        lstm: the weights.
    """

    def __init__(self, layer: LSTMLayer) -> None:
        super().__init__()
        self.lstm = LSTM(
            layer.input_size, layer.hidden_size, batch_first=True,
            bidirectional=layer.backward is not None,
            activation=layer.activation, recurrent_activation=layer.recurrent_activation,
        )  # fmt: skip
        set_weights(self.lstm, layer.forward, "_l0")
        if layer.backward is not None:
            set_weights(self.lstm, layer.backward, "_l0_reverse")
        self._every_step, self._reverses, self._merge = (
            layer.every_step, layer.reverses, layer.merge,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Returns `(B, T, K)` of every step, or `(B, K)` of the last."""
        outputs: Tensor
        last: Tensor
        outputs, (last, _) = self.lstm(x.flip(1) if self._reverses else x)
        if not self._every_step:
            outputs = last.transpose(0, 1).flatten(1)
        if not self.lstm.bidirectional or self._merge == "concat":
            return outputs
        first, second = outputs.chunk(2, -1)
        if self._merge == "mul":
            return first * second
        return first + second if self._merge == "sum" else (first + second) / 2


class _Function(nn.Module):
    def __init__(self, function: str) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return _FUNCTIONS[self.function](x)

    def extra_repr(self) -> str:
        return self.function


class _Steps(nn.Module):
    """One vector of `(B, T, C)`, or all of its steps from the end."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        match self.part:
            case "last":
                return x[:, -1]
            case "mean":
                return x.mean(1)
            case "max":
                return x.amax(1)
        return x.flip(1)

    def extra_repr(self) -> str:
        return self.part


class _SpatialDropout(nn.Module):
    """One mask for all steps of a sequence `(B, T, C)`."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return dropped(x, self.rate, (x.shape[0], 1, x.shape[2])) if self.training else x


def set_weights(lstm: LSTM, weights: CellWeights, suffix: str) -> None:
    """Writes weights into a layer and direction; the bias goes to `bias_ih`, `bias_hh` is zero."""
    values = {"weight_ih": weights.weight_ih, "weight_hh": weights.weight_hh}
    values["bias_ih"] = weights.bias
    with torch.no_grad():
        for name, value in values.items():
            getattr(lstm, name + suffix).copy_(as_tensor(value))
        getattr(lstm, f"bias_hh{suffix}").zero_()


def as_tensor(array: Weights) -> Tensor:
    """Returns a copy of an array as a tensor."""
    return torch.from_numpy(np.array(array, np.float32))


def _module(layer: Layer) -> nn.Module:
    module = _empty_module(layer)
    parameters: dict[str, Any] = {}
    if isinstance(layer, Embedding):
        parameters = {"weight": layer.weight}
    elif isinstance(layer, Dense | LayerNorm):
        parameters = {"weight": layer.weight, "bias": layer.bias}
    with torch.no_grad():
        for name, value in parameters.items():
            getattr(module, name).copy_(as_tensor(value))
    return module


def _empty_module(layer: Layer) -> nn.Module:
    match layer:
        case Embedding():
            return nn.Embedding(*layer.weight.shape)
        case LSTMLayer():
            return ImportedLSTM(layer)
        case Dense():
            return nn.Linear(layer.weight.shape[1], layer.weight.shape[0])
        case LayerNorm():
            return nn.LayerNorm(len(layer.weight), eps=layer.epsilon)
        case Function():
            return _Function(layer.function)
        case Dropout():
            return _SpatialDropout(layer.rate) if layer.is_spatial else nn.Dropout(layer.rate)
        case Steps():
            return _Steps(layer.part)


def check_widths(stack: LayerStack) -> tuple[int, int]:
    """Returns the columns that a model reads (1 of tokens) and writes.

    Raises:
        FormatError: a layer does not read what the one before it writes.
    """
    first: int | None = None
    width: int | None = None
    has_steps = True
    for k, layer in enumerate(stack.layers):
        reads: int | None = None
        writes: int | None = width
        match layer:
            case Embedding():
                if k:
                    raise FormatError(f"the layer '{layer.name}' is an embedding behind others")
                first, writes = 1, layer.weight.shape[1]
            case LSTMLayer():
                if not has_steps:
                    raise FormatError(
                        f"the layer '{layer.name}' is behind one that writes the last step only"
                    )
                has_steps = layer.every_step
                _check_cells(layer)
                reads, writes = layer.input_size, layer.output_size
            case Dense():
                reads, writes = layer.weight.shape[1], layer.weight.shape[0]
            case LayerNorm():
                reads = writes = len(layer.weight)
                if layer.bias.shape != layer.weight.shape:
                    raise FormatError(f"weight and bias of the layer '{layer.name}' differ in size")
            case Steps():
                if not has_steps:
                    raise FormatError(f"the layer '{layer.name}' is behind one without steps")
                if layer.part == "max" and stack.masks_zero:
                    raise FormatError(
                        f"the layer '{layer.name}' takes a maximum over steps that are masked"
                        " (mask_zero), which cannot be imported"
                    )
                has_steps = layer.part == "reversed"
            case Dropout() if layer.is_spatial and not has_steps:
                raise FormatError(f"the layer '{layer.name}' expects steps, and gets the last only")
        if reads is not None and width is not None and reads != width:
            raise FormatError(
                f"the layer '{layer.name}' reads {reads} columns, the one before it writes {width}"
            )
        first, width = first or reads, writes
    if stack.shape is not None and (has_steps or stack.is_time_major):
        raise FormatError("the Reshape at the end is behind a layer that writes at every step")
    if first is None or width is None:
        raise FormatError("the model has no layer with weights")
    return first, width


def _check_cells(layer: LSTMLayer) -> None:
    H = layer.hidden_size
    for cell in (layer.forward, layer.backward):
        if cell is None:
            continue
        shapes = cell.weight_ih.shape, cell.weight_hh.shape, cell.bias.shape
        if shapes != ((4 * H, layer.input_size), (4 * H, H), (4 * H,)):
            raise FormatError(f"the weights of the layer '{layer.name}' have the shapes {shapes}")


@dataclass(frozen=True)
class StackConfig:
    """Describes a `StackNetwork`, as `NetworkConfig` does a `SequenceNetwork`.

    Attributes:
        num_columns: C; 1 of token ids.
        num_outputs: K.
        num_tokens: V of a model that reads token ids, else 0.
        stack: of `pack`.
        has_missing: values may be missing.
    """

    num_columns: int
    num_outputs: int
    num_tokens: int
    stack: dict[str, Any]
    has_missing: bool = False


class StackNetwork(nn.Module):
    """A model of another framework in the place of a `SequenceNetwork`.

    Args:
        stack: the layers of a model that answers once; a softmax at its end is left out.

    Raises:
        FormatError: widths differ.
    """

    def __init__(self, stack: LayerStack) -> None:
        super().__init__()
        self._arrays, about = pack(stack)
        first = stack.layers[0]
        num_tokens = len(first.weight) if isinstance(first, Embedding) else 0
        self.config = StackConfig(*check_widths(stack), num_tokens, about)
        self.stack, self.model = stack, ImportedModel(stack)

    def forward(self, values: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Returns one answer per sequence; see `SequenceNetwork.forward`."""
        values = values[..., 0] if self.config.num_tokens else values
        answers: Tensor = self.model(values, lengths)
        return answers

    def stored_tensors(self) -> dict[str, Tensor]:
        """Returns what a file holds."""
        return {name: torch.from_numpy(array) for name, array in self._arrays.items()}


def restored_stack(described: dict[str, Any], tensors: Mapping[str, Tensor]) -> StackNetwork:
    """Returns the network of a described `StackConfig` and of `stored_tensors`.

    Raises:
        ValueError: the two are of different models, or not of one that answers once.
    """
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    try:
        network = StackNetwork(unpack(arrays, described["stack"])).eval()
    except (KeyError, TypeError, AttributeError, IndexError, UsageError, RuntimeError) as error:
        raise ValueError(f"no such network ({type(error).__name__}: {error})") from None
    is_same = (
        asdict(network.config) == described and network.stored_tensors().keys() == arrays.keys()
    )
    if not is_same or not network.stack.answers_once:
        raise ValueError("'network' describes another model than the weights are of")
    return network
