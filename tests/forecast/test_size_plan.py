import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlstm.forecast import size_plan
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.files import StoredForecaster
from fastlstm.forecast.size_plan import ENOUGH_STEPS, can_choose_size
from fastlstm.forecast.train import train_forecaster

CPU = torch.device("cpu")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.csv"
    lines = (f"{n},{math.sin(n / 4) + n % 7 / 20:.4f}" for n in range(400))
    path.write_text("\n".join(["n,y", *lines]))
    return path


def trained(table: Path, out: Path, given: set[str], **changes: Any) -> list[dict[str, Any]]:
    """Sets a run up within a budget and returns its events; it trains few steps."""
    values: dict[str, Any] = {
        "horizon": 4, "target": ("y",), "input_size": 16, "patch": 4, "threads": 1, "budget": "10s",
        "patience": 1, "eval_every": 1, "learning_rate": 0.0, "ignore": ("n",),
        "tensorboard": False,
    }  # fmt: skip
    events: list[dict[str, Any]] = []
    config = ForecastConfig(**{**values, **changes})
    train_forecaster(str(table), config, out=out, given=given, observers=[events.append])
    return events


def step_of(seconds: dict[int, float]) -> Any:
    def step_seconds(stored: StoredForecaster, *_: Any) -> float:
        return seconds[stored.network.config.hidden_size]

    return step_seconds


def test_the_largest_size_with_enough_steps_is_taken_and_it_is_said(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FASTLSTM_CACHE", str(tmp_path / "cache"))
    slow, fast = 20.0 / ENOUGH_STEPS, 1.0 / ENOUGH_STEPS
    monkeypatch.setattr(size_plan, "step_seconds", step_of({256: slow, 128: slow, 64: fast}))
    events = trained(table, tmp_path / "run", {"horizon", "budget"})
    start = next(event for event in events if event["event"] == "start")
    assert start["model"]["hidden_size"] == 64
    said = [event["text"] for event in events if event["event"] == "message"]
    why = next(text for text in said if text.startswith("the budget chooses 64 units"))
    assert "a larger size has too few; 256 units: about" in why


def test_sizes_that_cannot_be_fast_enough_are_not_timed(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FASTLSTM_CACHE", str(tmp_path / "cache"))
    slow = 5.0  # one step in the budget
    monkeypatch.setattr(size_plan, "step_seconds", step_of({256: slow, 32: slow}))
    events = trained(table, tmp_path / "run", {"horizon", "budget"})
    said = [event["text"] for event in events if event["event"] == "message"]
    why = next(text for text in said if text.startswith("the budget chooses 32 units"))
    assert "which are few: a longer budget would help" in why


def test_the_default_stays_where_it_has_enough_steps(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FASTLSTM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(size_plan, "step_seconds", step_of({256: 0.001 / ENOUGH_STEPS}))
    events = trained(table, tmp_path / "run", {"horizon", "budget"})
    start = next(event for event in events if event["event"] == "start")
    assert start["model"]["hidden_size"] == 256


def test_a_size_that_was_given_stays(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(size_plan, "step_seconds", step_of({}))  # would fail
    given = {"horizon", "budget", "hidden_size"}
    events = trained(table, tmp_path / "run", given, hidden_size=24)
    start = next(event for event in events if event["event"] == "start")
    assert start["model"]["hidden_size"] == 24


def test_only_a_budget_on_the_cpu_chooses():
    assert can_choose_size(ForecastConfig(budget="30s"), {"budget"}, CPU)
    assert can_choose_size(ForecastConfig(), (), CPU)  # the default budget is one
    assert not can_choose_size(ForecastConfig(steps=100), {"steps"}, CPU)
    assert not can_choose_size(ForecastConfig(budget="30s", hidden_size=16), (), CPU)
    assert not can_choose_size(ForecastConfig(budget="9s"), {"budget"}, CPU)
    assert not can_choose_size(ForecastConfig(budget="30s"), {"num_layers"}, CPU)
    assert not can_choose_size(ForecastConfig(budget="30s"), (), torch.device("cuda"))
