"""`PreparedCall`: a call of a small layer, prepared once for loops over tokens or short batches.

For a small layer, checks, packing and the choice of a kernel cost more than a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn

from fastlstm.ops import kernels
from fastlstm.ops.autograd import LSTMFunction
from fastlstm.ops.call import LSTMArgs, LSTMCall, LSTMWeights, compute_dtype
from fastlstm.ops.custom_op import is_traced
from fastlstm.ops.packed_weights import Packed, packed

State = tuple[Tensor, Tensor]

_MAX_ROWS = 4096
"""Most steps times lanes: the checks of a larger call cost little beside its work."""


class PreparedCall:
    """A call of layers in one direction, of one shape and dtype, with or without gradients.

    Weights are float32, matrix operands float32 or, under autocast, bfloat16. A prepared call
    belongs to its tensors, so pickles and copies leave it out.
    """

    def __init__(self, layer: nn.LSTM, weights: list[LSTMWeights], x: Tensor) -> None:
        shape = self.shape = x.shape
        H = layer.hidden_size
        self.dtype = compute_dtype(x)
        self.batch_first = layer.batch_first
        self.is_turned = layer.batch_first and 1 not in shape[:2]
        B, T = shape[:2] if layer.batch_first else (shape[1], shape[0])
        self.state_shape = (layer.num_layers, B, H)
        self.threads = torch.get_num_threads()
        with torch.inference_mode(False):  # autograd saves it
            self.zero = kernels.empty(self.state_shape).zero_()
        self.names = [name for names in layer._all_weights for name in names]
        self.weights = _described(w for own in weights for w in own)
        self.bias = weights[0].b_ih is not None
        widths = [shape[2], *[H] * (layer.num_layers - 1)]
        self.training_calls = [
            LSTMCall(T, B, width, H, self.dtype, "cpu", True, self.bias) for width in widths
        ]
        self.layers = [(kernels.num_threads(B, width, H), width) for width in widths]
        self.sizes = (T, B, H)
        self.packed: list[Packed] | None = None

    def call(self, layer: nn.LSTM, x: Tensor, hx: State | None) -> tuple[Tensor, State] | None:
        """Returns output and state, or None after any change."""
        weights: list[Any] = layer._flat_weights  # some programs write to that list
        if (
            is_traced(x, *weights)
            or x.shape != self.shape
            or layer.batch_first != self.batch_first
            or drops_between_layers(layer)
            or not x.is_cpu
            or not is_plain(x, self.dtype)
            or not x.is_contiguous()
            or self.threads != torch.get_num_threads()
        ):
            return None
        if any(map(is_not, map(layer._parameters.get, self.names), weights)):
            return None
        if hx is None:
            h0 = c0 = self.zero
        elif type(hx) is not tuple or len(hx) != 2:
            return None
        else:
            h0, c0 = hx
            for t in hx:
                if (
                    type(t) is not Tensor
                    or t.shape != self.state_shape
                    or t.dtype not in (torch.float32, self.dtype)
                    or not t.is_cpu
                    or not t.is_contiguous()
                ):
                    return None
        if torch.is_grad_enabled() and any(t.requires_grad for t in (x, h0, c0, *weights)):
            return self._train(x, h0, c0, weights)
        return self._infer(x, h0, c0, weights)

    def _train(
        self, x: Tensor, h0: Tensor, c0: Tensor, weights: list[Any]
    ) -> tuple[Tensor, State] | None:
        if _described(weights) != self.weights:
            return None
        self.packed = None
        y, last = x.transpose(0, 1).contiguous() if self.batch_first else x, []
        for k, own in enumerate(self._by_layer(weights)):
            args, call = LSTMArgs(y, None, h0[k], c0[k], *own), self.training_calls[k]
            y, *state = LSTMFunction.apply(call, *args)  # type: ignore[no-untyped-call]
            last.append(state)
        y = y.transpose(0, 1) if self.batch_first else y
        h, c = (torch.stack(states).to(self.dtype) for states in zip(*last, strict=True))
        return y, (h, c)

    def _by_layer(self, weights: list[Any]) -> list[LSTMWeights]:
        num = 4 if self.bias else 2
        return [LSTMWeights(*weights[at : at + num]) for at in range(0, len(weights), num)]

    def _infer(
        self, x: Tensor, h0: Tensor, c0: Tensor, weights: list[Any]
    ) -> tuple[Tensor, State] | None:
        T, B, H = self.sizes
        is_bf16 = self.dtype is torch.bfloat16
        ready = self.packed  # a copy: another thread may train
        if ready is None:
            if _described(weights) != self.weights:
                return None
            kernel = kernels.fastest_kernels(is_bf16)
            ready, state = [], self.zero[0]
            for k, own in enumerate(self._by_layer(weights)):
                args = LSTMArgs(self.zero if k else x, None, state, state, *own)  # sizes count
                ready.append(packed(args, kernel, self.layers[k][0]))
            self.packed = ready
        else:
            num = len(weights) // len(ready)
            for k, known in enumerate(ready):
                if not known.is_still(weights[k * num : (k + 1) * num], self.layers[k][0]):
                    return None
        y = x.transpose(0, 1) if self.is_turned else x
        if is_bf16:
            h0, c0 = h0.float(), c0.float()
        h, c = kernels.empty(self.state_shape), kernels.empty(self.state_shape)
        for k, (threads, I) in enumerate(self.layers):  # noqa: E741
            x, at = kernels.elements(y, is_bf16), k * B * H * h.itemsize
            y = kernels.empty((T, B, H) if self.is_turned else (*self.shape[:2], H), self.dtype)
            with kernels.profiled("fastlstm::lstm", x):
                ready[k].kernel.forward(threads, threads, (
                    T, B, I, H, 0,
                    x.data_ptr(), T * B, kernels.padded_columns(I, is_bf16), 0,
                    ready[k].memory.data_ptr(), h0.data_ptr() + at, c0.data_ptr() + at, 0, 0, 0,
                    y.data_ptr(), H, h.data_ptr() + at, c.data_ptr() + at, 0, 0, 0,
                ))  # fmt: skip
        y = y.transpose(0, 1) if self.is_turned else y
        return y, (h.to(self.dtype), c.to(self.dtype)) if is_bf16 else (h, c)


def _described(weights: Iterable[Tensor | None]) -> list[tuple[Any, ...]]:
    return [(w.shape, w.dtype, w.device) for w in weights if w is not None]


def is_plain(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether a layer of float32 weights computes this input in `dtype`, float32 or autocast's
    bf16."""
    if dtype is torch.float32:
        return x.dtype is torch.float32 and not torch.is_autocast_enabled("cpu")
    return (
        dtype is torch.bfloat16
        and x.dtype in (torch.float32, torch.bfloat16)
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") is dtype
    )


def can_prepare(layer: nn.LSTM, x: Tensor) -> bool:
    """Whether a call of this shape can be prepared, and is small enough."""
    if layer.bidirectional or drops_between_layers(layer) or layer.proj_size != 0:
        return False
    names = [name for row in layer._all_weights for name in row]
    return (
        x.dim() == 3
        and 0 < x.shape[0] * x.shape[1] <= _MAX_ROWS
        and is_plain(x, compute_dtype(x))
        and not is_traced(x, *(layer._parameters.get(n) for n in names))
        and all(
            (w := layer._parameters.get(n)) is not None and w.dtype is torch.float32 and w.is_cpu
            for n in names
        )
    )


def drops_between_layers(layer: nn.LSTM) -> bool:
    """Whether a call of the layer draws dropout."""
    return layer.training and layer.dropout > 0 and layer.num_layers > 1
