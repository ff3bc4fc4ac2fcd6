"""The operations a text task counts, its tokens, and what it predicts of its end."""

import math

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fastlstm
from fastlstm.errors import CorruptFileError
from fastlstm.nn import loss
from fastlstm.report.lines import outlook_text
from fastlstm.text.config import ModelConfig
from fastlstm.text.data.tokenizer import CharTokenizer
from fastlstm.text.model import LanguageModel
from fastlstm.text.task import expected_end, has_outlook, tokens_per_char, training_flop_per_token


def test_a_token_that_the_vocabulary_lacks_is_named():
    tokenizer = CharTokenizer("abc")
    assert tokens_per_char(np.array([0, 1, 2, 2], np.uint8), tokenizer) == 1.0
    with pytest.raises(CorruptFileError, match="holds token 200, its vocabulary has 3; delete"):
        tokens_per_char(np.array([0, 200], np.uint8), tokenizer)


@pytest.mark.parametrize("output_rank", [0, 7])
def test_the_flop_per_token_agree_with_the_counter_of_torch(monkeypatch, output_rank):
    monkeypatch.setattr(loss, "is_native", lambda *_: False)  # torch counts its own products only
    config = ModelConfig(11, embed_size=8, rnn_size=16, num_layers=3, output_rank=output_rank)
    model = LanguageModel(config)
    for layer in model.layers:
        layer.backend = "reference"
    tokens = torch.zeros(5, 2, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model.loss(tokens, tokens, model.initial_state(2))[0].backward()
    h0_is_fixed = 2 * 2 * 4 * 16 * 16 * 3  # no gradient to the first state of each layer
    counted = counter.get_total_flops() + h0_is_fixed
    assert training_flop_per_token(config) * 5 * 2 == counted


@pytest.mark.parametrize("drop", [0.12, 0.21, 0.3])
@pytest.mark.parametrize("share", [0.15, 0.4, 0.6, 0.9])
def test_the_end_of_a_run_like_those_measured_is_within_the_interval(drop, share):
    bits, error = expected_end(share, 1.6 * math.exp(drop * (1 - share) ** 1.5))
    assert abs(bits - 1.6) < error


def test_the_interval_shrinks_as_the_run_goes_on():
    errors = [expected_end(share, 1.6)[1] for share in (0.2, 0.5, 0.9)]
    assert errors[0] > 2 * errors[2]
    assert errors == sorted(errors, reverse=True)


def test_a_run_predicts_its_end(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 400)
    events: list[dict[str, object]] = []
    fastlstm.train(
        text, out=tmp_path / "run", steps=40, eval_every=10, rnn_size=16, embed_size=8,
        batch_size=4, seq_length=16, precision="fp32", observers=[events.append],
    )  # fmt: skip
    said = [event for event in events if event["event"] == "outlook"]
    assert [event["step"] for event in said] == [10, 20, 30]
    for event in said:
        assert event["hour_more_bits_per_char"] < event["bits_per_char"]
        assert event["error"] > 0
    assert outlook_text(said[0]).startswith("predicted final validation: ")


def test_runs_unlike_the_measured_ones_have_no_outlook():
    assert has_outlook(0.7, 0, "char")
    assert not has_outlook(0.2, 0, "char")
    assert not has_outlook(0.7, 3, "char")
    assert not has_outlook(0.7, 0, "bpe")
