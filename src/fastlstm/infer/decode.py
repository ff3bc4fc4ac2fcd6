"""One token at a time on the CPU, without nn.LSTM: weights laid out once, nothing allocated.

The first layer needs no input product: its input is an embedding row, so `E @ W_ih^T + b` is a
table of V rows made once. What remains per token is one matrix-vector product per layer, the gates,
and the output projection. Memory per stream is constant.

A step runs on one thread. On two idle cores a second would make it three times as fast, since each
half of the weights fits its core's L2 (H=512: 45 us against 145 us for the product); on busy cores
the threads wait for each other at every product and a step takes 4 ms instead of 0.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from fastlstm.nn.language_model import LanguageModel
from fastlstm.nn.lstm import LSTMLayer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

MAX_TABLE_ELEMENTS = 1 << 25
"""A larger first-layer table (128 MB) is not made; its rows are computed when needed."""
PROMPT_CHUNK = 1024


class Decoder:
    """A model's weights laid out for decoding; any number of streams share it.

    Copies the weights at construction, to the CPU in float32, wherever the model lives; later
    changes of the model are not seen.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._config = model.config
        with torch.no_grad():
            self._layers = [_pack(layer) for layer in model.layers]
            self._embedding = _copy(model.embedding.weight)
            self._norms = [(_copy(n.weight), _copy(n.bias)) for n in model.norms]
            self._w_out, self._b_out = _copy(model.output_weight), _copy(model.output.bias)
            first = self._layers[0]
            is_small = self._embedding.shape[0] * first.bias.shape[0] <= MAX_TABLE_ELEMENTS
            self._table = first.bias + self._embedding @ first.w_ih.t() if is_small else None

    def begin(self, tokens: Sequence[int] | NDArray[Any]) -> Stream:
        """Returns a stream that has read `tokens`, at least one; its `logits` predict the next.

        The prompt runs through the sequence kernel, in chunks; only the last token is a step.
        """
        stream = Stream(self, self._config.num_layers, self._config.rnn_size, self._b_out.shape[0])
        if len(tokens) > 1:
            stream.load(self._read(torch.from_numpy(np.array(tokens[:-1], dtype=np.int64))))
        stream.step(int(tokens[-1]))
        return stream

    def _read(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        model, was_training = self._model, self._model.training
        device = model.output.bias.device
        model.eval()
        try:
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                state = model.initial_state(1)
                for part in tokens.to(device).split(PROMPT_CHUNK):
                    _, state = model.features(part.unsqueeze(1), state)
        finally:
            model.train(was_training)
        return state

    def advance(self, stream: Stream, token: int) -> None:
        """Reads one token: updates the stream's `h`, `c` and `logits` in place."""
        H, y = self._config.rnn_size, None
        gates, tanh_c = stream.gates, stream.tanh_c
        for k, layer in enumerate(self._layers):
            h, c = stream.h[k], stream.c[k]
            if y is not None:
                torch.addmv(layer.bias, layer.w_ih, y, out=stream.drive)
                drive = stream.drive
            elif self._table is not None:
                drive = self._table[token]
            else:
                torch.addmv(layer.bias, layer.w_ih, self._embedding[token], out=stream.drive)
                drive = stream.drive
            torch.addmv(drive, layer.w_hh, h, out=gates)
            gates[: 3 * H].sigmoid_()
            gates[3 * H :].tanh_()
            c.mul_(gates[H : 2 * H]).addcmul_(gates[:H], gates[3 * H :])
            torch.tanh(c, out=tanh_c)
            torch.mul(gates[2 * H : 3 * H], tanh_c, out=h)
            y = self._between(k, h, self._embedding[token] if y is None else y)
        assert y is not None
        torch.addmv(self._b_out, self._w_out, y, out=stream.logits_tensor)

    def _between(self, k: int, h: Tensor, x: Tensor) -> Tensor:
        """Layer norm and residual of layer `k`, as the model has them."""
        y = h
        if self._config.layer_norm:
            weight, bias = self._norms[k]
            y = functional.layer_norm(h, (h.shape[0],), weight, bias)
        if self._config.residual and x.shape == y.shape:
            y = x + y
        return y


class Stream:
    """One text being written: the state after its last token, and the logits of the next.

    Attributes:
        logits: `(V,)` float32, overwritten by every `step`.
    """

    def __init__(
        self, decoder: Decoder, num_layers: int, hidden_size: int, vocab_size: int
    ) -> None:
        self._decoder = decoder
        self.h = [torch.zeros(hidden_size) for _ in range(num_layers)]
        self.c = [torch.zeros(hidden_size) for _ in range(num_layers)]
        self.gates, self.drive = torch.empty(4 * hidden_size), torch.empty(4 * hidden_size)
        self.tanh_c, self.logits_tensor = torch.empty(hidden_size), torch.empty(vocab_size)
        self.logits: NDArray[np.float32] = self.logits_tensor.numpy()

    def load(self, state: tuple[Tensor, Tensor]) -> None:
        """Takes over a model's state `(L, 1, H)`."""
        for k, (h, c) in enumerate(zip(*state, strict=True)):
            self.h[k].copy_(h[0])
            self.c[k].copy_(c[0])

    def step(self, token: int) -> NDArray[np.float32]:
        """Reads one token and returns `logits`; on one thread, whatever torch is set to."""
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            self._decoder.advance(self, token)
        finally:
            torch.set_num_threads(num_threads)
        return self.logits


@dataclass(frozen=True)
class _PackedLayer:
    """Gates in the order i, f, o, g: the three sigmoids side by side."""

    w_ih: Tensor
    w_hh: Tensor
    bias: Tensor


def _pack(layer: torch.nn.Module) -> _PackedLayer:
    assert isinstance(layer, LSTMLayer)
    H = layer.hidden_size

    def reorder(w: Tensor) -> Tensor:
        i, f, g, o = _copy(w).split(H)
        return torch.cat([i, f, o, g])

    bias = layer.bias_ih_l0 + layer.bias_hh_l0
    return _PackedLayer(reorder(layer.weight_ih_l0), reorder(layer.weight_hh_l0), reorder(bias))


def _copy(w: Any) -> Tensor:
    tensor: Tensor = w.detach().to("cpu", torch.float32, copy=True)
    return tensor
