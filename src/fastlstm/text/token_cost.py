"""Floating-point operations and bytes of one token of a language model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastlstm.text.config import ModelConfig


def layer_flop_per_token(config: ModelConfig, k: int) -> int:
    """Returns the operations of the forward pass of layer k, from 0, per token."""
    H = config.rnn_size
    return 8 * H * ((config.embed_size if k == 0 else H) + H)


def output_flop_per_token(config: ModelConfig) -> int:
    """Returns the operations of the output layer, with its projection if there is one, per token"""
    return 2 * (config.rnn_size * config.output_rank + config.output_width * config.vocab_size)


def inference_flop_per_token(config: ModelConfig) -> int:
    """Returns the operations of the forward pass per token; the embedding, a gather, counts
    nothing."""
    layers = sum(layer_flop_per_token(config, k) for k in range(config.num_layers))
    return layers + output_flop_per_token(config)


def training_flop_per_token(config: ModelConfig) -> int:
    """Returns the operations of a training step per token: three times the forward pass."""
    return 3 * inference_flop_per_token(config)
