"""A network that reads a sequence and answers once: numbers, or scores of classes.

::

    values (B, T, C) ──linear──► LSTM, one way or both ──► last state or mean ──linear──► (B, K)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlstm.nn.linear import Linear
from fastlstm.nn.lstm import LSTM
from fastlstm.sequence.config import ARCHITECTURE_BOUNDS, Architecture
from fastlstm.system.fields import check_values


@dataclass(frozen=True, kw_only=True)
class NetworkConfig(Architecture):
    """Architecture of a `SequenceNetwork` of C columns and K outputs, numbers or classes.

    With `has_missing` values may be missing (NaN), which adds a mask to the input.
    """

    num_columns: int
    num_outputs: int
    has_missing: bool = False

    def __post_init__(self) -> None:
        sizes = dict.fromkeys(("num_columns", "num_outputs"), (1, 10**6))
        check_values(self, {**ARCHITECTURE_BOUNDS, **sizes})


class SequenceNetwork(nn.Module):
    """The network of a `config`."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        H, directions = config.hidden_size, 2 if config.bidirectional else 1
        self.embed = Linear(config.num_columns * (1 + config.has_missing), config.embed_size)
        self.lstm = LSTM(
            config.embed_size, H, config.num_layers, bidirectional=config.bidirectional
        )
        self.dropout = nn.Dropout(config.dropout)
        self.head = Linear(directions * H, config.num_outputs)

    def forward(self, values: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Returns one answer per sequence, shape ``(B, K)``.

        Args:
            values: shape ``(B, T, C)``; missing values are NaN.
            lengths: steps of each sequence, 1 to T, shape ``(B,)``; the rest is padding without
                effect. Default: T.
        """
        steps = values.transpose(0, 1)
        if self.config.has_missing:
            steps = torch.cat([steps.nan_to_num(0.0), (~steps.isnan()).to(steps)], -1)
        read, (hidden, _) = self.lstm(F.relu(self.embed(steps)), lengths=lengths)
        if self.config.pooling == "mean":  # outputs of padding are zero
            count = len(steps) if lengths is None else lengths[:, None]
            pooled = read.sum(0) / count
        else:
            pooled = torch.cat(list(hidden[-2 if self.config.bidirectional else -1 :]), -1)
        answered: Tensor = self.head(self.dropout(pooled))
        return answered


def flop_per_step(config: NetworkConfig) -> int:
    """Returns the operations of the forward pass per step of a sequence."""
    H, d, ways = config.hidden_size, config.embed_size, 2 if config.bidirectional else 1
    layers = 8 * H * (d + H) + (config.num_layers - 1) * 8 * H * (ways * H + H)
    return 2 * config.num_columns * (1 + config.has_missing) * d + ways * layers
