"""Operation counts, against torch's own counter."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from fastlstm.nn import loss
from fastlstm.ops.call import LSTMCall
from fastlstm.ops.cost import lstm_cost
from fastlstm.text.config import ModelConfig
from fastlstm.text.model import LanguageModel
from fastlstm.text.token_cost import (
    inference_flop_per_token,
    training_flop_per_token,
)


def test_flop_of_a_call_is_what_the_reference_runs(ops):
    from fastlstm.ops.lstm import lstm

    args = ops.make(5, 3, 8, 16).copy(torch.float32, ())
    call = LSTMCall(T=5, B=3, I=8, H=16, dtype=torch.float32, device="cpu", requires_grad=False)
    with FlopCounterMode(display=False) as counter:
        lstm(*args.list(), backend="reference")
    assert lstm_cost(call).flop == counter.get_total_flops()


def test_flop_per_token_is_what_a_model_runs(monkeypatch):
    monkeypatch.setattr(loss, "is_native", lambda *_: False)  # torch counts its own products only
    config = ModelConfig(vocab_size=11, embed_size=8, rnn_size=16, num_layers=3)
    model = LanguageModel(config)
    for layer in model.layers:
        layer.backend = "reference"
    tokens = torch.zeros(5, 2, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model.loss(tokens, tokens, model.initial_state(2))[0].backward()
    h0_is_fixed = 2 * 2 * 4 * 16 * 16 * 3  # no gradient to the first state of each layer
    counted = counter.get_total_flops() + h0_is_fixed
    assert training_flop_per_token(config) * 5 * 2 == counted
    assert training_flop_per_token(config) == 3 * inference_flop_per_token(config)


def test_bytes():
    infer = LSTMCall(T=2, B=3, I=4, H=5, dtype=torch.float32, device="cpu", requires_grad=False)
    assert lstm_cost(infer).bytes == 4 * (20 * 11 + 6 * 9)
    gates = 6 * 20  # written by the forward pass and read by the backward pass
    train = infer._replace(requires_grad=True)
    assert lstm_cost(train).bytes == 3 * lstm_cost(infer).bytes + 4 * 2 * gates
