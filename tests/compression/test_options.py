"""What may be asked of a compression; the schedule of pruning, beside TensorFlow's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fastlstm.compression.options import (
    DEFAULT_SCHEDULE,
    TRAINING,
    CompressConfig,
    PruningSchedule,
    in_steps,
)
from fastlstm.errors import ConfigError
from fastlstm.text.config import TrainConfig

BLOCKS: dict[str, Any] = {"prune": 0.9, "structured": "blocks"}
UNITS: dict[str, Any] = {"prune": 0.5, "structured": "units"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "int2"}, "`to` is 'int2', expected one of fp32, fp16, int8, int4"),
        ({"prune": 1.0}, "`prune` is 1.0, expected a number from 0.001 to 0.999"),
        ({"prune": 90}, "`prune` is 90, expected a number from 0.001 to 0.999"),
        ({"prune": 0.0}, "`prune` is 0.0, expected a number from 0.001"),
        ({"structured": "blocks"}, "`structured` is for pruning; give the share of the weights"),
        ({"schedule": DEFAULT_SCHEDULE}, "`schedule` is for pruning; .* too: `prune=0.9`"),
        ({**BLOCKS, "to": "int4"}, "`to='int4'` has no block-sparse form; give `to='int8'` "),
        ({**UNITS, "schedule": DEFAULT_SCHEDULE}, "removes units once, .*; leave out `schedule`"),
        ({**UNITS, "rnn_size": 64}, "leave out `rnn_size`"),
        ({"alpha": 0.9}, "`alpha` is for distillation; .* teacher too: `distil='RUN'`"),
        ({"temperature": 4.0, "to": "int8"}, "`temperature` is for distillation"),
        ({"output_rank": 8, "alpha": 0.3}, "`alpha` is for distillation"),
        ({"output_rank": 0}, "`output_rank` is 0, expected a number from 1"),
        ({"distil": "a", "alpha": 1.5}, "`alpha` is 1.5, expected a number from 0.0 to 1.0"),
        ({"to": "int8", "max_loss": -0.1}, "`max_loss` is -0.1, expected a number from 0.0"),
        ({"prune": 0.5, "schedule": "polynomial:100,900,3,20", "steps": 500},
         "`schedule` prunes until step 900, and training ends after 500 steps; .* smaller END"),
        ({"prune": 0.5, "schedule": "polynomial:0,1,3,20", "budget": "1m"},
         "`schedule` prunes until 100 % of a budget, after the last step; only weights"),
        ({"prune": 0.5, "schedule": "polynomial:0,1.0,3,20"}, "until 100 % of a budget"),
        ({"steps": 3, "budget": "1m"}, "`steps` and `budget` exclude each other"),
    ],
)  # fmt: skip
def test_refusals(options, message):
    with pytest.raises(ConfigError) as caught:
        CompressConfig(**options)
    assert re.search(message, str(caught.value)), caught.value


@pytest.mark.parametrize(
    "schedule",
    ["linear:0,1,1,1", "polynomial", "polynomial:0,1,3", "polynomial:0.6,0.05,3,20",
     "polynomial:0,1,3,0.5", "polynomial:a,b,c,d", "polynomial:0,1,3,0", "polynomial:0,1,-3,10",
     "polynomial:-1,5,3,1",
     "polynomial:0,1,nan,1e999"],
)  # fmt: skip
def test_an_invalid_schedule_is_refused(schedule):
    with pytest.raises(ConfigError, match="expected polynomial:BEGIN,END,POWER,EVERY such as"):
        CompressConfig(prune=0.5, schedule=schedule)


def test_schedules_in_shares_and_steps():
    shares = CompressConfig(prune=0.9).pruning_schedule()
    assert shares == PruningSchedule(final=0.9, begin=0.02, end=0.4, power=3.0, every=10)
    steps = CompressConfig(prune=0.5, schedule="polynomial:0,1000,1,10").pruning_schedule()
    assert steps == PruningSchedule(final=0.5, begin=0, end=1000, power=1.0, every=10)
    assert isinstance(steps.begin, int)
    for options in ({"steps": 1000}, {"epochs": 1.0}, {"budget": "1m"}):
        CompressConfig(prune=0.5, schedule="polynomial:0,1000,1,10", **options)  # type: ignore[arg-type]
    for options in ({"steps": 1000}, {"epochs": 1.0}):
        CompressConfig(prune=0.5, schedule="polynomial:0,1.0,1,10", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "trains"),
    [({"to": "int8"}, False), ({"to": "int4"}, False), ({"to": "int4", "steps": 5}, True),
     ({"prune": 0.5}, True), ({"rnn_size": 16}, True), ({"distil": "a"}, True),
     ({"hidden_size": 16}, True), ({"to": "fp16", "budget": "2m"}, True),
     ({"output_rank": 8}, False), ({"output_rank": 8, "steps": 3}, True)],
)  # fmt: skip
def test_what_trains(options, trains):
    config = CompressConfig(**options)
    assert config.trains == trains
    config.require_work()


def test_a_new_size_makes_run_the_teacher():
    assert CompressConfig(rnn_size=64).distils
    assert CompressConfig(rnn_size=64).is_new_student
    assert not CompressConfig(distil="teacher").is_new_student
    assert CompressConfig(distil=Path("a/b")).distil == "a/b"  # type: ignore[arg-type]


def test_training_options_exist_in_train():
    names = set(TRAINING)
    assert names <= set(TrainConfig.__dataclass_fields__)
    assert names <= set(CompressConfig.__dataclass_fields__)


def test_pruning_to_no_more_zeros_is_refused():
    source = {"prune": 0.75, "structured": "blocks"}
    with pytest.raises(ConfigError, match=r"is no more than the 0\.75 that RUN was pruned by"):
        CompressConfig(prune=0.75, structured="blocks").require_change(source)
    CompressConfig(prune=0.8, structured="blocks").require_change(source)
    CompressConfig(prune=0.5, structured="units").require_change(source)
    CompressConfig(prune=0.5).require_change(source)
    CompressConfig(to="int8").require_change(source)
    CompressConfig(prune=0.5).require_change({})


def test_the_format_that_run_has_already_is_refused():
    source = {"weights": "int8", "prune": None}
    with pytest.raises(ConfigError, match="RUN is stored as int8 already, so `to='int8'` changes"):
        CompressConfig(to="int8").require_change(source)
    for options in ({"to": "int4"}, {"to": "int8", "budget": "5s"}, {"to": "int8", "prune": 0.5}):
        CompressConfig(**options).require_change(source)
    CompressConfig(to="int8").require_change({"weights": "fp32"})


def polynomial_decay(step, final, begin, end, power, every):
    """`PolynomialDecay.__call__` of tensorflow-model-optimization 0.8.1, in plain numbers."""
    is_in_range = step >= begin and (step <= end or end < 0)
    is_turn = (step - begin) % every == 0
    p = min(1.0, max(0.0, (step - begin) / (end - begin)))
    return is_in_range and is_turn, -final * (1 - p) ** power + final


@pytest.mark.parametrize(
    ("final", "begin", "end", "power", "every"),
    [(0.9, 0, 100, 3, 10), (0.8, 7, 63, 3, 1), (0.75, 10, 95, 2.5, 20), (0.999, 1, 2, 3, 100)],
)
def test_the_schedule_equals_polynomial_decay(final, begin, end, power, every):
    schedule = PruningSchedule(final=final, begin=begin, end=end, power=power, every=every)
    for step in range(end + 50):
        is_due, sparsity = polynomial_decay(step, final, begin, end, power, every)
        assert schedule.is_due(step, step) == is_due, step
        assert schedule.sparsity(step) == pytest.approx(sparsity, abs=1e-12), step
    assert schedule.sparsity(begin) == 0.0
    assert schedule.sparsity(end) == final


def test_a_schedule_of_one_step_prunes_at_once():
    schedule = PruningSchedule(final=0.5, begin=4, end=4)
    assert [schedule.sparsity(step) for step in (3, 4, 5)] == [0.0, 0.5, 0.5]
    assert [schedule.is_due(step, step) for step in (3, 4, 5)] == [False, True, False]


def test_shares_become_steps_if_the_steps_are_known():
    shares = PruningSchedule(final=0.5, begin=0.05, end=0.6)
    steps = shares.resolved(1000)
    assert (steps.begin, steps.end, type(steps.begin), type(steps.end)) == (50, 600, int, int)
    assert str(steps) == "from step 50 to step 600"
    assert shares.resolved(None) == shares
    assert str(shares) == "from 5 % to 60 % of the run"
    assert steps.resolved(10) == steps, "steps stay"
    assert (in_steps(1, 1000), in_steps(1.0, 1000), in_steps(0.5, None)) == (1, 1000, 0.5)


def test_a_budget_renews_masks_every_so_many_steps():
    schedule = PruningSchedule(final=0.5, begin=0.25, end=0.75, power=1.0, every=5)
    assert [schedule.is_due(step, 0.3) for step in (9, 10, 11)] == [False, True, False]
    assert not schedule.is_due(10, 0.24)
    assert not schedule.is_due(10, 0.76)
    assert schedule.sparsity(0.5) == 0.25
