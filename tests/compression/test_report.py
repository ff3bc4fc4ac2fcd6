"""What a report says, what it decides, and bootstrap intervals of its figures."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from compression_report import REPORT
from fastlstm.compression.report import TrainingFigures, bootstrap_interval, quality_error
from fastlstm.errors import DataError
from fastlstm.system.storage import encode_json


def test_the_limit_decides():
    assert REPORT.checked() is REPORT
    assert dataclasses.replace(REPORT, max_loss=0.01).checked().is_published
    assert not dataclasses.replace(REPORT, max_loss=0.0099).checked().is_published
    relative = dataclasses.replace(REPORT, kind="forecaster", measure="mse", max_loss=0.006)
    assert relative.loss == pytest.approx(0.005)
    assert relative.checked().is_published
    assert not dataclasses.replace(relative, max_loss=0.004).checked().is_published


def test_a_limit_needs_a_measurement():
    report = dataclasses.replace(REPORT, change=None, not_measured="no text", max_loss=0.1)
    with pytest.raises(DataError, match=r"^`max_loss` cannot be checked: no text; give `data`$"):
        report.checked()


def test_the_error_says_how_to_go_on():
    error = quality_error(dataclasses.replace(REPORT, max_loss=0.005), is_trained=True)
    assert error.exit_code == 2
    assert str(error) == (
        "bits/char grew by 0.0100, from 2.0000 to 2.0100 on book.txt, more than `max_loss=0.005`;"
        " nothing is published in 'runs/small'. Its checkpoints stay. Start it again with"
        " `resume=True` and more `steps` or `budget` to train on; with a larger `max_loss` it"
        " publishes the model"
    )
    assert error.report["result"]["quality"] == 2.01
    reason = "no gain in 3 evaluations"
    training = TrainingFigures(steps=9, seconds=1.0, teacher_s=0.0, reason=reason)
    over = dataclasses.replace(REPORT, max_loss=0.005, training=training)
    told = str(quality_error(over, is_trained=True))
    assert "`resume=True` and a larger `patience` to train on;" in told


def test_the_error_of_a_forecaster_names_measure_and_growth():
    report = dataclasses.replace(REPORT, kind="forecaster", measure="mse", max_loss=0.004)
    assert str(quality_error(report, is_trained=False)) == (
        "the mse grew by 0.5 %, from 2.0000 to 2.0100 on book.txt, more than `max_loss=0.004`"
        " (0.4 %); nothing is published in 'runs/small'. Give a `budget` to train the model, which"
        " loses less, or a larger `max_loss`"
    )


def test_a_report_is_a_path_and_json():
    assert Path(REPORT) == Path("runs/small")
    loaded = json.loads(encode_json(REPORT.to_dict()))
    assert loaded["source"]["speed"] == {"1": 10_000.0, "64": 50_000.0}
    assert loaded["change"]["low"] == 0.005


def test_the_interval_of_independent_values():
    values = np.random.default_rng(1).normal(0.5, 1.0, 100_000)
    low, high = bootstrap_interval(values, np.ones(len(values)))
    error = 1.96 / np.sqrt(len(values))
    assert low == pytest.approx(values.mean() - error, abs=0.1 * error)
    assert high == pytest.approx(values.mean() + error, abs=0.1 * error)
    assert bootstrap_interval(values, np.ones(len(values))) == (low, high)  # a fixed seed


def test_dependent_neighbours_widen_the_interval():
    alone = np.random.default_rng(2).normal(0.0, 1.0, 50_000)
    together = np.repeat(alone[:1000], 50)

    def width(values):
        low, high = bootstrap_interval(values, np.ones(len(values)))
        return high - low

    assert width(together) > 4 * width(alone)


@pytest.mark.parametrize("count", [10, 399, 400])
def test_few_values(count):
    low, high = bootstrap_interval(np.arange(count, dtype=float), np.ones(count))
    assert low is not None
    assert high is not None
    assert low <= (count - 1) / 2 <= high


@pytest.mark.parametrize(("count", "block"), [(1, None), (9, None), (9, 1), (29, 3)])
def test_too_few_blocks_have_no_interval(count, block):
    values, weights = np.arange(count, dtype=float), np.ones(count)
    assert bootstrap_interval(values, weights, block) == (None, None)
    assert bootstrap_interval(values, weights, 30) == (None, None)


def test_the_interval_of_a_small_case_drawn_by_hand():
    values = np.array([1.0, 3, 0, 2, 5, 1, 4, 4, 2, 0, 1, 7, 2, 2, 6, 1, 0, 3, 5, 9])
    weights = np.array([1.0, 2, 1, 1, 3, 1, 2, 2, 1, 1, 1, 2, 1, 1, 2, 1, 1, 1, 2, 3])
    rng, ratios = np.random.default_rng(0), []
    for drawn in rng.integers(10, size=(2000, 10)).tolist():  # pairs of neighbours
        above = sum(values[2 * k] + values[2 * k + 1] for k in drawn)
        ratios.append(above / sum(weights[2 * k] + weights[2 * k + 1] for k in drawn))
    ratios.sort()
    low, high = bootstrap_interval(values, weights, block=2)
    assert ratios[48] <= (low or 0) <= ratios[51]
    assert ratios[1948] <= (high or 0) <= ratios[1951]
