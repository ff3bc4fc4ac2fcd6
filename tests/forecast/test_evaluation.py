"""The events about the test part: errors by target and step, coverage, examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastlstm import Forecaster
from fastlstm.forecast import evaluation
from fastlstm.forecast.data.splits import split_table
from fastlstm.forecast.evaluation import _quarters, evaluation_events, num_test_windows
from forecast_server import L, fit_plain, h
from series_frames import START


@pytest.fixture(scope="module")
def model() -> Forecaster:
    return fit_plain()


def events_of(model: Forecaster, continues: Any = lambda *_: True) -> list[dict[str, Any]]:
    dataset = model.dataset_
    split = split_table(dataset.table, dataset.frequency, model.split)
    return evaluation_events(model.stored_, dataset, split, model._inputs, continues)


@pytest.mark.parametrize(
    ("horizon", "quarters"),
    [
        (8, [(1, 2), (3, 4), (5, 6), (7, 8)]),
        (6, [(1, 1), (2, 3), (4, 4), (5, 6)]),
        (2, [(1, 1), (2, 2)]),
        (1, [(1, 1)]),
    ],
)
def test_a_horizon_has_up_to_four_quarters(horizon: int, quarters: list[tuple[int, int]]) -> None:
    assert _quarters(horizon) == quarters


def test_the_scores_are_those_of_backtest(model: Forecaster) -> None:
    test, calibration, *examples = events_of(model)
    scores = model.backtest()
    assert test["scores"] == {name: pytest.approx(scores[name]) for name in scores}
    assert (test["windows"], test["of_windows"], test["season"]) == (57, 57, 24)
    (target,) = test["targets"]
    assert (target["target"], target["num_values"]) == ("y", 57 * h)
    assert target["mae"] == pytest.approx(scores["forecaster"]["mae"])
    assert target["seasonal_naive_mae"] == pytest.approx(scores["seasonal_naive"]["mae"])
    counts = [part["last"] - part["first"] + 1 for part in target["by_step"]]
    mae = np.average([part["mae"] for part in target["by_step"]], weights=counts)
    assert mae == pytest.approx(target["mae"])  # every value is present
    coverage = model.coverage((0.8, 0.95))
    observed = dict(zip(calibration["levels"], calibration["observed"], strict=True))
    assert (observed[0.8], observed[0.95]) == (coverage[0.8], coverage[0.95])
    assert [event["series"] for event in examples] == ["s0", "s0", "s1", "s1", "s2", "s2"]


def test_what_has_no_time_left_is_skipped(
    model: Forecaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "spread_out", lambda rows: rows)
    calls: list[tuple[int, int]] = []

    def continues(done: int, total: int) -> bool:
        calls.append((done, total))
        return False

    assert events_of(model, continues)[0]["windows"] == 57
    assert calls == [(57, 57)]
    monkeypatch.setattr(evaluation, "MAX_WINDOWS", 9)
    test = events_of(model, continues)[0]
    assert (test["windows"], test["of_windows"]) == (9, 57)


def test_an_example_is_past_forecast_and_actual_values(model: Forecaster) -> None:
    example = events_of(model)[2]
    assert (example["series"], example["target"], example["time_zone"]) == ("s0", "y", None)
    assert len(example["past"]) == L
    assert len(example["times"]) == L + h
    first = (np.datetime64(example["times"][0]) - np.datetime64(START)) // np.timedelta64(1, "h")
    y = model.dataset_.table.values[:, 0] + model.dataset_.table.origin[0, 0]
    np.testing.assert_allclose(example["past"] + example["actual"], y[first : first + L + h], 1e-4)
    assert all(a <= b for a, b in zip(example["low"], example["high"], strict=True))


def test_a_table_without_a_test_part_has_no_scores(model: Forecaster) -> None:
    dataset = model.dataset_
    split = split_table(dataset.table, dataset.frequency, "80/20/0")
    assert num_test_windows(dataset, split, model.network_.config) == 0
    (event,) = evaluation_events(model.stored_, dataset, split, model._inputs, lambda *_: True)
    assert event["text"].startswith("no test scores: test part")
