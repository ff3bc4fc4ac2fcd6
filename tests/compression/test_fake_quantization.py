"""Quantization-aware training: the rounding of files, in torch, and where it is used."""

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

from fastlstm.compression.fake_quantization import FakeQuantization, fake_quantized, rounded_weights
from fastlstm.compression.options import PruningSchedule
from fastlstm.compression.pruning import Pruning, prunable
from fastlstm.forecast.model.network import ForecasterConfig, ForecastNetwork
from fastlstm.runs.weight_formats import rounded
from fastlstm.training.callbacks import Callback
from fastlstm.training.task import even_parts
from linear_task import of_kind, trainer_of
from next_token_task import NextTokenTask
from zero_counts import zero_counts

FORMATS = ("fp16", "int8", "int4")


def assert_rounded(weight, weight_format):
    expected = rounded({"w": weight.numpy()}, weight_format)["w"]
    got = fake_quantized(weight, weight_format)
    assert got.dtype == torch.float32
    assert np.array_equal(got.numpy().view(np.int32), expected.view(np.int32)), "bit for bit"


@pytest.mark.parametrize("weight_format", ["fp32", *FORMATS])
@pytest.mark.parametrize("shape", [(7, 64), (16, 100), (3, 1), (5, 130), (1, 63)])
def test_the_rounding_equals_files_bit_for_bit(weight_format, shape):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator)
    assert_rounded(weight, weight_format)
    assert_rounded(weight.abs().mul(-1), weight_format)
    assert_rounded(weight.exp().mul(100), weight_format)
    assert_rounded(weight * (torch.rand(shape, generator=generator) < 0.1), weight_format)
    assert_rounded(torch.zeros(shape), weight_format)
    assert_rounded((weight * 8).round() / 8, weight_format)
    assert_rounded(weight[0].clone(), weight_format)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_tiny_weights_are_rounded_like_files(weight_format):
    generator = torch.Generator().manual_seed(1)
    for exponent in range(-40, 0):
        weight = torch.randn((40, 64), generator=generator) * 2.0**exponent
        assert_rounded(weight, weight_format)
        power = torch.full((3, 64), 7 * 2.0**exponent)
        power[1] = torch.nextafter(power[1], torch.tensor(1.0))
        power[2] = torch.nextafter(power[2], torch.tensor(0.0))
        assert_rounded(power, weight_format)
    assert_rounded(torch.full((1, 64), 1e-45), weight_format)


@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_nan_stays_nan(weight_format):
    weight = torch.ones(2, 64)
    weight[0, 3] = float("nan")
    assert fake_quantized(weight, weight_format)[0].isnan().any()
    assert fake_quantized(weight, weight_format)[1].isfinite().all()


def is_rounded(weights, weight_format):
    return [torch.equal(fake_quantized(w, weight_format), w) for w in weights.values()]


def test_the_weights_are_restored_after_an_error():
    model = NextTokenTask().model
    before = {name: (p, p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    inside = []
    with suppress(KeyError), rounded_weights(model, "int4"):
        inside += is_rounded(dict(model.named_parameters()), "int4")
        raise KeyError
    assert all(inside)
    assert not all(is_rounded(dict(model.named_parameters()), "int4"))
    for name, p in model.named_parameters():
        assert (p is before[name][0], p.data_ptr()) == (True, before[name][1])
        assert torch.equal(p, before[name][2])


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("tie_weights", [False, True])
def test_gradients_are_taken_at_the_rounded_weights(weight_format, tie_weights):
    task = NextTokenTask(tie_weights=tie_weights, embed_size=24)
    batch = task.loader.next()
    plain = NextTokenTask(tie_weights=tie_weights, embed_size=24)
    for p in plain.model.parameters():
        p.data = fake_quantized(p.data, weight_format)
    for other in (task, plain):
        if other is task:
            with rounded_weights(task.model, weight_format):
                next(task.losses(batch, even_parts(task.num_rows(batch), 1))).backward()
        else:
            next(plain.losses(batch, even_parts(plain.num_rows(batch), 1))).backward()
    for (name, a), b in zip(task.model.named_parameters(), plain.model.parameters(), strict=True):
        assert a.grad is not None
        assert torch.equal(a.grad, b.grad), name


def test_a_forecaster_is_rounded_too():
    torch.manual_seed(0)
    config = ForecasterConfig(input_size=32, horizon=8, patch=8, hidden_size=24)
    network = ForecastNetwork(config).eval()
    values = torch.randn(3, 40, 1)
    plain = network(values)
    with rounded_weights(network, "int4"):
        assert all(is_rounded(dict(network.named_parameters()), "int4"))
        assert not torch.equal(network(values), plain)
    assert torch.equal(network(values), plain)


class Norms(Callback):
    """Notes which weights a step's gradients were taken at, and which the optimizer updates."""

    def __init__(self):
        self.masters: list[bool] = []

    def on_gradients(self, trainer):
        weights = dict(trainer.model.named_parameters())
        self.masters.append(all(is_rounded(weights, "int4")))


@pytest.mark.parametrize("ema", [0.0, 0.9])
@pytest.mark.parametrize("at_once", [False, True])
def test_evaluations_and_the_best_weights_are_rounded(ema, at_once):
    task, events, norms = NextTokenTask(at_once=at_once), list[Any](), Norms()
    task.scores = [0.1, 0.2, 0.5, 0.4, 0.6]
    result = trainer_of(
        task, events, callbacks=[FakeQuantization("int4", 5), norms], eval_every=2, ema=ema
    ).fit()
    evals = of_kind(events, "eval")
    assert [e.get("is_accepted", True) for e in evals] == [False, False, True, True, True]
    assert [all(is_rounded(w, "int4")) for w in task.evaluated] == [False, False, True, True, True]
    assert (result.best_step, result.best_loss) == (8, 0.4)
    assert norms.masters == [False] * 10, "the optimizer updates the float32 weights"
    _, published = task.published[-1]
    assert all(is_rounded(published, "int4"))
    for name, weight in published.items():
        assert torch.equal(weight, task.evaluated[3][name])
    assert all(is_rounded(dict(task.model.named_parameters()), "int4")) == (not at_once)


def test_rounding_begins_at_a_share_of_the_run():
    for begin, steps in ((0.0, 0), (0.5, 5), (1.0, 10)):
        seen: list[bool] = []

        class Look(Callback):
            def on_gradients(self, trainer):
                seen.append(quantization.is_on)  # noqa: B023

        quantization = FakeQuantization("int8", begin)
        trainer_of(NextTokenTask(), callbacks=[quantization, Look()]).fit()
        assert seen == [step >= steps for step in range(10)]


def both(structured="none"):
    schedule = PruningSchedule(final=0.75, begin=2, end=8, every=3)
    return [Pruning(schedule, structured), FakeQuantization("int8", 8)]


@pytest.mark.parametrize("structured", ["none", "blocks"])
def test_pruned_weights_stay_zero_when_they_are_rounded(structured):
    task = NextTokenTask()
    trainer_of(task, callbacks=both(structured), steps=16, optimizer="muon", ema=0.5).fit()
    for zeros, number in zero_counts(prunable(task.model), structured).values():
        assert zeros >= round(0.75 * number)
    assert sum(is_rounded(dict(task.model.named_parameters()), "int8")) > 2
