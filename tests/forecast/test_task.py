"""The task of a forecaster: the validation loss, and what follows training."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pyarrow import parquet as pq

from fastlstm import Forecaster
from fastlstm.errors import DataError, Stopped
from fastlstm.forecast import task as task_module
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.scaled_windows import ScaledWindows
from fastlstm.forecast.task import ForecastTask
from fastlstm.forecast.train import train_forecaster
from fastlstm.training.session import RunSession
from fastlstm.training.state import Progress
from series_frames import QUICK_RUN as QUICK
from series_frames import long_table


class Network(torch.nn.Linear):
    """A network with a `config`."""

    config = None


@dataclasses.dataclass(frozen=True)
class Stored:
    """A forecaster with a calibration only."""

    calibration: Any = None
    network: Any = dataclasses.field(default_factory=lambda: Network(2, 2))

    def unsupported(self, levels: Any) -> None:
        return None


def task_of(session: Any, budget_s: float | None) -> ForecastTask:
    """Returns a task with 1,000 windows and no table."""
    task = ForecastTask.__new__(ForecastTask)
    vars(task).update(
        session=session, stored=Stored(), dataset=None, split=None, inputs=None,
        model=Network(2, 2), valid=range(1000), budget_s=budget_s, _num_tested=1000, _known=None,
    )  # fmt: skip
    return task


def test_calibration_has_a_share_of_the_budget_and_shows_its_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[float | None] = []

    def calibrate(network: Any, inputs: Any, valid: Any, show: Any, limit_s: float | None) -> None:
        limits.append(limit_s)
        for done in range(64, 257, 64):
            show(done, 1024)

    monkeypatch.setattr(task_module, "calibrate", calibrate)
    monkeypatch.setattr("fastlstm.training.session._SHOW_EVERY_S", -1.0)
    events: list[dict[str, Any]] = []
    session, network = RunSession(None, [events.append]), Network(2, 2)
    for budget_s in (100.0, None):
        assert task_of(session, budget_s)._calibrate(network, 0.06) == (None, 256, 1024)  # type: ignore[arg-type]
    session.stop = lambda: True
    task_of(session, 100.0)._calibrate(network, 0.06)  # type: ignore[arg-type]
    assert limits == [6.0, None, 0.0]
    assert {event["doing"] for event in events} == {"calibrating quantiles"}
    assert [event["done"] for event in events] == 3 * list(range(64, 257, 64))


def test_the_evaluation_leaves_the_report_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    session = SimpleNamespace(
        run=object(), report_s=lambda: 5.0, watch=lambda *_: lambda *_: None, stop=None
    )
    task = task_of(session, 100.0)
    assert task.finish_s(0.001) == pytest.approx(1.5 + 2.5 + 5.0)
    assert task.finish_s(1.0) == pytest.approx(10.0 + 15.0 + 5.0)
    assert task_of(session, None).finish_s(1.0) == 0.0
    asked: list[Any] = []
    monkeypatch.setattr(
        task_module, "evaluation_events", lambda *given: asked.append(given[-1]) or ()
    )
    elapsed_s = iter([94.0, 96.0])
    trainer: Any = SimpleNamespace(
        say=lambda *_: None, progress=Progress(), elapsed_s=lambda: next(elapsed_s)
    )
    task._evaluate(trainer)
    assert asked[0](64, 1000)
    assert not asked[0](128, 1000)


def test_with_a_budget_the_last_calibration_replaces_the_rough_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    published: list[Any] = []

    def files(stored: Any) -> dict[str, bytes]:
        published.append(stored)
        return {}

    monkeypatch.setattr(task_module, "forecaster_files", files)
    monkeypatch.setattr(ForecastTask, "_evaluate", lambda *_: {})
    for budget_s, used in ((9.0, 1), (None, 0)):
        made = itertools.count()
        monkeypatch.setattr(task_module, "calibrate", lambda *_, made=made, **__: next(made))
        run = SimpleNamespace(publish=lambda files: None)
        watch = {"say": lambda *_: None, "watch": lambda *_: lambda *_: None, "stop": None}
        task = task_of(SimpleNamespace(run=run, **watch), budget_s)
        best = SimpleNamespace(weights=Network(2, 2).state_dict(), set_published=lambda: None)
        trainer: Any = SimpleNamespace(progress=Progress(best_step=7), best=best)
        task.publish(best.weights, trainer)
        task.finish(trainer)
        assert task.stored.calibration == used
        assert [one.calibration for one in published[-2:]] == [0, used]


@pytest.mark.parametrize("is_resumed", [False, True])
def test_the_best_weights_are_published_and_returned(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_resumed: bool
) -> None:
    score, seen = ForecastTask.score, []

    def worse(task: ForecastTask, *given: Any) -> Any:
        found = score(task, *given)
        seen.append({name: tensor.clone() for name, tensor in task.model.state_dict().items()})
        return dataclasses.replace(found, loss=float(len(seen)))

    monkeypatch.setattr(ForecastTask, "score", worse)
    config, out = ForecastConfig(**QUICK, linear=False), tmp_path / "run"
    if is_resumed:
        with pytest.raises(Stopped):
            train_forecaster(path, config, out=out, stop=lambda: len(seen) == 2)
    trained = train_forecaster(path, config, out=out, resume=is_resumed)
    assert trained.fitted.best_step == 6
    assert len(seen) == 5
    for stored in (trained.stored, Forecaster.load(tmp_path / "run").stored_):
        for name, tensor in stored.network.state_dict().items():
            assert torch.equal(tensor, seen[0][name]), name


def test_a_stop_during_calibration_acts_at_once(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The published forecaster is calibrated on few windows."""
    pq.write_table(long_table(9000), path)
    calibrate, finish = task_module.calibrate, ForecastTask.finish
    read, is_finishing = list[list[int]](), list[bool]()

    def counted(network: Any, inputs: Any, valid: Any, show: Any, limit_s: Any) -> Any:
        read.append([])

        def shown(done: int, total: int) -> None:
            read[-1].append(done)
            show(done, total)

        return calibrate(network, inputs, valid, shown, limit_s)

    def finished(task: ForecastTask, trainer: Any) -> Any:
        is_finishing.append(True)
        return finish(task, trainer)

    monkeypatch.setattr(task_module, "calibrate", counted)
    monkeypatch.setattr(ForecastTask, "finish", finished)
    out = tmp_path / "run"
    with pytest.raises(Stopped, match="is saved, start the run again with `resume=True`"):
        train_forecaster(
            path, ForecastConfig(**{**QUICK, "checkpoint_every": 1000}), out=out,
            stop=lambda: bool(is_finishing) and read != [] and read[-1] != [],
        )  # fmt: skip
    assert read[0] == [256]
    assert read[1:] == [list(range(64, 257, 64))]
    assert Forecaster.load(out).predict(path) is not None


SMALL: dict[str, Any] = {
    "horizon": 4, "input_size": 8, "patch": 4, "hidden_size": 8, "steps": 2, "dropout": 0.0,
    "split": (100, 60, 40), "ema": 0.0,
}  # fmt: skip


def values(most_missing: float = 0.9) -> NDArray[np.float32]:
    """Many values are missing, more at the end of the validation part than at its start."""
    rng = np.random.default_rng(0)
    y = rng.normal(size=200) + np.linspace(0, 8, 200)
    y[rng.random(200) < np.linspace(0, most_missing, 200)] = np.nan
    return y.astype(np.float32)


@pytest.mark.parametrize(("size", "most_missing"), [(1, 0.9), (7, 0.9), (64, 0.9), (7, 0.0)])
def test_the_validation_loss_is_the_mean_of_present_values(
    monkeypatch: pytest.MonkeyPatch, size: int, most_missing: float
) -> None:
    read = ScaledWindows.read

    def parted(
        inputs: ScaledWindows, rows: NDArray[np.int64], length: int, _: int = 0
    ) -> Iterator[Any]:
        return read(inputs, rows, length, size)

    monkeypatch.setattr(ScaledWindows, "read", parted)
    monkeypatch.setattr("fastlstm.forecast.task.EVALUATION_BATCH", size)
    model = Forecaster(**SMALL).fit(values(most_missing))
    rows = model._windows(model.dataset_, "valid", 1)[1].rows()
    found, actual = model.stored_.forecast(model._inputs, rows)
    errors = np.abs(found[..., 0] - actual) / model._inputs.scaler.std[0]
    assert model.fitted_.best_loss == pytest.approx(float(np.nanmean(errors)))


def test_a_validation_part_without_values_is_an_error() -> None:
    y = values()
    y[100:160] = np.nan
    with pytest.raises(DataError, match="the validation part has no value of the targets"):
        Forecaster(**SMALL).fit(y)
    assert math.isfinite(Forecaster(**SMALL).fit(values()).fitted_.best_loss)


def test_five_bad_steps_in_a_row_restore_the_last_good_state(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, passes = ForecastTask.losses, itertools.count()

    def poisoned(*given: Any) -> Iterator[torch.Tensor]:
        for loss in losses(*given):
            yield loss * math.nan if next(passes) in range(10, 15) else loss

    monkeypatch.setattr(ForecastTask, "losses", poisoned)
    events: list[dict[str, Any]] = []
    given = {
        **QUICK,
        "steps": 20,
        "checkpoint_every": 4,
        "log_every": 1,
        "observers": [events.append],
    }
    with pytest.warns(UserWarning, match="with half the learning rate"):
        model = Forecaster(**{**given, "tbptt": 12, "batch_size": 2}).fit(
            path, out=tmp_path / "run"
        )
    skips = [event for event in events if event["event"] == "skip"]
    assert [event["step"] for event in skips] == [10] * 5
    assert skips[-1]["action"] == "rolled back to the last good checkpoint"
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert steps == [*range(1, 11), *range(9, 21)]  # the newest checkpoint was of step 8
    assert math.isfinite(model.fitted_.best_loss)
    assert Forecaster.load(tmp_path / "run").predict(path) is not None
