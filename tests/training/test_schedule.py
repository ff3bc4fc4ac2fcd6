import pytest

from fastlstm.errors import BudgetError
from fastlstm.text.config import TrainConfig
from fastlstm.training import schedule
from fastlstm.training.schedule import SaveTimes, StopCriterion, learning_rate_factor


def test_rate_goes_up_stays_and_ends_at_zero():
    factors = [learning_rate_factor(p / 100, warmup=0.1, cooldown=0.4) for p in range(101)]
    assert factors[5] == pytest.approx(0.5)
    assert factors[10:61] == [1.0] * 51
    assert factors[80] == pytest.approx(0.5)
    assert factors[100] == 0.0
    assert factors[0] > 0


def test_no_warmup_and_no_cooldown_is_constant():
    assert {learning_rate_factor(p / 10, 0.0, 0.0) for p in range(11)} == {1.0}


def test_steps_and_epochs_count_steps():
    assert StopCriterion.of(TrainConfig(steps=7), 100).total_steps == 7
    assert StopCriterion.of(TrainConfig(epochs=1.5), 100).total_steps == 150
    assert StopCriterion.of(TrainConfig(steps=10), 1).progress(5, 10**6) == 0.5


def test_budget_counts_wall_clock_and_keeps_a_reserve():
    ending = StopCriterion.of(TrainConfig(budget="2m"), 100)
    assert ending.budget_s == 120
    assert ending.progress(10**9, 30) == 0.25
    assert ending.progress(0, 100, reserve_s=20) == 1.0
    assert ending.progress(0, 15, reserve_s=10**6) == 0.5, (
        "the reserve takes at most three quarters of the budget"
    )


def test_of_a_budget_the_steps_get_what_set_up_left():
    ending = StopCriterion.of(TrainConfig(budget="2m"), 100)
    assert ending.progress(0, 20, setup_s=20) == 0.0
    assert ending.progress(5, 70, setup_s=20) == 0.5
    assert ending.progress(5, 60, setup_s=20, reserve_s=20) == 0.5
    assert ending.progress(5, 85, setup_s=80, reserve_s=10**6) == 0.5, "a quarter of the 40 s left"
    assert ending.progress(0, 121, setup_s=121) == 1.0
    with pytest.raises(BudgetError, match=r"took 121.0 s \(budget 2m\); give a larger budget"):
        ending.require_steps(0, 121.0)
    ending.require_steps(1, 121.0)


def test_the_first_checkpoint_comes_after_fifteen_seconds(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(schedule.time, "perf_counter", lambda: now_s[0])
    times, saved = SaveTimes(None), []
    times.tried(0)  # before the first step
    for step in range(1, 200):
        now_s[0] += 1.0
        if times.is_due(step):
            saved.append(step)
            times.tried(step)
    assert saved == [16, 77, 138, 199]
    assert [step for step in range(1, 10) if SaveTimes(4).is_due(step)] == [4, 8]


def test_without_an_end_the_default_budget_holds():
    ending = StopCriterion.of(TrainConfig(), 1)
    assert (ending.budget_s, ending.text) == (300.0, "budget 5m (default)")
