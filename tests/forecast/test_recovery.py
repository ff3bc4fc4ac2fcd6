"""NaN in a forecaster's training: steps are skipped, then the last good state is restored."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fastlstm import Forecaster
from fastlstm.forecast.task import ForecastTask
from fastlstm.report.history import read_history
from series_frames import long_table

QUICK: dict[str, Any] = {
    "horizon": 6, "input_size": 24, "patch": 6, "hidden_size": 8, "steps": 20, "dropout": 0.0,
    "split": "60/20/20", "batch_size": 8, "checkpoint_every": 4, "tensorboard": False,
    "evaluations": 5, "threads": 1,
}  # fmt: skip
KINDS: list[dict[str, Any]] = [{}, {"tbptt": 12, "batch_size": 2}]


class Poison:
    """Makes the losses of some passes NaN, numbered from the first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, passes: range) -> None:
        self._losses, self._passes, self._done = ForecastTask.losses, passes, 0
        monkeypatch.setattr(ForecastTask, "losses", lambda *given: self._poisoned(*given))

    def _poisoned(self, *given: Any) -> Iterator[torch.Tensor]:
        for loss in self._losses(*given):
            is_bad = self._done in self._passes
            self._done += 1
            yield loss * math.nan if is_bad else loss


def fitted(events: list[dict[str, Any]], out: Path | None, **given: Any) -> Forecaster:
    model = Forecaster(**{**QUICK, **given}, observers=[events.append])
    return model.fit(long_table(120), out=out)


@pytest.mark.parametrize("given", KINDS)
@pytest.mark.parametrize("has_run", [False, True])
def test_five_bad_steps_in_a_row_restore_the_last_good_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_run: bool, given: dict[str, Any]
) -> None:
    Poison(monkeypatch, range(10, 15))
    events: list[dict[str, Any]] = []
    out = tmp_path / "run" if has_run else None
    with pytest.warns(UserWarning, match="with half the learning rate"):
        model = fitted(events, out, log_every=1, **given)
    skips = [event for event in events if event["event"] == "skip"]
    assert [event["step"] for event in skips] == [10] * 5
    assert [event["action"] for event in skips] == [
        *["step skipped, state reset"] * 4,
        "rolled back to the last good checkpoint",
    ]
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert steps == [*range(1, 11), *range(9, 21)]  # the newest checkpoint was of step 8
    rates = {event["step"]: event["lr"] for event in events if event["event"] == "step"}
    whole: list[dict[str, Any]] = []
    monkeypatch.undo()
    fitted(whole, None, log_every=1, **given)
    for event in whole:
        if event["event"] == "step":
            share = 0.5 if event["step"] > 8 else 1.0
            assert rates[event["step"]] == pytest.approx(share * event["lr"])
    assert model.fitted_.steps == 20
    assert math.isfinite(model.fitted_.best_loss)
    if out is not None:
        assert [e["step"] for e in read_history(out / "metrics.jsonl").evals][-1] == 20
        assert Forecaster.load(out).predict(long_table(120)) is not None


def test_a_nan_in_the_carried_state_skips_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    losses, passes = ForecastTask.losses, []

    def poisoned(task: ForecastTask, *given: Any) -> Iterator[torch.Tensor]:
        passes.append(task)
        if len(passes) == 10:
            assert task._state is not None
            task._state.hidden.fill_(math.nan)
        yield from losses(task, *given)

    monkeypatch.setattr(ForecastTask, "losses", poisoned)
    events: list[dict[str, Any]] = []
    model = fitted(events, None, tbptt=6, batch_size=1)
    skips = [event for event in events if event["event"] == "skip"]
    assert [(event["step"], event["tensor"]) for event in skips] == [(9, "carried hidden")]
    assert model.fitted_.steps == 20
