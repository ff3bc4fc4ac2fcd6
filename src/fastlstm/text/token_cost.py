"""Floating-point operations and bytes of one token of a language model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastlstm.text.config import ModelConfig


def inference_flop_per_token(config: ModelConfig) -> int:
    """Returns the operations of a language model's forward pass per token.

    The embedding is a row gather and counts nothing.
    """
    E, H, V, L = config.embed_size, config.rnn_size, config.vocab_size, config.num_layers
    layers = 8 * H * (E + H) + (L - 1) * 8 * H * (H + H)
    return layers + 2 * (H * config.output_rank + config.output_width * V)


def training_flop_per_token(config: ModelConfig) -> int:
    """Returns the operations of a training step per token: three times the forward pass."""
    return 3 * inference_flop_per_token(config)
