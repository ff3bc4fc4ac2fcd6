"""Operations per token of a language model, against torch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fastlstm.nn import loss
from fastlstm.text.config import ModelConfig
from fastlstm.text.model import LanguageModel
from fastlstm.text.task import training_flop_per_token


@pytest.mark.parametrize("output_rank", [0, 7])
def test_flop_per_token_is_what_a_model_runs(monkeypatch, output_rank):
    monkeypatch.setattr(loss, "is_native", lambda *_: False)  # torch counts its own products only
    sizes = {"vocab_size": 11, "embed_size": 8, "rnn_size": 16, "num_layers": 3}
    config = ModelConfig(**sizes, output_rank=output_rank)
    model = LanguageModel(config)
    for layer in model.layers:
        layer.backend = "reference"
    tokens = torch.zeros(5, 2, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model.loss(tokens, tokens, model.initial_state(2))[0].backward()
    h0_is_fixed = 2 * 2 * 4 * 16 * 16 * 3  # no gradient to the first state of each layer
    counted = counter.get_total_flops() + h0_is_fixed
    assert training_flop_per_token(config) * 5 * 2 == counted
