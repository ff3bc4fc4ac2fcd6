"""Options of training that all jobs share."""

import dataclasses

import pytest

from fastlstm.errors import ConfigError
from fastlstm.forecast.config import ForecastConfig
from fastlstm.sequence.config import SequenceConfig
from fastlstm.text.config import TrainConfig
from fastlstm.training.options import BOUNDS, MAY_CHANGE, TrainingOptions

FIELDS = {field.name: field for field in dataclasses.fields(TrainingOptions)}


def test_every_number_has_bounds_that_hold_its_default():
    numbers = {name for name, f in FIELDS.items() if "int" in str(f.type) or "float" in str(f.type)}
    assert numbers == BOUNDS.keys()
    for name, (low, high) in BOUNDS.items():
        default = FIELDS[name].default
        assert default is None or low <= default <= high, name
    assert FIELDS.keys() >= MAY_CHANGE


@pytest.mark.parametrize("kind", [TrainConfig, ForecastConfig, SequenceConfig])
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"accumulate": 0}, "`accumulate` is 0, expected a number from 1"),
        ({"ema": 1.0}, r"`ema` is 1\.0, expected a number from 0"),
        ({"optimizer": "adamax"}, "`optimizer` is 'adamax', expected one of"),
        ({"device": "tpu"}, "`device` is 'tpu', expected one of auto, cpu, cuda"),
        ({"steps": 5, "epochs": 2}, "`steps` and `epochs` exclude each other"),
        ({"warmup": 0.6, "cooldown": 0.6}, "is more than the whole run; their sum must be at most"),
        ({"strict_kernels": 1}, "`strict_kernels` is 1, expected True or False"),
    ],
)
def test_every_job_checks_the_options(kind, given, told):
    with pytest.raises(ConfigError, match=told):
        kind(**given)
