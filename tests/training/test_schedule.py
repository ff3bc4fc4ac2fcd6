"""When a run evaluates and ends, and its learning rate."""

from types import SimpleNamespace

import pytest

from fastlstm.errors import BudgetError
from fastlstm.text.config import TrainConfig
from fastlstm.training.schedule import (
    EvaluationSchedule,
    StopCriterion,
    default_evaluations,
    learning_rate_factor,
)
from fastlstm.training.state import Progress


def test_rate_goes_up_stays_and_ends_at_zero():
    factors = [learning_rate_factor(p / 100, warmup=0.1, cooldown=0.4) for p in range(101)]
    assert factors[5] == pytest.approx(0.5)
    assert factors[10:61] == [1.0] * 51
    assert factors[80] == pytest.approx(0.5)
    assert factors[100] == 0.0
    assert factors[0] > 0
    assert {learning_rate_factor(p / 10, 0.0, 0.0) for p in range(11)} == {1.0}


def test_steps_and_epochs_count_steps():
    assert StopCriterion.of(TrainConfig(steps=7), 100).total_steps == 7
    assert StopCriterion.of(TrainConfig(epochs=1.5), 5).total_steps == 8, "the next whole step"
    assert StopCriterion.of(TrainConfig(steps=10), 1).progress(5, 10**6) == 0.5


def test_budget_counts_wall_clock_and_keeps_a_reserve():
    ending = StopCriterion.of(TrainConfig(budget="2m"), 100)
    assert ending.budget_s == 120
    assert ending.progress(10**9, 30) == 0.25
    assert ending.progress(0, 100, reserve_s=20) == 1.0
    assert ending.progress(0, 15, reserve_s=10**6) == 0.5, (
        "the reserve takes at most three quarters of the budget"
    )


def test_steps_get_the_part_of_a_budget_that_set_up_leaves():
    ending = StopCriterion.of(TrainConfig(budget="2m"), 100)
    assert ending.progress(0, 20, setup_s=20) == 0.0
    assert ending.progress(5, 70, setup_s=20) == 0.5
    assert ending.progress(5, 60, setup_s=20, reserve_s=20) == 0.5
    assert ending.progress(5, 85, setup_s=80, reserve_s=10**6) == 0.5, "a quarter of the 40 s left"
    assert ending.progress(0, 121, setup_s=121) == 1.0
    with pytest.raises(BudgetError, match=r"took 121.0 s \(budget 2m\); give a larger budget"):
        ending.require_steps(0, 121.0)
    ending.require_steps(1, 121.0)


def test_without_an_end_the_default_budget_holds():
    ending = StopCriterion.of(TrainConfig(), 1)
    assert (ending.budget_s, ending.text) == (300.0, "budget 5m (default)")


BUDGET = StopCriterion("budget", None, 100.0, "budget 100s")


STEPS = StopCriterion("steps", 100, None, "100 steps")


def test_an_evaluation_is_due_once_every_so_many_steps():
    schedule = EvaluationSchedule(10, 16, STEPS)
    due = [step for step in range(41) if schedule.is_due(Progress(step=step), step / 100, 0.0)]
    assert due == [10, 20, 30, 40]
    assert not schedule.is_due(Progress(step=10, evaluated_step=10), 0.1, 0.0)
    assert schedule.left(Progress(step=35)) == 6


def test_no_evaluation_is_beside_another():
    schedule, progress = EvaluationSchedule(100, 16, BUDGET), Progress(step=154)
    assert schedule.is_due(progress, 0.5, 50.0), "the first of a budget, half-way through"
    progress.evaluated_step, progress.evaluations = 194, 1
    progress.step = 200
    assert not schedule.is_due(progress, 0.6, 60.0), "6 steps after the last"
    progress.step = 300
    assert not schedule.is_due(progress, 0.98, 98.0), "6 steps before the one that ends the run"
    assert schedule.is_due(progress, 0.8, 80.0)


def test_slots_are_spread_evenly_over_the_run():
    schedule, progress, due = EvaluationSchedule(None, 4, STEPS), Progress(), []
    for progress.step in range(101):
        done = progress.step / 100
        if schedule.is_due(progress, done, 0.0):
            due.append(progress.step)
            progress.evaluated_step, progress.slot = progress.step, schedule.slot(done)
    assert due == [25, 50, 75, 100]
    assert schedule.left(Progress(slot=1)) == 3


def test_a_missed_evaluation_is_not_made_up_for():
    schedule = EvaluationSchedule(None, 4, STEPS)
    assert schedule.slot(0.8) == 3
    assert not schedule.is_due(Progress(step=80, slot=3), 0.8, 0.0)


def test_half_way_through_a_budget_the_first_evaluation_is_due():
    schedule = EvaluationSchedule(10**6, 16, BUDGET)
    assert not schedule.is_due(Progress(step=5), 0.49, 49.0)
    assert schedule.is_due(Progress(step=5), 0.5, 50.0)
    assert not schedule.is_due(Progress(step=5, evaluations=1), 0.5, 50.0)
    assert not EvaluationSchedule(10**6, 16, STEPS).is_due(Progress(step=50), 0.5, 50.0)


def test_spread_evaluations_take_a_share_of_a_budget_after_set_up():
    schedule = EvaluationSchedule(None, 5, BUDGET)
    cases = [(0, 1.5, 50, True), (0, 1.6, 50, False), (50, 1, 75, False), (50, 1, 84, True)]
    for setup_s, spent_s, elapsed_s, is_due in cases:
        progress = Progress(step=5, spent={"setup": setup_s, "evaluations": spent_s})
        assert schedule.is_due(progress, 0.5, elapsed_s) is is_due


def task_of(**fields):
    sizes = {"num_valid": 10**6, "min_scored": 256, "max_scored": None, "forward_share": 0.5}
    return SimpleNamespace(**{**sizes, **fields})


def test_the_units_that_an_evaluation_scores():
    task = task_of(min_scored=10, step_units=8.0)
    limit = EvaluationSchedule(10, 16, STEPS).limit
    assert limit(task, Progress(), 1e-3) == 10**6, "every so many steps: all"
    # 100 steps of 8 are worth the time of 1600 scored, of which 3 % are 48.
    assert EvaluationSchedule(None, 4, STEPS).limit(task, Progress(), 1e-3) == 12
    task.max_scored = 500
    assert limit(task, Progress(), 1e-3) == 500
    task.max_scored, setup = None, Progress(spent={"setup": 20.0})
    assert EvaluationSchedule(10, 16, BUDGET).limit(task, setup, 1e-3) == 8000, "a tenth of 80 s"
    assert EvaluationSchedule(None, 4, BUDGET).limit(task, setup, 1e-3) == 600, "3 % over four"
    assert EvaluationSchedule(10, 16, BUDGET).limit(task, setup, 10.0) == 10, "the least"
    assert EvaluationSchedule(10, 16, BUDGET).limit(task, setup, 0.0) == 10**6, "not known yet"
    task.num_valid = 7
    assert EvaluationSchedule(10, 16, BUDGET).limit(task, setup, 10.0) == 7


def steps_of(total):
    return StopCriterion("steps", total, None, f"{total} steps")


@pytest.mark.parametrize(("steps", "count"), [(1, 1), (100, 2), (240, 5), (2000, 16), (10**6, 16)])
def test_as_many_evaluations_as_the_steps_have_time_for(steps, count):
    task = task_of(step_units=64.0, forward_share=1 / 3)
    end = steps_of(steps)
    assert default_evaluations(task, end, 0) == count
    scored = count * EvaluationSchedule(None, count, end).limit(task, Progress(), 0.0)
    assert scored / 3 <= max(256 / 3, 0.03 * 64 * steps), "the time of 3 % of the steps, or of one"


def test_patience_and_a_small_validation_part_have_more_evaluations():
    task = task_of(num_valid=500, step_units=1.0)
    assert default_evaluations(task, steps_of(10), 3) == 16
    assert default_evaluations(task, BUDGET, 0) == 16, "of a budget their time is measured"
    for num_valid, count in ((10, 16), (100, 1)):
        task = task_of(num_valid=num_valid, step_units=32.0)
        assert default_evaluations(task, steps_of(100), 0) == count
