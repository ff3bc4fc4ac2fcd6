"""What a run counts, captured and put back."""

import copy
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastlstm.errors import ConfigError, Stopped
from fastlstm.forecast.model.network import CategoryEmbedding
from fastlstm.training import state
from fastlstm.training.optimizer import OptimizerSet
from fastlstm.training.options import TrainingOptions
from fastlstm.training.state import Progress, TrainingState, WeightAverage, first_non_finite


def test_a_stopped_block_is_counted_too(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(state.time, "perf_counter", lambda: now_s[0])
    progress = Progress()
    with progress.counted("evaluations"):
        now_s[0] += 2.0

    @progress.counted("evaluations")
    def stopped():
        now_s[0] += 3.0
        raise Stopped("stopped while evaluating")

    with pytest.raises(Stopped):
        stopped()
    assert progress.spent == {"evaluations": 5.0}


def test_buffers_of_a_model_are_stored_and_restored():
    """Without it a resumed forecaster took the categories it had read for unknown ones."""

    def made(*codes):
        model = CategoryEmbedding(3, 2)
        model(torch.tensor(codes))
        optimizers: Any = SimpleNamespace(tensors=dict, load=lambda tensors: None)
        return TrainingState(model, optimizers, None)

    tensors, meta = made(0, 2).capture({"epoch": 0, "index": 0})
    fresh = made(1)
    fresh.restore(tensors, meta)
    assert fresh.model.is_trained.tolist() == [True, False, True, False]


def state_of(decay=0.5):
    model = torch.nn.Linear(3, 2)
    options = TrainingOptions(optimizer="adamw", learning_rate=0.1)
    return TrainingState(model, OptimizerSet(model, options), WeightAverage(model, decay))


def captured(state):
    """As it comes from a checkpoint: copies, and plain values that were JSON."""
    tensors, meta = state.capture({"epoch": 1, "index": 2})
    return copy.deepcopy(tensors), json.loads(json.dumps(meta, allow_nan=False))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (("progress", "step", "3"), "`step` is '3', expected a whole number"),
        (("progress", "step", True), "`step` is True"),
        (("progress", "best_loss", None), "`best_loss` is None, expected a number"),
        (
            ("progress", "spent", {"setup": "1"}),
            "`spent` is {'setup': '1'}, expected seconds by part",
        ),
        (("progress", "spent", [1.0]), "`spent` is"),
        (("progress", "extra", 1), "unexpected keyword"),
        (("guard", "in_a_row", [5]), r"`in_a_row` is \[5\]"),
        (("guard", "rollbacks", 0.5), "`rollbacks` is 0.5, expected a whole number"),
    ],
)
def test_a_counter_of_another_type_is_refused(change, error):
    state = state_of()
    tensors, meta = captured(state)
    meta[change[0]][change[1]] = change[2]
    with pytest.raises((ConfigError, TypeError), match=error):
        state.restore(tensors, meta)


def test_the_first_bad_tensor_is_named():
    good, bad = torch.ones(3), torch.tensor([1.0, float("nan")])
    assert first_non_finite([("a", good), ("b", bad), ("c", bad)]) == "b"
    assert first_non_finite([("a", good), ("n", torch.tensor([1, 2]))]) is None


def test_the_average_follows_the_formula_and_swaps_in_and_out():
    layer = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        layer.weight.fill_(0.0)
    average = WeightAverage(layer, decay=0.5)
    for _ in range(3):
        with torch.no_grad():
            layer.weight.add_(1.0)
        average.update()
    expected = 0.0
    for n, weight in enumerate((1.0, 2.0, 3.0), start=1):
        decay = min(0.5, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * weight
    with average.applied():
        assert abs(layer.weight.item() - expected) < 1e-6
    assert layer.weight.item() == 3.0


def test_weights_stay_where_they_are_while_averages_are_in_use():
    layer = torch.nn.Linear(1, 1)
    average = WeightAverage(layer, decay=0.9)
    place = layer.weight.data_ptr()  # cuDNN has the weights of a layer in one buffer
    with average.applied():
        assert layer.weight.data_ptr() == place
    assert layer.weight.data_ptr() == place
