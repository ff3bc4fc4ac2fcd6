"""Formats of the weights, measured."""

import numpy as np
import pytest

from fastlstm.errors import DataError
from fastlstm.text import weight_report
from fastlstm.text.data.tokenizer import CharTokenizer
from fastlstm.text.decoder import Decoder
from fastlstm.text.evaluation import evaluate
from fastlstm.text.weight_report import WeightReport, report_weights, writing_speed

TOKENIZER = CharTokenizer("\n abcdefghijklmnopqr")


@pytest.mark.parametrize("num_tokens", [2, 300, 1216, 20_000])
def test_bits_are_the_evaluators(random_model, num_tokens):
    model = random_model(num_layers=2)
    ids = np.random.default_rng(0).integers(0, 20, num_tokens).astype(np.uint8)
    report = report_weights(Decoder.of(model), TOKENIZER, ids)
    want = evaluate(model, ids, TOKENIZER)
    assert report.num_tokens == want.num_tokens == num_tokens - 1
    assert report.bits_per_char == pytest.approx(want.bits_per_char, rel=1e-5)


def test_short_texts(random_model):
    decoder = Decoder.of(random_model())
    assert report_weights(decoder, TOKENIZER, np.array([1, 2])).num_tokens == 1
    with pytest.raises(DataError, match="has 1 token, scoring needs at least 2"):
        report_weights(decoder, TOKENIZER, np.array([1]))


def test_report(random_model):
    decoder = Decoder.of(random_model(), "int8")
    report = report_weights(decoder, TOKENIZER, np.arange(2000) % 20)
    assert report.weight_format == "int8"
    assert report.bytes_per_token == decoder.bytes_per_token
    assert report.tokens_per_s > 1000
    line = WeightReport("int8", 1_140_000, 200e3, 1.6100, 99_936).compared(
        WeightReport("fp32", 4_470_000, 20e3, 1.6097, 99_936)
    )
    assert line == (
        "int8: 1.14 MB of weights a token instead of 4.47 (fp32), 10.0x the speed, +0.02 %"
        " bits/char (1.6097 to 1.6100 on 99,936 tokens)"
    )


def test_the_speed_is_measured_as_long_as_was_said(random_model, monkeypatch):
    runs = []
    decoder, run = Decoder.of(random_model()), Decoder.run

    def counted(*args):
        runs.append(args)
        return run(*args)

    monkeypatch.setattr(Decoder, "run", counted)
    assert writing_speed(decoder, seconds=0.0) > 0
    monkeypatch.setattr(weight_report, "_SPEED_S", 0.0)  # as for every test: many measure models
    assert writing_speed(decoder) > 0
    assert len(runs) == 4, "of both the first steps, that are not timed, and the least that are"
