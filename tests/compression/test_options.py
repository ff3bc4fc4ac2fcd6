"""What may be asked of a compression."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fastlstm.compression.options import DEFAULT_SCHEDULE, TRAINING, CompressConfig, PruningSchedule
from fastlstm.errors import ConfigError
from fastlstm.text.config import TrainConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "int2"}, "`to` is 'int2', expected one of fp32, fp16, int8, int4"),
        ({"prune": 1.0}, "`prune` is 1.0, expected a number from 0.001 to 0.999"),
        ({"prune": 90}, "`prune` is 90, expected a number from 0.001 to 0.999"),
        ({"prune": 0.0}, "`prune` is 0.0, expected a number from 0.001"),
        ({"structured": "blocks"}, "`structured` is for pruning; give the share of the weights"),
        ({"schedule": DEFAULT_SCHEDULE}, "`schedule` is for pruning; .* too: `prune=0.9`"),
        (
            {"prune": 0.9, "structured": "blocks", "to": "int4"},
            "`to='int4'` has no block-sparse form; give `to='int8'` with `structured='blocks'`",
        ),
        (
            {"prune": 0.5, "structured": "units", "schedule": DEFAULT_SCHEDULE},
            "`structured='units'` removes units once, .*; leave out `schedule`",
        ),
        ({"prune": 0.5, "structured": "units", "rnn_size": 64}, "leave out `rnn_size`"),
        ({"alpha": 0.9}, "`alpha` is for distillation; .* teacher too: `distil='RUN'`"),
        ({"temperature": 4.0, "to": "int8"}, "`temperature` is for distillation"),
        ({"output_rank": 8, "alpha": 0.3}, "`alpha` is for distillation"),
        ({"output_rank": 0}, "`output_rank` is 0, expected a number from 1"),
        ({"distil": "a", "alpha": 1.5}, "`alpha` is 1.5, expected a number from 0.0 to 1.0"),
        ({"to": "int8", "max_loss": -0.1}, "`max_loss` is -0.1, expected a number from 0.0"),
        (
            {"prune": 0.5, "schedule": "polynomial:100,900,3,20", "steps": 500},
            "`schedule` prunes until step 900, and training ends after 500 steps; .* smaller END",
        ),
        (
            {"prune": 0.5, "schedule": "polynomial:0,1,3,20", "budget": "1m"},
            "`schedule` prunes until 100 % of a budget, after the last step; only weights",
        ),
        ({"prune": 0.5, "schedule": "polynomial:0,1.0,3,20"}, "until 100 % of a budget"),
        ({"steps": 3, "budget": "1m"}, "`steps` and `budget` exclude each other"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
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
def test_an_invalid_schedule_is_refused(schedule: str) -> None:
    with pytest.raises(ConfigError, match="expected polynomial:BEGIN,END,POWER,EVERY such as"):
        CompressConfig(prune=0.5, schedule=schedule)


def test_schedules_in_shares_and_steps() -> None:
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
def test_what_trains(options: dict[str, Any], trains: bool) -> None:
    config = CompressConfig(**options)
    assert config.trains == trains
    config.require_work()


def test_nothing_to_do() -> None:
    with pytest.raises(ConfigError, match="there is nothing to do; give `to` "):
        CompressConfig(max_loss=0.1).require_work()


def test_a_new_size_makes_run_the_teacher() -> None:
    assert CompressConfig(rnn_size=64).distils
    assert CompressConfig(rnn_size=64).is_new_student
    assert not CompressConfig(distil="teacher").is_new_student
    assert CompressConfig(distil=Path("a/b")).distil == "a/b"  # type: ignore[arg-type]


def test_options_of_the_other_kind() -> None:
    with pytest.raises(
        ConfigError, match=r"`hidden_size` is not an option for a text; .*`rnn_size`"
    ):
        CompressConfig(hidden_size=16).refuse(["hidden_size"], "a text")


def test_training_options_exist_in_train() -> None:
    names = set(TRAINING)
    assert names <= set(TrainConfig.__dataclass_fields__)
    assert names <= set(CompressConfig.__dataclass_fields__)


def test_pruning_to_no_more_zeros_is_refused() -> None:
    source = {"prune": 0.75, "structured": "blocks"}
    with pytest.raises(ConfigError, match=r"is no more than the 0\.75 that RUN was pruned by"):
        CompressConfig(prune=0.75, structured="blocks").require_change(source)
    CompressConfig(prune=0.8, structured="blocks").require_change(source)
    CompressConfig(prune=0.5, structured="units").require_change(source)
    CompressConfig(prune=0.5).require_change(source)
    CompressConfig(to="int8").require_change(source)
    CompressConfig(prune=0.5).require_change({})


def test_the_format_that_run_has_already_is_refused() -> None:
    source = {"weights": "int8", "prune": None}
    with pytest.raises(ConfigError, match="RUN is stored as int8 already, so `to='int8'` changes"):
        CompressConfig(to="int8").require_change(source)
    for options in ({"to": "int4"}, {"to": "int8", "budget": "5s"}, {"to": "int8", "prune": 0.5}):
        CompressConfig(**options).require_change(source)
    CompressConfig(to="int8").require_change({"weights": "fp32"})
