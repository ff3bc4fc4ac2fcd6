"""The teacher of a forecaster: read, and refused where it forecasts something else."""

from __future__ import annotations

import numpy as np

from fastlstm.errors import ConfigError
from fastlstm.forecast.files import StoredForecaster, read_forecaster

_SIZES = (
    *("input_size", "horizon", "num_targets", "num_past", "num_future", "categories"),
    *("num_static", "static_categories", "has_missing", "output", "stateful"),
)


def read_teacher(path: str, student: StoredForecaster) -> StoredForecaster:
    """Reads a teacher for a student.

    Raises:
        ConfigError: it forecasts other steps, from other columns or of another table.
        FastLSTMError: as `read_forecaster`.
    """
    teacher = read_forecaster(path)
    own, other = student.network.config, teacher.network.config
    names = [*_SIZES, *(("patch",) if own.stateful else ())]
    pairs = [(name, getattr(other, name), getattr(own, name)) for name in names]
    pairs += [
        ("columns", teacher.schema.columns, student.schema.columns),
        ("static columns", teacher.config.static, student.config.static),
        ("categories", teacher.schema.categories, student.schema.categories),
        ("frequency", str(teacher.schema.frequency), str(student.schema.frequency)),
    ]
    for name, theirs, ours in pairs:
        if theirs != ours:
            raise _unfit(path, f"has {name} {_shown(theirs)} and the student {_shown(ours)}")
    for which in ("mean", "std"):
        if not np.array_equal(getattr(teacher.scaler, which), getattr(student.scaler, which)):
            raise _unfit(path, "was trained on another table: it scales the columns differently")
    theirs, ours = (s.series and s.series.to_json() for s in (teacher, student))
    if theirs != ours:
        raise _unfit(path, "was trained on other series: it scales them differently")
    return teacher


def _shown(value: object) -> str:
    return f"{value!s:.60}"


def _unfit(path: str, why: str) -> ConfigError:
    return ConfigError(
        f"`distil={path!r}`: the teacher {why}; a teacher reads the same windows and forecasts the"
        " same steps, leave it out or name another"
    )
