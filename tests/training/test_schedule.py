import pytest

from fastlstm.config import TrainConfig
from fastlstm.training.schedule import DEFAULT_BUDGET_S, Ending, learning_rate_factor


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
    assert Ending.of(TrainConfig(steps=7), 100).total_steps == 7
    assert Ending.of(TrainConfig(epochs=1.5), 100).total_steps == 150
    assert Ending.of(TrainConfig(steps=10), 1).progress(5, 10**6) == 0.5


def test_budget_counts_wall_clock_and_keeps_a_reserve():
    ending = Ending.of(TrainConfig(budget="2m"), 100)
    assert ending.budget_s == 120
    assert ending.progress(10**9, 30) == 0.25
    assert ending.progress(0, 100, reserve_s=20) == 1.0
    assert ending.progress(0, 60, reserve_s=10**6) == 1.0, (
        "the reserve takes at most half the budget"
    )


def test_without_an_end_the_default_budget_holds():
    assert Ending.of(TrainConfig(), 1).budget_s == DEFAULT_BUDGET_S
