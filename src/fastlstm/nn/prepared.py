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
    """A call of one layer in one direction, of one shape and dtype, with or without gradients.

    Weights are float32, matrix operands float32 or, under autocast, bfloat16. A prepared call
    belongs to its tensors, so pickles and copies leave it out.
    """

    def __init__(self, layer: nn.LSTM, weights: LSTMWeights, x: Tensor) -> None:
        shape = self.shape = x.shape
        H = layer.hidden_size
        self.dtype = compute_dtype(x)
        self.batch_first = layer.batch_first
        self.is_turned = layer.batch_first and 1 not in shape[:2]
        B, T = shape[:2] if layer.batch_first else (shape[1], shape[0])
        I = shape[2]  # noqa: E741
        self.state_shape = (1, B, H)
        self.threads = torch.get_num_threads()
        with torch.inference_mode(False):  # autograd saves it
            self.zero = kernels.empty((B, H)).zero_()
        self.names = layer._all_weights[0]
        self.weights = _described(weights)
        has_bias = weights.b_ih is not None
        self.training_call = LSTMCall(T, B, I, H, self.dtype, "cpu", True, has_bias)
        self.sizes = (kernels.num_threads(B, I, H), T, B, I, H)
        self.packed: Packed | None = None

    def call(self, layer: nn.LSTM, x: Tensor, hx: State | None) -> tuple[Tensor, State] | None:
        """Returns output and state, or None after any change."""
        weights: list[Any] = layer._flat_weights  # some programs write to that list
        if (
            is_traced(x, *weights)
            or x.shape != self.shape
            or layer.batch_first != self.batch_first
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
            h0, c0 = h0[0], c0[0]
        if torch.is_grad_enabled() and any(t.requires_grad for t in (x, h0, c0, *weights)):
            return self._train(x, h0, c0, weights)
        return self._infer(x, h0, c0, weights)

    def _train(
        self, x: Tensor, h0: Tensor, c0: Tensor, weights: list[Any]
    ) -> tuple[Tensor, State] | None:
        if _described(weights) != self.weights:
            return None
        self.packed = None
        rows = x.transpose(0, 1).contiguous() if self.batch_first else x
        args = LSTMArgs(rows, None, h0, c0, *LSTMWeights(*weights))
        y, h, c = LSTMFunction.apply(self.training_call, *args)  # type: ignore[no-untyped-call]
        y = y.transpose(0, 1) if self.batch_first else y
        return y, (torch.stack((h,)).to(self.dtype), torch.stack((c,)).to(self.dtype))

    def _infer(
        self, x: Tensor, h0: Tensor, c0: Tensor, weights: list[Any]
    ) -> tuple[Tensor, State] | None:
        threads, T, B, I, H = self.sizes  # noqa: E741
        is_bf16 = self.dtype is torch.bfloat16
        ready = self.packed  # a copy: another thread may train
        if ready is None:
            if _described(weights) != self.weights:
                return None
            kernel = kernels.fastest_kernels(is_bf16)
            args = LSTMArgs(x, None, self.zero, self.zero, *LSTMWeights(*weights))
            ready = self.packed = packed(args, kernel, threads)
        elif not ready.is_still(weights, threads):
            return None
        if self.is_turned:
            x = x.transpose(0, 1)
        x = kernels.elements(x, is_bf16)
        if is_bf16:
            h0, c0 = h0.float(), c0.float()
        y = kernels.empty((T, B, H) if self.is_turned else (*self.shape[:2], H), self.dtype)
        h, c = kernels.empty(self.state_shape), kernels.empty(self.state_shape)
        with kernels.profiled("fastlstm::lstm", x):
            ready.kernel.forward(threads, threads, (
                T, B, I, H, 0,
                x.data_ptr(), T * B, kernels.padded_columns(I, is_bf16), 0,
                ready.memory.data_ptr(), h0.data_ptr(), c0.data_ptr(), 0, 0, 0,
                y.data_ptr(), H, h.data_ptr(), c.data_ptr(), 0, 0, 0,
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
    names = layer._all_weights[0]
    return (
        layer.num_layers == 1
        and not layer.bidirectional
        and layer.proj_size == 0
        and x.dim() == 3
        and 0 < x.shape[0] * x.shape[1] <= _MAX_ROWS
        and is_plain(x, compute_dtype(x))
        and not is_traced(x, *(layer._parameters.get(n) for n in names))
        and all(
            (w := layer._parameters.get(n)) is not None and w.dtype is torch.float32 and w.is_cpu
            for n in names
        )
    )
