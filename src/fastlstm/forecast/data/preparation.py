"""Prepares tables as a forecaster's configuration says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastlstm.errors import DataError
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.arrange import Policy
from fastlstm.forecast.data.dataset import Dtype, PrepareOptions, SeriesDataset, prepare_table
from fastlstm.forecast.data.ingest import Codes
from fastlstm.forecast.data.roles import RoleRequest
from fastlstm.forecast.data.timeline import Timeline

_ROLES = ("target", "time", "series", "past", "future", "static", "categorical", "ignore")
Progress = Callable[[int, int | None], None]


def prepare(
    frame: Any,
    config: ForecastConfig,
    on_progress: Progress | None = None,
    dtype: Dtype = "auto",
    like: Timeline | None = None,
) -> SeriesDataset:
    """Prepares a table; see `fastlstm.forecast.data.dataset.prepare_table`."""
    roles = RoleRequest(**{name: getattr(config, name) for name in _ROLES})
    return _prepared(frame, config, roles, on_progress, dtype, like)


def prepare_future(frame: Any, config: ForecastConfig, like: SeriesDataset) -> SeriesDataset:
    """Prepares a table of future covariates: series, time and the future columns.

    Args:
        frame: the table.
        config: of the forecaster.
        like: the past of the series; its columns of series and time are expected.

    Raises:
        DataError: times of another kind than in `like`, and errors of `prepare`.
    """
    roles = RoleRequest(
        time=like.roles.time,
        series=like.roles.series,
        past=(),
        future=config.future,
        categorical=tuple(name for name in config.categorical if name in config.future),
        has_target=False,
    )
    future = _prepared(frame, config, roles, None, "auto", like.timeline)
    for what, here, there in (
        ("times", future.has_clock, like.has_clock),
        ("time zone", future.time_zone is not None, like.time_zone is not None),
    ):
        if here != there:
            in_future, in_past = ("no ", "") if there else ("", "no ")
            raise DataError(
                f"'{like.roles.time}' has {in_future}{what} in the future table and"
                f" {in_past}{what} in the past table; convert one of them"
            )
    return future


def _prepared(
    frame: Any,
    config: ForecastConfig,
    roles: RoleRequest,
    on_progress: Progress | None,
    dtype: Dtype,
    like: Timeline | None,
) -> SeriesDataset:
    policy = Policy(config.disorder, config.duplicates, config.gaps)
    codes = Codes(config.missing_value, config.keep_value)
    options = PrepareOptions(roles, policy, dtype, config.time_format, codes, like)
    return prepare_table(frame, options, config.cache_dir, on_progress)
