import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlstm import Forecaster
from fastlstm.forecast import size_plan
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.preparation import prepare
from fastlstm.forecast.data.splits import split_table
from fastlstm.forecast.files import StoredForecaster
from fastlstm.forecast.size_plan import ENOUGH_STEPS, can_choose_size, choose_size
from fastlstm.forecast.train import train_forecaster
from fastlstm.system import measurements
from recorded_gpu import use_gpu


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTLSTM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.csv"
    lines = (f"{n},{math.sin(n / 4) + n % 7 / 20:.4f}" for n in range(400))
    path.write_text("\n".join(["n,y", *lines]))
    return path


def trained(table: Path, out: Path, given: set[str], **changes: Any) -> list[dict[str, Any]]:
    """Returns the events of a run with a budget that trains few steps."""
    values: dict[str, Any] = {
        "horizon": 4, "target": ("y",), "input_size": 16, "patch": 4, "threads": 1,
        "budget": "100s", "patience": 1, "eval_every": 1, "learning_rate": 0.0, "ignore": ("n",),
        "tensorboard": False,
    }  # fmt: skip
    events: list[dict[str, Any]] = []
    config = ForecastConfig(**{**values, **changes})
    train_forecaster(str(table), config, out=out, given=given, observers=[events.append])
    return events


def units_of(events: list[dict[str, Any]]) -> int:
    start = next(event for event in events if event["event"] == "start")
    return int(start["model"]["hidden_size"])


def step_of(seconds: dict[int, float]) -> Any:
    def step_seconds(stored: StoredForecaster, *_: Any) -> float:
        return seconds[stored.network.config.hidden_size]

    return step_seconds


@pytest.mark.parametrize(
    ("step_s", "units", "told"),
    [
        ({256: 200.0, 128: 200.0, 64: 10.0}, 64, "a larger size has too few; 256 units: about"),
        ({256: 1e4, 32: 1e4}, 32, "which are few: a longer budget would help"),
        ({256: 0.001}, 256, None),
    ],
    ids=["the largest with enough steps", "not timed between two slow ones", "the default"],
)
def test_a_budget_chooses_the_size(
    table: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step_s: dict[int, float],
    units: int,
    told: str | None,
) -> None:
    seconds = {size: s / ENOUGH_STEPS for size, s in step_s.items()}
    monkeypatch.setattr(size_plan, "step_seconds", step_of(seconds))
    events = trained(table, tmp_path / "run", {"horizon", "budget"})
    assert units_of(events) == units
    if told is not None:
        said = [event["text"] for event in events if event["event"] == "message"]
        why = next(text for text in said if text.startswith(f"the budget chooses {units} units"))
        assert told in why


def test_only_a_budget_chooses():
    assert can_choose_size(ForecastConfig(budget="30s"), {"budget"})
    assert can_choose_size(ForecastConfig(), ())  # the default budget is one
    assert not can_choose_size(ForecastConfig(steps=100), {"steps"})
    assert not can_choose_size(ForecastConfig(budget="30s", hidden_size=16), ())
    assert not can_choose_size(ForecastConfig(budget="9s"), {"budget"})
    assert not can_choose_size(ForecastConfig(budget="30s"), {"num_layers"})


def planned(
    table: Path, spent_s: float = 0.0, *where: Any, **options: Any
) -> tuple[ForecastConfig, str]:
    """Returns what a budget of 10 s chooses after `spent_s`, and why."""
    config = ForecastConfig(
        horizon=4, target=("y",), input_size=16, patch=4, budget="10s", ignore=("n",), **options
    )
    dataset = prepare(str(table), config)
    split = split_table(dataset.table, dataset.frequency, config.split)
    return choose_size(config, dataset, split, time.perf_counter() - spent_s, *where)


def test_the_size_depends_on_the_time_left(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # 65 % of 10 s are 250 steps of 26 ms, 65 % of 4 s of 10.4 ms.
    monkeypatch.setattr(size_plan, "step_seconds", step_of({256: 0.02, 128: 1e-4}))
    assert planned(table)[0].hidden_size == 256
    assert planned(table, 6.0)[0].hidden_size == 128
    monkeypatch.setattr(size_plan, "step_seconds", step_of({256: 0.03, 128: 1e-4}))
    monkeypatch.setenv("FASTLSTM_CACHE", str(tmp_path / "another"))
    assert planned(table)[0].hidden_size == 128


def test_other_processes_leave_time_for_fewer_steps(table: Path, monkeypatch: pytest.MonkeyPatch):
    def step_seconds(stored: StoredForecaster, *rest: Any) -> float:
        rest[-1].extend([16.0, 3.0])  # the least of them counts
        return 0.01

    monkeypatch.setattr(size_plan, "step_seconds", step_seconds)
    config, why = planned(table)
    assert (config.hidden_size, "32 units: about 216 steps" in why) == (
        32,
        True,
    )  # 65 % of 10 s by 30 ms


@pytest.mark.parametrize("is_busy", [False, True])
def test_step_times_are_cached_unless_the_machine_was_busy(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_busy: bool
):
    monkeypatch.setattr(measurements.CpuTimer, "was_busy", lambda *_: is_busy)
    monkeypatch.setattr(size_plan, "step_seconds", step_of({256: 0.1, 128: 0.1, 64: 1e-4}))
    assert planned(table)[0].hidden_size == 64
    monkeypatch.setattr(size_plan, "step_seconds", step_of(dict.fromkeys((256, 128, 64), 1e-4)))
    config, why = planned(table)
    assert config.hidden_size == (256 if is_busy else 64)
    assert why.endswith("(steps measured earlier)") is not is_busy


def test_a_gpu_gets_a_faster_precision_and_a_larger_batch(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    use_gpu(monkeypatch)
    gpu = torch.device("cuda")

    def step_seconds(stored: StoredForecaster, *_: Any) -> float:
        config = stored.config
        full = config.precision in ("fp32", "tf32")
        return 1e-3 * (2.0 if full else 1.0) * max(1.0, config.batch_size / 24)

    monkeypatch.setattr(size_plan, "step_seconds", step_seconds)
    chosen, why = planned(table, 0.0, gpu, batch_size=8)
    assert (chosen.precision, chosen.batch_size) == ("bf16", 32)  # of 264 windows no 128
    assert "bf16 and batch 32 read 24,000 windows/s" in why
    given = ("precision", "batch_size")
    asked, _ = planned(table, 0.0, gpu, given, batch_size=8)
    assert (asked.precision, asked.batch_size) == ("fp32", 8)


def test_a_budget_in_python_chooses_what_the_command_line_does(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    timed: list[int] = []

    def step_seconds(stored: StoredForecaster, *_: Any) -> float:
        timed.append(stored.network.config.hidden_size)
        return (10.0 if timed[-1] == 64 else 200.0) / ENOUGH_STEPS

    monkeypatch.setattr(size_plan, "step_seconds", step_seconds)
    values: dict[str, Any] = {
        "horizon": 4, "target": ("y",), "input_size": 16, "patch": 4, "threads": 1,
        "budget": "100s", "patience": 1, "eval_every": 1, "learning_rate": 0.0, "ignore": ("n",),
    }  # fmt: skip
    trained(table, tmp_path / "run", {"horizon", "budget"})
    assert timed
    num = len(timed)
    with pytest.warns(UserWarning, match="ended after"):
        model = Forecaster(**values, tensorboard=False).fit(str(table))
    assert model.network_.config.hidden_size == 64
    assert len(timed) == num, "the plan of the command line is found again"
    for given in ({"hidden_size": 256}, {"num_layers": 1}):
        with pytest.warns(UserWarning, match="ended after"):
            model = Forecaster(**values, **given).fit(str(table))
        assert model.network_.config.hidden_size == 256
    assert Forecaster(**values).get_params()["hidden_size"] is None
