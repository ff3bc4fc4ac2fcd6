"""Prepares tables according to a forecaster's configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from fastlstm.errors import ConfigError, DataError, DataErrors
from fastlstm.forecast.config import READING, ForecastConfig
from fastlstm.forecast.data.calendar import with_calendar
from fastlstm.forecast.data.csv_look import LOOK_HINT
from fastlstm.forecast.data.dataset import SeriesDataset, prepare_table
from fastlstm.forecast.data.padding import padded
from fastlstm.forecast.data.problems import (
    Finding,
    findings,
    listed_findings,
    looks_like,
    merged,
    settings,
)
from fastlstm.forecast.data.roles import LISTS, RoleRequest
from fastlstm.forecast.data.table import row_blocks
from fastlstm.forecast.data.timeline import Timeline

_ROLES = ("time", "series", *LISTS)
_MAX_TRIALS = 8
Progress = Callable[[int, int | None], None]


def prepare(
    frame: Any,
    config: ForecastConfig,
    on_progress: Progress | None = None,
    like: Timeline | None = None,
    roles: RoleRequest | None = None,
) -> SeriesDataset:
    """Prepares a table; see `fastlstm.forecast.data.dataset.prepare_table`.

    By default the roles of the columns are those of `config`, whose padding and calendar are added.
    """
    if hasattr(frame, "read_all"):  # a stream of Arrow can be read once
        frame = frame.read_all()
    try:
        dataset = _read(frame, config, roles, like, on_progress)
    except DataError as error:
        if roles is None and (found := findings(error)):
            raise _with_all_options(error, found, frame, config) from None
        raise
    if roles is not None:
        return dataset
    return with_calendar(padded(dataset, config.pad_start or 0), config.calendar or ())


def _read(
    frame: Any,
    config: ForecastConfig,
    roles: RoleRequest | None = None,
    like: Timeline | None = None,
    on_progress: Progress | None = None,
    is_trial: bool = False,
) -> SeriesDataset:
    try:
        roles = roles or RoleRequest(**{name: getattr(config, name) for name in _ROLES})
        return prepare_table(frame, config, roles, like, config.cache_dir, on_progress, is_trial)
    except UnicodeError as error:
        where = f"`encoding={config.encoding!r}`"
        if "BOM" in str(error):  # of which class, depends on Python's version
            text = f"{where}: the text does not start with a byte order mark; give one with"
            raise DataError(f"{text} the order, such as `encoding='utf-16-le'`") from error
        if isinstance(error, UnicodeDecodeError):
            byte = f"byte {error.object[error.start]:#x} is no character in {where}"
            raise DataError(f"{byte}; give another, or correct the file") from error
        raise DataError(f"{where}: {error}; give another") from error


def _with_all_options(
    error: DataError, found: list[Finding], frame: Any, config: ForecastConfig
) -> DataError:
    """Returns an error with all options that the first rows of a table need, found by trial."""
    own = {name: getattr(config, name) for name in READING + _ROLES}
    every, rest = list(found), ""
    for _ in range(_MAX_TRIALS):
        try:
            tried = replace(config, **merged(every, own))
            _read(frame, tried, is_trial=True)
            break
        except DataError as next_error:
            more = [one for one in findings(next_error) if one not in every]
            if not more:
                if str(next_error) != str(error):
                    rest = f"; but even with these options: {next_error}"
                break
            every += more
        except ConfigError:  # options that exclude each other
            return error
    cure = f"add {settings(merged(every))}{rest}"
    if isinstance(error, DataErrors):
        return DataErrors(*error.args, DataError(f"for all of these {cure}"))
    if len(every) == len(found):
        return DataError(f"{error}{rest}") if rest else error
    name, is_look, text = str(error).partition(" looks like ")
    if is_look and ": add " in text:
        return looks_like(name, every, rest or (LOOK_HINT if LOOK_HINT in text else ""))
    return DataError(
        f"{error}; with that it looks like {listed_findings(every[len(found) :])}: {cure}"
    )


def prepare_future(frame: Any, config: ForecastConfig, like: SeriesDataset) -> SeriesDataset:
    """Prepares a table of future covariates: series, time and the future columns.

    `like` is the past of the series; its columns of series and time are expected. Raises DataError:
    times of another kind than in `like`, and errors of `prepare`.
    """
    roles = RoleRequest(
        time=like.roles.time,
        series=like.roles.series,
        past=(),
        future=config.future,
        categorical=tuple(name for name in config.categorical if name in config.future),
        has_target=False,
    )
    future = prepare(frame, config, like=like.timeline, roles=roles)
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


def require_counts(dataset: SeriesDataset) -> None:
    """Checks that every target value is a count or missing; reads the targets once. Raises
    DataError: a negative number or a fraction; names its series, row and value."""
    table, names = dataset.table, dataset.roles.target
    for begin, end in row_blocks(0, table.num_rows, len(table.columns)):
        rows = table.whole_rows(begin, end)[:, : len(names)]
        bad = np.argwhere((rows < 0) | (rows != np.floor(rows)) & ~np.isnan(rows))
        if len(bad):
            row, column = bad[0]
            segment = table.segments.of_rows(np.array([begin + row]))[0]
            series = dataset.series[int(table.segments.series[segment])]
            place = begin + int(row) - int(table.own_first_rows[segment])
            raise DataError(
                f"target '{names[column]}' is {rows[row, column]:g} in row {place} of series"
                f" '{series}', expected counts (0, 1, 2 …) for `output='negative_binomial'`; use"
                " `output='student_t'` or quantiles"
            )
