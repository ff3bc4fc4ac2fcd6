"""Tables as a forecaster's configuration asks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastlstm.forecast_config import ForecastConfig
from fastlstm.series.arrange import Policy
from fastlstm.series.dataset import Dtype, PrepareOptions, SeriesDataset, prepare_table
from fastlstm.series.roles import RoleRequest

_ROLES = ("target", "time", "series", "past", "future", "static", "categorical", "ignore")
Progress = Callable[[int, int | None], None]


def prepare(
    frame: Any,
    config: ForecastConfig,
    on_progress: Progress | None = None,
    dtype: Dtype = "auto",
) -> SeriesDataset:
    """Prepares a table; see `fastlstm.series.dataset.prepare_table`."""
    roles = RoleRequest(**{name: getattr(config, name) for name in _ROLES})
    return _prepared(frame, config, roles, on_progress, dtype)


def prepare_ahead(frame: Any, config: ForecastConfig, like: SeriesDataset) -> SeriesDataset:
    """Prepares a table of what is known ahead: series, time and the future columns.

    Args:
        frame: the table.
        config: of the forecaster.
        like: the table whose series are forecast; its columns of series and time are expected.
    """
    roles = RoleRequest(
        time=like.roles.time,
        series=like.roles.series,
        past=(),
        future=config.future,
        categorical=tuple(name for name in config.categorical if name in config.future),
        has_target=False,
    )
    return _prepared(frame, config, roles, None, "auto")


def _prepared(
    frame: Any,
    config: ForecastConfig,
    roles: RoleRequest,
    on_progress: Progress | None,
    dtype: Dtype,
) -> SeriesDataset:
    policy = Policy(config.disorder, config.duplicates, config.gaps)
    options = PrepareOptions(
        roles, policy, dtype, time_format=config.time_format, missing_value=config.missing_value
    )
    return prepare_table(frame, options, config.cache_dir, on_progress)
