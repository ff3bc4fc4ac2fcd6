"""The language model: embedding, LSTM layers, output with a chunked loss; initialization."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fastlstm.errors import ShapeError
from fastlstm.nn.dropout import WeightDrop, dropped
from fastlstm.nn.linear import linear
from fastlstm.nn.loss import projected_cross_entropy, projected_nats
from fastlstm.nn.lstm import LSTM
from fastlstm.ops.cell_options import CellOptions
from fastlstm.ops.cuda.embedding import embedding

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from fastlstm.text.config import ModelConfig

EMBEDDING_SHARE = 1 / 3
"""Dropout on embeddings relative to the rest: a lost character costs more than a lost feature."""

State = tuple[torch.Tensor, torch.Tensor]
"""`(h, c)`, each `(L, B, H)` float32."""


class OutputProjection(nn.Module):
    """Holds `weight` `(V, F)`, unless it is tied to the embedding, and `bias` `(V,)`."""

    weight: nn.Parameter | None

    def __init__(self, num_features: int, vocab_size: int, *, tied: bool) -> None:
        super().__init__()
        weight = None if tied else nn.Parameter(torch.empty(vocab_size, num_features))
        self.register_parameter("weight", weight)
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        if weight is not None:
            nn.init.normal_(weight, std=num_features**-0.5)


class LanguageModel(nn.Module):
    """Predicts the next token from the ones before it.

    Parameters: `embedding.weight` `(V, E)`; `layers.<k>.weight_ih_l0`, `weight_hh_l0`,
    `bias_ih_l0`, `bias_hh_l0` and the weights that options of the cell add (`fastlstm.LSTM`);
    `norms.<k>.weight`, `.bias` with output norm; `projection.weight` `(R, H)` with an output rank;
    `output.weight` `(V, F)`, where F is R or H (if tied, the embedding takes its place);
    `output.bias` `(V,)`. A new model has torch's random weights; `initialize` draws weights that
    train well.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        E, H, V = config.embed_size, config.rnn_size, config.vocab_size
        self.config = config
        self.embedding = nn.Embedding(V, E)
        self.layers = nn.ModuleList(
            _layer(E if k == 0 else H, config) for k in range(config.num_layers)
        )
        num_norms = config.num_layers if config.output_norm else 0
        self.norms = nn.ModuleList(nn.LayerNorm(H) for _ in range(num_norms))
        rank = config.output_rank
        self.projection = nn.Linear(H, rank, bias=False) if rank else None
        self.output = OutputProjection(config.output_width, V, tied=config.tie_weights)

    @property
    def output_weight(self) -> Tensor:
        """`(V, F)`: the output matrix, which is the embedding when tied."""
        return self.embedding.weight if self.output.weight is None else self.output.weight

    @property
    def num_parameters(self) -> int:
        """Number of trained values."""
        return sum(p.numel() for p in self.parameters())

    @property
    def strict_kernels(self) -> bool:
        """Whether a slow kernel is a KernelError; set it to change every layer."""
        return any(bool(layer.strict) for layer in self.layers)

    @strict_kernels.setter
    def strict_kernels(self, value: bool) -> None:
        for layer in self.layers:
            assert isinstance(layer, LSTM)
            layer.strict = value

    def initial_state(self, B: int, device: torch.device | str | None = None) -> State:
        """Returns the zero state `(h, c)`, each `(L, B, H)` float32, or float64."""
        weight = self.output.bias
        shape = (self.config.num_layers, B, self.config.rnn_size)
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        h = torch.zeros(shape, dtype=dtype, device=weight.device if device is None else device)
        return h, h.clone()

    def features(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Computes everything before the output matrix, attached to the graph.

        Tokens are `(T, B)` int64. The state `(h, c)`, each `(L, B, H)`, is not modified. Returns
        features `(T, B, F)` and the state after the last token; raises ShapeError for other shapes.
        """
        _check(tokens, state, self.config)
        x, hs, cs = tokens, [], []
        for k in range(self.config.num_layers):
            x, h, c = self.run_layer(k, x, state[0][k], state[1][k])
            hs.append(h)
            cs.append(c)
        return self.projected(x), (torch.stack(hs), torch.stack(cs))

    def run_layer(self, k: int, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Runs layer k with its embedding, norm, residual and dropout.

        x is tokens `(T, B)` for the first layer, else `(T, B, H)`; h and c are `(B, H)`. Returns
        the output `(T, B, H)` and the new state.
        """
        layer, table = self.layers[k], None
        assert isinstance(layer, LSTM)
        if k == 0:
            # Tokens go into the layer as they are: its kernel gathers instead of multiplying.
            if self.config.residual:
                x = self._drop(F.embedding(x, self.embedding.weight), EMBEDDING_SHARE)
            elif self.training and self.config.dropout > 0:
                x = self._drop(embedding(x, self.embedding.weight), EMBEDDING_SHARE)
            else:
                table = self.embedding.weight
        y, h, c = layer.run(x, h, c, embedding=table)
        if self.config.output_norm:
            norm = self.norms[k]
            assert isinstance(norm, nn.LayerNorm)
            y = norm(y.to(norm.weight.dtype))
        if self.config.residual and x.shape == y.shape:
            y = x + y
        return self._drop(y), h, c

    def projected(self, y: Tensor) -> Tensor:
        """Returns the features `(T, B, F)` of the output of the last layer."""
        return y if self.projection is None else linear(y, self.projection.weight)

    def logits(self, features: Tensor) -> Tensor:
        """Returns `features @ output_weight^T + bias`: `(…, F)` to `(…, V)`."""
        return linear(features, self.output_weight, self.output.bias)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Returns logits `(T, B, V)` and the new state; `state=None` starts from zero."""
        state = self.initial_state(tokens.shape[1]) if state is None else state
        features, state = self.features(tokens, state)
        return self.logits(features), state

    def loss(self, tokens: Tensor, targets: Tensor, state: State) -> tuple[Tensor, State]:
        """Returns the summed cross-entropy of `targets` in nats (float32 scalar) and the new state.

        Tokens and targets (the token after each one) are `(T, B)` int64; h and c are `(L, B, H)`.
        """
        features, state = self.features(tokens, state)
        return self.features_loss(features, targets), state

    def features_loss(self, features: Tensor, targets: Tensor) -> Tensor:
        """Returns the summed cross-entropy in nats of `targets` `(T, B)`, from `(T, B, F)`."""
        return projected_cross_entropy(
            features.flatten(0, 1), self.output_weight, self.output.bias, targets.reshape(-1)
        )

    def token_nats(self, tokens: Tensor, targets: Tensor, state: State) -> tuple[Tensor, State]:
        """Works like `loss`, but returns `(T, B)` nats, one per target, without a gradient."""
        with torch.no_grad():
            features, state = self.features(tokens, state)
            nats = projected_nats(
                features.flatten(0, 1), self.output_weight, self.output.bias, targets.reshape(-1)
            )
        return nats.view(targets.shape), state

    def _drop(self, x: Tensor, share: float = 1.0) -> Tensor:
        p = self.config.dropout * share
        if not self.training or p == 0.0:
            return x
        T = 1 if self.config.dropout_kind == "variational" else x.shape[0]
        return dropped(x, p, (T, x.shape[1], x.shape[2]))


def _layer(input_size: int, config: ModelConfig) -> LSTM:
    layer = LSTM(input_size, config.rnn_size, options=CellOptions.of(config))
    layer.is_drop_in = False  # `run` is called
    if config.weight_drop > 0:
        layer.weight_hook = WeightDrop(config.weight_drop)
    return layer


def reset_state(state: State, reset: Tensor) -> State:
    """Returns `state` with zeros in the lanes where `reset`, `(B,)` bool, is True."""
    keep = reset.to(state[0].device).logical_not()[None, :, None]
    return state[0] * keep, state[1] * keep


def _check(tokens: Tensor, state: State, config: ModelConfig) -> None:
    if tokens.dim() != 2 or tokens.dtype != torch.int64 or tokens.shape[0] == 0:
        raise ShapeError(
            f"tokens are {tokens.dtype} {tuple(tokens.shape)}, expected int64 (T, B) with T >= 1"
        )
    expected = (config.num_layers, tokens.shape[1], config.rnn_size)
    for name, value in zip("hc", state, strict=True):
        if tuple(value.shape) != expected:
            raise ShapeError(
                f"state {name} has shape {tuple(value.shape)}, tokens {tuple(tokens.shape)} need"
                f" (L, B, H) = {expected}; start from initial_state({tokens.shape[1]})"
            )


@torch.no_grad()
def initialize(
    model: LanguageModel, token_counts: NDArray[np.integer] | None = None, seed: int = 0
) -> None:
    """Fills every parameter, from `seed` alone; the global random generator is not touched.

    Embeddings are N(0, 1), tied ones N(0, 1/H). Each gate is drawn separately: input weights are
    Xavier, recurrent weights orthogonal. The forget bias is 1, other biases 0. Output weights are
    N(0, 1/H). With an output rank they are N(0, 1/R), and the projection before them is N(0, 1/H).
    The output bias is the log of the smoothed frequencies of the tokens (`token_counts` `(V,)` in
    the training text), so that the first loss is the unigram entropy and not log V.
    """
    generator = torch.Generator().manual_seed(seed)
    H = model.config.rnn_size
    _fill_normal(model.embedding.weight, H**-0.5 if model.config.tie_weights else 1.0, generator)
    for layer in model.layers:
        assert isinstance(layer, LSTM)
        _initialize_layer(layer, generator)
    for norm in model.norms:
        assert isinstance(norm, nn.LayerNorm)
        norm.reset_parameters()
    if model.output.weight is not None:
        _fill_normal(model.output.weight, model.config.output_width**-0.5, generator)
    if model.projection is not None:
        _fill_normal(model.projection.weight, H**-0.5, generator)
    model.output.bias.zero_()
    if token_counts is not None:
        counts = np.asarray(token_counts, dtype=np.float64)
        share = (counts + 1.0) / (counts.sum() + model.config.vocab_size)
        model.output.bias.copy_(torch.from_numpy(np.log(share)).float())


def _initialize_layer(layer: LSTM, generator: torch.Generator) -> None:
    H = layer.hidden_size
    for start in range(0, 4 * H, H):
        for weight, fill in (
            (layer.weight_ih_l0, nn.init.xavier_uniform_),
            (layer.weight_hh_l0, nn.init.orthogonal_),
        ):
            drawn = torch.empty(H, weight.shape[1])
            weight[start : start + H].copy_(fill(drawn, generator=generator))
    layer.bias_ih_l0.zero_()
    layer.bias_ih_l0[H : 2 * H] = 1.0  # the forget gate
    layer.bias_hh_l0.zero_()
    layer.reset_norms()


def _fill_normal(weight: torch.Tensor, std: float, generator: torch.Generator) -> None:
    weight.copy_(torch.empty(weight.shape).normal_(0.0, std, generator=generator))
