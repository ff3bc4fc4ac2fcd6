"""When a run evaluates."""

from __future__ import annotations

from fastlstm.training.evaluations import EvaluationSchedule
from fastlstm.training.schedule import StopCriterion
from fastlstm.training.state import Progress

BUDGET = StopCriterion("budget", None, 100.0, "budget 100s")


def test_set_up_gives_evaluations_no_time() -> None:
    progress = Progress(step=5, spent={"setup": 50.0, "evaluations": 1.0})
    schedule = EvaluationSchedule(None, 5, BUDGET)
    assert not schedule.is_due(progress, 0.5, 60.0)
    assert schedule.is_due(progress, 0.5, 75.0)
