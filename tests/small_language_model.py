"""A small language model to store and load."""

import torch

from fastlstm.text.config import ModelConfig
from fastlstm.text.data.tokenizer import CharTokenizer
from fastlstm.text.model import LanguageModel

CONFIG = ModelConfig(vocab_size=4, embed_size=3, rnn_size=5, num_layers=2)
TOKENIZER = CharTokenizer("\nabc")


def build(config=CONFIG, seed=0):
    torch.manual_seed(seed)
    return LanguageModel(config)


def assert_same(model, expected):
    for (name, got), (other, want) in zip(
        model.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert name == other
        assert got.dtype == torch.float32
        assert got.requires_grad
        assert torch.equal(got, want), name
