"""`Ready`: a small inference call made ready once, for loops that step a layer token by token.

Checking a call, packing weights and choosing kernels costs more than a step of a small layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fastlstm import hardware
from fastlstm.ops import native_call
from fastlstm.ops.native_call import Sequence
from fastlstm.ops.sequence import is_traced

if TYPE_CHECKING:
    from torch import nn

    State = tuple[Tensor, Tensor]

_MAX_ROWS = 64
"""With more steps times lanes than this the checks cost nothing beside the work."""


class _Weight(NamedTuple):
    """A parameter as it was when the call was made ready.

    Holding the memory keeps its address from being given to another tensor's values.
    """

    name: str
    tensor: Tensor
    memory: torch.UntypedStorage
    address: int
    version: int


class Ready:
    """A float32 call of one layer in one direction, of one shape, without gradients.

    Pickles and deep-copies as None: it belongs to the very tensors it was made of.
    """

    def __init__(self, layer: nn.LSTM, shape: torch.Size) -> None:
        weights = layer._parameters
        names = layer._all_weights[0]
        self.shape, self.hidden = shape, layer.hidden_size
        self.batch_first = layer.batch_first
        B, T = shape[:2] if layer.batch_first else (shape[1], shape[0])
        self.state_shape = (1, B, self.hidden)
        self.threads = torch.get_num_threads()
        kernel = native_call.kernels(hardware.cpu().isa, False)
        zero = native_call.empty((B, self.hidden)).zero_()
        w_ih, w_hh, *biases = (weights[n] for n in names)
        b_ih, b_hh = biases or (None, None)
        assert w_ih is not None
        assert w_hh is not None
        I = shape[2]  # noqa: E741
        s = Sequence(zero.new_empty(T, B, I), None, zero, zero, w_ih, w_hh, b_ih, b_hh)
        threads = native_call.num_threads(B, I, self.hidden)
        self.packed = native_call.packed_forward(s, kernel, threads)
        self.weights = [
            _Weight(n, w, w.untyped_storage(), w.data_ptr(), w._version)
            for n, w in ((n, weights[n]) for n in names)
            if w is not None
        ]
        self.zero = zero
        self.run = kernel.forward
        self.sizes = (threads, T, B, I, self.hidden)
        self.middle = (T * B, I, 0, self.packed.data_ptr())

    def __reduce__(self) -> Any:
        return type(None), ()

    def call(self, layer: nn.LSTM, x: Tensor, hx: State | None) -> tuple[Tensor, State] | None:
        """Returns output and state, or None where anything is not as it was."""
        if (
            x.shape != self.shape
            or layer.batch_first != self.batch_first
            or x.dtype is not torch.float32
            or not x.is_cpu
            or not x.is_contiguous()
            or self.threads != torch.get_num_threads()
            or torch.is_autocast_enabled("cpu")
            or is_traced(x)
        ):
            return None
        parameters = layer._parameters
        for name, tensor, _, address, version in self.weights:
            w = parameters.get(name)
            if w is not tensor or w.data_ptr() != address or w._version != version:
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
                    or t.dtype is not torch.float32
                    or not t.is_cpu
                    or not t.is_contiguous()
                ):
                    return None
        y = native_call.empty((self.shape[0], self.shape[1], self.hidden))
        h, c = native_call.empty(self.state_shape), native_call.empty(self.state_shape)
        self.run(
            *self.sizes, x.data_ptr(), *self.middle,
            h0.data_ptr(), c0.data_ptr(), 0, 0, 0,
            y.data_ptr(), h.data_ptr(), c.data_ptr(), 0, 0, 0,
        )  # fmt: skip
        return y, (h, c)


def can_be_ready(layer: nn.LSTM, x: Tensor) -> bool:
    """Whether a call of this shape gains from being made ready, and can be."""
    names = layer._all_weights[0]
    return (
        layer.num_layers == 1
        and not layer.bidirectional
        and layer.proj_size == 0
        and x.dim() == 3
        and 0 < x.shape[0] * x.shape[1] <= _MAX_ROWS
        and (not layer.batch_first or 1 in x.shape[:2])
        and not is_traced(x, *(layer._parameters.get(n) for n in names))
        and all(
            (w := layer._parameters.get(n)) is not None
            and w.dtype is torch.float32
            and w.is_cpu
            and not w.is_inference()
            and not w.is_shared()
            for n in names
        )
    )
