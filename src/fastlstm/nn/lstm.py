"""One LSTM layer as a module: torch's parameter names, computed by `ops.lstm`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fastlstm.ops.call import LSTMWeights
from fastlstm.ops.lstm import lstm, lstm_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from fastlstm.ops.call import LSTMOutput


class LSTMLayer(nn.LSTM):
    """A single-layer `nn.LSTM` that holds the parameters; the op layer chooses who computes.

    Being an `nn.LSTM`, it keeps torch's names and, on CUDA, cuDNN's flat weight buffer.

    Attributes:
        strict: a slow kernel is a KernelError.
        backend: name of the backend to force, or None for the best.
        is_drop_in: False: torch's own forward pass never runs it.
    """

    is_drop_in = False
    weight_ih_l0: nn.Parameter
    weight_hh_l0: nn.Parameter
    bias_ih_l0: nn.Parameter
    bias_hh_l0: nn.Parameter

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size)
        self.strict = False
        self.backend: str | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Same as `run`."""
        return self.run(*args, **kwargs)

    def run(
        self,
        x: Tensor,
        h0: Tensor,
        c0: Tensor,
        *,
        w_hh: Tensor | None = None,
        embedding: Tensor | None = None,
    ) -> LSTMOutput:
        """Runs `x` `(T, B, I)` from `h0`, `c0` `(B, H)`.

        Args:
            x: input; with `embedding`, `(T, B)` int64 rows of it.
            h0: initial output.
            c0: initial cell.
            w_hh: recurrent weights to use instead of the parameter (DropConnect).
            embedding: `(V, I)`, when `x` holds tokens.

        Returns:
            `y` `(T, B, H)`, `hT` and `cT` `(B, H)`.
        """
        weights = LSTMWeights(
            self.weight_ih_l0,
            self.weight_hh_l0 if w_hh is None else w_hh,
            self.bias_ih_l0,
            self.bias_hh_l0,
        )
        if embedding is None:
            return lstm(x, h0, c0, *weights, backend=self.backend, strict=self.strict)
        return lstm_tokens(x, embedding, h0, c0, *weights, backend=self.backend, strict=self.strict)


def dropped(
    x: Tensor, p: float, mask_shape: tuple[int, ...], generator: torch.Generator | None
) -> Tensor:
    """Inverted dropout: zeroes with probability `p` by a mask of `mask_shape` (it broadcasts)."""
    mask = torch.empty(mask_shape, dtype=x.dtype, device=x.device)
    mask.bernoulli_(1.0 - p, generator=generator).div_(1.0 - p)
    return x * mask
