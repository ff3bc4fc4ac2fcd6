import time

import numpy as np
import pytest
import torch

from fastlstm.errors import ConfigError, DataError
from fastlstm.system import measurements
from fastlstm.text import size_plan
from fastlstm.text.config import TrainConfig
from fastlstm.text.data.tokenizer import ByteTokenizer
from fastlstm.text.plan import (
    choose_seq_length,
    default_dropout,
    fit_batch,
    resolve,
    tokens_of_budget,
)
from fastlstm.training.precision import PrecisionChoice

pytestmark = pytest.mark.isa


def test_a_long_text_keeps_the_batch():
    config = TrainConfig(seq_length=128)
    assert fit_batch(config, 10**6) == (config, ())


def test_a_short_text_gets_fewer_lanes_and_says_so():
    config, notes = fit_batch(TrainConfig(batch_size=64, seq_length=128, accumulate=4), 5_000)
    assert (5_000 - 1) // (config.batch_size * config.accumulate * config.seq_length) >= 8
    assert config.accumulate == 1
    assert "batch 64 -> " in notes[0]
    assert "sequence length" not in notes[0], "it stays 128"
    with pytest.raises(DataError, match="give a text at least 50 times as long"):
        fit_batch(TrainConfig(seq_length=128), 5)


def test_dropout_grows_with_the_number_of_epochs():
    values = [default_dropout(e, 1.4) for e in (0.1, 1, 3, 8, 15, 100)]
    assert values[0] == 0
    assert values == sorted(values)


def test_dropout_grows_with_the_parameters_per_token():
    assert default_dropout(7, 1.4) == 0.3
    assert default_dropout(7, 3.3) == 0.4
    assert default_dropout(7, 0.3) == 0.0
    assert default_dropout(1.0, 100) == 0.0


def test_more_layers_get_less_dropout_each():
    one, two, three = (default_dropout(7, 1.4, num_layers=n) for n in (1, 2, 3))
    assert one == 0.3
    assert two == three == 0.1


def test_what_is_read_very_often_gets_more_dropout():
    values = [default_dropout(epochs, 1.4) for epochs in (20, 50, 100, 1000)]
    assert values == [0.4, 0.5, 0.6, 0.6]
    assert [default_dropout(epochs, 3.0, num_layers=2) for epochs in (10, 25, 40, 60)] == [
        0.2, 0.25, 0.3, 0.35,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("epochs", "parameters", "tokens", "best"),
    [(2, 957_000, 300_000, 0.0), (8, 249_000, 300_000, 0.05), (8, 372_000, 300_000, 0.1),
     (12, 519_000, 300_000, 0.15), (16, 249_000, 300_000, 0.15), (8, 1_440_000, 300_000, 0.2),
     (16, 957_000, 300_000, 0.2), (32, 957_000, 300_000, 0.3), (64, 249_000, 300_000, 0.2),
     (64, 372_000, 300_000, 0.25), (12.4, 519_000, 418_000, 0.15)],
)  # fmt: skip
def test_the_dropout_of_two_layers_is_the_measured_best(epochs, parameters, tokens, best):
    """War and Peace and python-docs: the best of those tried in the log, or between two as good."""
    assert default_dropout(epochs, parameters / tokens, parameters, 2) == best


def test_small_models_get_less_dropout():
    assert default_dropout(23, 1.2, 214_078) == 0.3
    assert default_dropout(23, 1.2, 1_400_000) == 0.4
    assert default_dropout(5, 1.2, 214_078) == default_dropout(5, 1.2, 1_400_000) == 0.2


def choose(monkeypatch, **times):
    """Returns the choice on the CPU where a pass takes so many seconds in each precision."""
    monkeypatch.setattr(size_plan, "pass_seconds", lambda m, f, name, d: times[name])
    monkeypatch.setattr(measurements, "recall", lambda kind, of: None)
    return time_precision("auto")


def time_precision(asked):
    config = TrainConfig(precision=asked, seq_length=8, batch_size=2, embed_size=8, rnn_size=16)
    ids = np.zeros(1000, np.uint8)
    return size_plan._precision(config, torch.device("cpu"), ids, ByteTokenizer())


@pytest.mark.parametrize("isa", ["avx512_bf16", "amx_bf16"])
@pytest.mark.parametrize(
    ("full", "half", "expected"), [(3.0, 1.0, "bf16"), (1.0, 1.0, "fp32"), (1.0, 3.0, "fp32")]
)
def test_precision_is_the_faster_one_with_its_measurement(
    monkeypatch, on_cpu, isa, full, half, expected
):
    on_cpu(isa)
    choice = choose(monkeypatch, fp32=full, bf16=half)
    assert choice.name == expected
    assert "ms in fp32" in choice.why


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"])
def test_a_cpu_without_bf16_trains_in_fp32(monkeypatch, on_cpu, isa):
    on_cpu(isa)
    choice = choose(monkeypatch, fp32=3.0)
    assert (choice.name, choice.why) == ("fp32", "this CPU has no bf16 instructions")


def test_timing_leaves_random_numbers_alone(monkeypatch):
    monkeypatch.setattr(measurements, "recall", lambda kind, of: None)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    time_precision("auto")
    assert torch.equal(torch.rand(3), expected)


def test_gpu_precisions_are_refused_on_the_cpu():
    for name in ("fp16", "tf32"):
        with pytest.raises(ConfigError, match=f"`precision='{name}'` needs an NVIDIA GPU"):
            time_precision(name)


def test_evaluations_take_about_a_twentieth_of_the_work():
    config = TrainConfig(steps=10_000, precision="fp32", batch_size=8, seq_length=16)
    resolved, notes = resolve(config, "fp32", 0.0, torch.device("cpu"), 10**6, 50_000, 7800, 10**6)
    every = resolved.eval_every
    assert 50_000 * 0.7 / (every * 8 * 16) <= 0.05
    assert resolved.dropout is not None
    expected = "about 1.28 epochs, 1.00 parameters per training token"
    assert notes == (f"dropout {resolved.dropout:g}: {expected}",)


def test_a_narrow_output_needs_no_dropout_that_is_given():
    config = TrainConfig(steps=100, seq_length=16, output_rank=8, rnn_size=24)
    resolved, _ = resolve(config, "fp32", 0.0, torch.device("cpu"), 10**6, 50_000, 7800, 10**6)
    assert resolved.dropout is not None


def test_short_runs_get_short_sequences():
    precision = PrecisionChoice("bf16", "as asked", 0.13)

    def length(**fields):
        config = TrainConfig(**fields)
        tokens = tokens_of_budget(config, precision, time.perf_counter())
        return choose_seq_length(config, tokens, 10**6).seq_length

    assert (length(budget="20s"), length(budget="20m")) == (64, 128)
    assert (length(epochs=1), length(epochs=5)) == (64, 128)
    assert (length(steps=100), length(steps=5000)) == (64, 128)
    assert length(budget="20s", seq_length=100) == 100
