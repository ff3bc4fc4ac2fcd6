"""A `LayerStack` as a torch module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import is_tensor_like

from fastlstm.errors import FormatError, ShapeError, UsageError, kind_of_value
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
    # of the steps `(B, T, C)`
    "last": lambda x: x[:, -1],
    "mean": lambda x: x.mean(1),
    "max": lambda x: x.amax(1),
    "reversed": lambda x: x.flip(1),
}


class ImportedModel(nn.Module):
    """A model of another framework, computed by `fastlstm.LSTM` and torch's layers.

    Args:
        stack: the layers; a softmax at the end is left out, so the outputs are logits.

    Attributes:
        layers: the layers in order.
        made_by: framework and version that wrote the file.
        is_time_major: the time axis comes first, not second.
        returns_logits: the model ended in a softmax; `softmax(-1)` returns its probabilities.
        notes: parts that were not imported, or imported as something else.

    Raises:
        FormatError: a layer does not read the width that the layer before it writes.
    """

    def __init__(self, stack: LayerStack) -> None:
        super().__init__()
        check_widths(stack)
        self.made_by, self.notes = stack.made_by, stack.notes
        self.returns_logits = stack.ends_in_softmax
        self.is_time_major = stack.is_time_major
        self.layers = nn.ModuleList(_module(layer) for layer in stack.logits.layers)
        self._shape, self._masks_zero = stack.shape, stack.masks_zero
        self._answers_once = stack.answers_once
        self._reads_tokens = isinstance(stack.layers[0], Embedding)
        self.eval()

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Returns the outputs of the original model, with logits instead of a final softmax.

        Args:
            x: token ids `(B, T)` of any integer dtype, or values `(B, T, C)` for a model without an
                embedding; `(T, B)` and `(T, B, C)` for a time-major model.
            lengths: steps of each sequence, `(B,)`, for a model that answers once; the rest is
                padding. Default: T.

        Returns:
            `(B, T, K)`, or `(B, K)` if only the last step has an output, reshaped if the model ends
            in a Reshape.

        Raises:
            ShapeError: no tensor or another shape; token 0 in a model that masks it and answers at
                every step, or `lengths` for one; the mean of a sequence without steps.
        """
        shape = "token ids (B, T)" if self._reads_tokens else "values (B, T, C)"
        if not is_tensor_like(x):
            raise ShapeError(
                f"the input is {kind_of_value(x)}, expected {shape}; torch.as_tensor makes a tensor"
                " of it"
            )
        if x.ndim != (2 if self._reads_tokens else 3):
            raise ShapeError(f"the input has shape {tuple(x.shape)}, expected {shape}")
        x = x.long() if self._reads_tokens else x
        x = x.transpose(0, 1) if self.is_time_major else x
        is_read = None
        if lengths is not None:
            if not self._answers_once:
                raise ShapeError(
                    "`lengths` is for a model that answers once, and this one answers at every"
                    " step: give sequences of one length per call, without `lengths`"
                )
            is_read = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        if self._masks_zero and bool((x == 0).any()):
            is_read = x != 0 if is_read is None else is_read & (x != 0)
        x = self._run(x) if is_read is None else self._read_parts(x, is_read)
        if self._shape is not None:
            x = x.reshape(x.shape[0], *self._shape)
        return x.transpose(0, 1) if self.is_time_major and x.ndim == 3 else x

    def _run(self, x: Tensor, has_steps: bool = True) -> Tensor:
        for layer in self.layers:
            if not has_steps and isinstance(layer, _Function) and layer.function == "mean":
                raise ShapeError(
                    "the model takes the mean of a sequence without steps: leave it out"
                )
            x = layer(x)
            x = x if has_steps or not isinstance(layer, ImportedLSTM) else torch.zeros_like(x)
        return x

    def _read_parts(self, x: Tensor, is_read: Tensor) -> Tensor:
        """Returns the answers with masked steps left out; computes sequences of one length at
        once. Without a step the outputs of an LSTM are 0, as in Keras."""
        if not self._answers_once:
            raise ShapeError(
                "the input has token 0, which this model masks (mask_zero), and the model answers"
                " at every step: give sequences without token 0"
            )
        counts = is_read.sum(1)
        answers: dict[int, Tensor] = {}
        for count in counts.unique().tolist():
            rows = counts == count
            part = x[rows][is_read[rows]].unflatten(0, (-1, count)) if count else x[rows][:, :1]
            found = self._run(part, has_steps=count > 0)
            answers |= zip(rows.nonzero()[:, 0].tolist(), found, strict=True)
        return torch.stack([answers[row] for row in range(len(x))])


class ImportedLSTM(nn.Module):
    """An LSTM with the interface of Keras: one output, of every step or of the last."""

    def __init__(self, layer: LSTMLayer) -> None:
        super().__init__()
        self.lstm = LSTM(
            layer.input_size, layer.hidden_size, batch_first=True,
            bidirectional=layer.backward is not None,
            activation=layer.activation, recurrent_activation=layer.recurrent_activation,
        )  # fmt: skip
        state = dict[str, Tensor]()
        for cell, suffix in ((layer.forward, "_l0"), (layer.backward, "_l0_reverse")):
            if cell is not None:
                own = _tensors(cell)
                bias = own.pop("bias")
                own |= {"bias_ih": bias, "bias_hh": torch.zeros_like(bias)}
                state |= {name + suffix: tensor for name, tensor in own.items()}
        self.lstm.load_state_dict(state)
        self._every_step, self._reverses = layer.every_step, layer.reverses
        self._merge = layer.merge

    def forward(self, x: Tensor) -> Tensor:
        """Returns `(B, T, K)` for every step, or `(B, K)` for the last."""
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


class _SpatialDropout(nn.Module):
    """One mask for all steps of a sequence `(B, T, C)`."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return dropped(x, self.rate, (x.shape[0], 1, x.shape[2])) if self.training else x


def _tensors(part: CellWeights | Layer) -> dict[str, Tensor]:
    """Returns float32 copies of the arrays of a layer, by name."""
    arrays = ((n, value) for n, value in vars(part).items() if isinstance(value, np.ndarray))
    return {name: torch.from_numpy(np.array(array, np.float32)) for name, array in arrays}


def _module(layer: Layer) -> nn.Module:
    module: nn.Embedding | nn.Linear | nn.LayerNorm
    match layer:
        case Embedding():
            module = nn.Embedding(*layer.weight.shape)
        case Dense():
            module = nn.Linear(layer.weight.shape[1], layer.weight.shape[0])
        case LayerNorm():
            module = nn.LayerNorm(len(layer.weight), eps=layer.epsilon)
        case LSTMLayer():
            return ImportedLSTM(layer)
        case Function():
            return _Function(layer.function)
        case Dropout():
            return _SpatialDropout(layer.rate) if layer.is_spatial else nn.Dropout(layer.rate)
        case Steps():
            return _Function(layer.part)
    module.load_state_dict(_tensors(layer))
    return module


def check_widths(stack: LayerStack) -> tuple[int, int]:
    """Returns the columns that a model reads (1 for tokens) and writes. Raises FormatError: a layer
    does not read what the layer before it writes."""
    first: int | None = None
    width: int | None = None
    has_steps = True
    for k, layer in enumerate(stack.layers):
        reads: int | None = None
        writes: int | None = width
        match layer:
            case Embedding():
                if k:
                    raise FormatError(f"the embedding '{layer.name}' is not the first layer")
                first, writes = 1, layer.weight.shape[1]
            case LSTMLayer():
                if not has_steps:
                    raise FormatError(
                        f"the layer '{layer.name}' follows a layer that writes only the last step"
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
                    raise FormatError(f"the layer '{layer.name}' follows a layer without steps")
                if layer.part == "max" and stack.masks_zero:
                    raise FormatError(
                        f"the layer '{layer.name}' takes a maximum over steps that are masked"
                        " (mask_zero), which cannot be imported"
                    )
                has_steps = layer.part == "reversed"
            case Dropout() if layer.is_spatial and not has_steps:
                raise FormatError(f"the layer '{layer.name}' expects steps, but gets only the last")
        if reads is not None and width is not None and reads != width:
            raise FormatError(
                f"the layer '{layer.name}' reads {reads} columns, but the layer before it writes"
                f" {width}"
            )
        first, width = first or reads, writes
    if stack.shape is not None and (has_steps or stack.is_time_major):
        raise FormatError("the Reshape at the end follows a layer that writes every step")
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
    """Describes a `StackNetwork`, as `NetworkConfig` describes a `SequenceNetwork`.

    A model of token ids has 1 column and V tokens, others have 0 tokens; `stack` is made by `pack`.
    """

    num_columns: int
    num_outputs: int
    num_tokens: int
    stack: dict[str, Any]
    has_missing: bool = False


class StackNetwork(nn.Module):
    """A model of another framework with the interface of a `SequenceNetwork`.

    The model answers once; a softmax at its end is left out. Raises FormatError: a layer does not
    read the width that the layer before it writes.
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
        """Returns the tensors for model.safetensors."""
        return {name: torch.from_numpy(array) for name, array in self._arrays.items()}


def restored_stack(described: dict[str, Any], tensors: Mapping[str, Tensor]) -> StackNetwork:
    """Returns the network of a described `StackConfig` and its `stored_tensors`. Raises ValueError:
    the two contradict each other, or the model does not answer once."""
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    try:
        network = StackNetwork(unpack(arrays, described["stack"])).eval()
    except (KeyError, TypeError, AttributeError, IndexError, UsageError, RuntimeError) as error:
        raise ValueError(f"no such network ({type(error).__name__}: {error})") from None
    is_same = (
        asdict(network.config) == described and network.stored_tensors().keys() == arrays.keys()
    )
    if not is_same or not network.stack.answers_once:
        raise ValueError("'network' and the weights are of different models")
    return network
