"""Initial weights that make an LSTM language model learn fast."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from fastlstm.errors import ShapeError
from fastlstm.nn.lstm import LSTM

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from fastlstm.text.config import Initializer
    from fastlstm.text.model import LanguageModel

FORGET_BIAS = 1.0


@torch.no_grad()
def initialize(
    model: LanguageModel,
    token_counts: NDArray[np.integer] | None = None,
    seed: int = 0,
    initializer: Initializer = "xavier_orthogonal",
) -> None:
    """Fills every parameter; the global random generator is not touched.

    Embeddings N(0, 1) (tied ones N(0, 1/H)); LSTM weights by `initializer`, gate by gate; layer
    norms 1 and 0; forget bias 1 in `bias_ih_l0`, `bias_hh_l0` zero; output weights N(0, 1/H), with
    an output rank N(0, 1/R) behind a projection N(0, 1/H); output bias the log of the smoothed
    unigram frequencies, so that the first loss is the unigram entropy and not log V.

    The values depend on `seed` alone, whatever the device. `token_counts` `(V,)` is how often each
    token occurs in the training text.

    Raises:
        ShapeError: token_counts of another length than the vocabulary.
    """
    generator = torch.Generator().manual_seed(seed)
    H = model.config.rnn_size
    _fill_normal(model.embedding.weight, H**-0.5 if model.config.tie_weights else 1.0, generator)
    for layer in model.layers:
        assert isinstance(layer, LSTM)
        _initialize_layer(layer, generator, initializer)
    for norm in model.norms:
        assert isinstance(norm, nn.LayerNorm)
        norm.reset_parameters()
    if model.output.weight is not None:
        _fill_normal(model.output.weight, model.config.output_width**-0.5, generator)
    if model.projection is not None:
        _fill_normal(model.projection.weight, H**-0.5, generator)
    model.output.bias.zero_()
    if token_counts is not None:
        counts, V = np.asarray(token_counts, dtype=np.float64), model.config.vocab_size
        if counts.shape != (V,):
            raise ShapeError(
                f"token_counts has shape {counts.shape}, expected ({V},), one per token"
            )
        share = (counts + 1.0) / (counts.sum() + V)
        model.output.bias.copy_(torch.from_numpy(np.log(share)).float())


def _initialize_layer(layer: LSTM, generator: torch.Generator, initializer: Initializer) -> None:
    H = layer.hidden_size
    for gate in range(4):
        rows = slice(gate * H, (gate + 1) * H)
        weights = layer.weight_ih_l0, layer.weight_hh_l0
        for weight, fill in zip(weights, _FILLS[initializer], strict=True):
            drawn = torch.empty(H, weight.shape[1])
            fill(drawn, generator=generator)
            weight[rows].copy_(drawn)
    layer.bias_ih_l0.zero_()
    layer.bias_ih_l0[H : 2 * H] = FORGET_BIAS
    layer.bias_hh_l0.zero_()
    layer.reset_norms()


def _uniform(weight: torch.Tensor, *, generator: torch.Generator) -> None:
    bound = len(weight) ** -0.5
    weight.uniform_(-bound, bound, generator=generator)


_FILLS: dict[str, tuple[Callable[..., object], ...]] = {
    "xavier_orthogonal": (nn.init.xavier_uniform_, nn.init.orthogonal_),
    "xavier": (nn.init.xavier_uniform_,) * 2,
    "orthogonal": (nn.init.orthogonal_,) * 2,
    "torch": (_uniform,) * 2,
}
"""How a gate of the input and of the recurrent weights is drawn."""


def _fill_normal(weight: torch.Tensor, std: float, generator: torch.Generator) -> None:
    weight.copy_(torch.empty(weight.shape).normal_(0.0, std, generator=generator))
