"""Forecasts as a table of the kind of the input, or as Parquet, CSV or Arrow while computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from pyarrow import csv, ipc
from pyarrow import parquet as pq
from torch import Tensor

from fastlstm.errors import ConfigError, DataError, counted, nearest_hint
from fastlstm.estimator import warn
from fastlstm.forecast.calibration import require_known
from fastlstm.forecast.data.calendar import calendar_values, row_times
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.names import canonical
from fastlstm.forecast.data.preparation import prepare, prepare_future
from fastlstm.forecast.data.scaled_windows import ScaledWindows
from fastlstm.forecast.data.table import row_blocks, rows_at_once
from fastlstm.forecast.data.timeline import DAY_US, show_time
from fastlstm.forecast.data.window_index import read_windows
from fastlstm.forecast.evaluation import (
    FAN_LEVELS,
    require_counts,
    series_numbers,
    shown_forecasts,
    shown_past,
)
from fastlstm.forecast.files import StoredForecaster
from fastlstm.forecast.plan import forecast_ends
from fastlstm.forecast.table_schema import numbers_at_fit, renumbered
from fastlstm.forecast.window_forecaster import float64_columns

if TYPE_CHECKING:
    from fastlstm.report.picture import Picture

_WRITERS: dict[str, Any] = {
    ".parquet": pq.ParquetWriter, ".csv": csv.CSVWriter, ".arrow": ipc.new_file
}  # fmt: skip
_GROUP_ROWS = 1 << 19
"""Rows of a group, which is held in memory; fewer in wide tables."""
SERIES_AT_ONCE = 256


def read_past(stored: StoredForecaster, frame: Any) -> SeriesDataset:
    """Reads a table as the one at fit; see `Forecaster.predict`."""
    return prepare(frame, replace(stored.config, **stored.columns), like=stored.schema.timeline)


def read_future(stored: StoredForecaster, future: Any, past: SeriesDataset) -> SeriesDataset | None:
    """Reads the table of future columns.

    Raises:
        ConfigError: there is none, or none is needed.
        DataError: a series that neither `past` nor the table at fit has, or an unusable table.
    """
    config = stored.config
    if future is not None and not config.future:
        raise ConfigError(
            "got `future`, but this Forecaster was fitted without future columns; leave it out,"
            " or fit with future columns"
        )
    if future is None and config.future:
        raise ConfigError(
            f"the forecast needs {', '.join(config.future)} of every step; give a table of them"
            " as `future`"
        )
    if future is None:
        return None
    ahead = prepare_future(future, config, past)
    known = {*map(canonical, past.series), *(stored.series.names if stored.series else ())}
    if unknown := [name for name in ahead.series if canonical(name) not in known]:
        hint = nearest_hint(str(unknown[0]), map(str, past.series))
        raise DataError(
            f"the future table has rows of series '{unknown[0]}', which the past lacks{hint};"
            " leave them out, or add its past"
        )
    return ahead


def future_covariates(
    future: SeriesDataset, past: SeriesDataset, categories: Mapping[str, list[Any]],
    series: NDArray[np.int64], times: NDArray[np.int64],
) -> NDArray[np.float64]:  # fmt: skip
    """Returns the future covariates of every forecast, shape ``(N, h, F)``, in their units.

    `future` has the future columns in the network's order, `categories` are those of fit. `series`
    are the numbers in `past` of the series to forecast, ``(N,)``, `times` those of their steps,
    ``(N, h)``, int64.

    Raises:
        DataError: a step without a row, or without a value of a column that the past always has;
            the message names series and time.
    """
    if past.roles.time is None:  # row 0 of `future` is the first step to forecast
        times = times - times[:, :1]

    def who(n: int) -> str:
        return f"series '{past.series[series[n]]}'" if len(past.series) > 1 else "the table"

    def when(n: int, step: int) -> str:
        return show_time(int(times[n, step])) if past.has_clock else f"step {times[n, step]}"

    table, named = future.table, {canonical(name): n for n, name in enumerate(future.series)}
    owners = np.array([named.get(canonical(past.series[n]), -1) for n in series.tolist()])
    every = np.concatenate([row_times(future), times.reshape(-1)])
    moments, at = np.unique(every, return_inverse=True)
    # Rows are in order of series and time, and so are their keys.
    known = np.repeat(table.segments.series, table.segments.num_rows) * len(moments)
    known += at[: table.num_rows]
    wanted = owners[:, None] * len(moments) + at[table.num_rows :].reshape(times.shape)
    rows = np.searchsorted(known, wanted).clip(max=len(known) - 1)
    if (is_gone := known[rows] != wanted).any():
        n, step = np.argwhere(is_gone)[0].tolist()
        raise DataError(
            f"the future table has no row for {who(n)} at {when(n, step)}; it needs"
            f" {counted(times.shape[1], 'row')} after the end of every series"
        )
    rows = rows.reshape(-1)
    origins = table.origins(table.segments.series[table.segments.of_rows(rows)])
    rows_ahead = read_windows(table, rows, 1).numpy() + origins[:, None]
    values: NDArray[np.float64] = rows_ahead.reshape(*times.shape, -1)
    if (is_missing := np.isnan(values)).any():
        is_missing &= ~_missed_before(past, table.columns)
    if is_missing.any():
        n, step, place = np.argwhere(is_missing)[0].tolist()
        raise DataError(
            f"'{table.columns[place]}' is missing for {who(n)} at {when(n, step)}, a step to"
            " forecast; the past has it in every row with a target: fill it in"
        )
    for place, column in enumerate(table.columns):
        if column in future.categories:
            numbers = numbers_at_fit(column, future, categories)
            values[..., place] = renumbered(values[..., place], numbers)
    return values


def _missed_before(past: SeriesDataset, columns: Sequence[str]) -> NDArray[np.bool_]:
    """Returns for each column whether it is missing in a row of the past that has a target."""
    table, C = past.table, len(past.roles.target)
    places, found = [table.columns.index(name) for name in columns], np.zeros(len(columns), bool)
    for begin, end in row_blocks(0, table.num_rows, len(table.columns)):
        is_missing = np.isnan(table.rows(begin, end))
        found |= is_missing[~is_missing[:, :C].all(1)][:, places].any(0)
    return found


def write_rows(file: Any, suffix: str, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    """Writes tables one after the other into an open file, cast to the schema; `suffix` is
    .parquet, .csv or .arrow."""
    size, waiting = rows_at_once(len(schema), _GROUP_ROWS), list[pa.Table]()
    with _WRITERS[suffix](file, schema) as writer:
        for table in tables:
            waiting.append(table.cast(schema))
            if sum(part.num_rows for part in waiting) >= size:
                writer.write_table(pa.concat_tables(waiting))
                waiting = []
        if waiting:
            writer.write_table(pa.concat_tables(waiting))


class Forecasts:
    """The forecasts of the steps after the end of every series that is long enough, in blocks.

    `dataset` and its `inputs` are the past of the series, `future` its future covariates. A column
    for each of `quantiles`; without levels point forecasts. `say` receives sentences on series that
    are left out, as they are too short, and on series without any value of a target.

    Attributes:
        num_rows: rows of all blocks.
        schema: Arrow schema of every block.

    Raises:
        DataError: every series is too short.
        ConfigError: a level outside the calibrated range.
    """

    def __init__(
        self,
        stored: StoredForecaster,
        dataset: SeriesDataset,
        inputs: ScaledWindows,
        quantiles: Sequence[float] = (),
        future: SeriesDataset | None = None,
        say: Callable[[str], object] = warn,
    ) -> None:
        require_known(quantiles)
        self.stored, self.dataset, self.future, self._say = stored, dataset, future, say
        self.quantiles, self._inputs = tuple(quantiles), inputs
        self._has_told_logarithms = False
        sizes = stored.network.config
        self._last, short = forecast_ends(dataset, sizes.input_size)
        if not len(self._last):
            raise DataError(short)
        if short:
            say(f"not forecast: {short}")
        self.num_rows = len(self._last) * sizes.horizon
        self._names = pa.array(list(dataset.series))
        no_answers = np.empty((0, sizes.horizon, sizes.num_targets, len(quantiles) or 1))
        self.schema = self._table(self._last[:0], no_answers).schema

    @property
    def csv_schema(self) -> pa.Schema:
        """The schema of a CSV: dates where every time is midnight, else times without fractions if
        none has one; float32, in which a forecaster computes, where it has all digits."""
        frequency, starts = self.dataset.frequency, self.dataset.table.segments.start_times
        step = frequency.step if frequency.unit == "us" else 0

        def are_whole(size_us: int) -> bool:
            return step % size_us == 0 and bool((starts[self._last] % size_us == 0).all())

        fields = list[pa.Field]()
        for field in self.schema:
            kind = field.type
            if pa.types.is_timestamp(kind) and are_whole(1_000_000):
                is_date = kind.tz is None and are_whole(DAY_US)
                kind = pa.date32() if is_date else pa.timestamp("s", kind.tz)
            if pa.types.is_float64(kind) and not float64_columns(self.stored):
                kind = pa.float32()
            fields.append(field.with_type(kind))
        return pa.schema(fields)

    def blocks(self) -> Iterator[pa.Table]:
        """Yields tables, each with the rows of `SERIES_AT_ONCE` series.

        Raises:
            DataError: future covariates are missing.
        """
        segments = self._last
        known = self._known(segments)
        for begin in range(0, len(segments), SERIES_AT_ONCE):
            part = slice(begin, begin + SERIES_AT_ONCE)
            ahead = None if known is None else known[part]
            answers = self._answers(segments[part], ahead, self.quantiles)
            yield self._table(segments[part], answers)

    def table(self) -> pa.Table:
        """Returns all rows as one table."""
        return pa.concat_tables(self.blocks())

    def plot(self, series: Sequence[Any] | None = None, max_panels: int = 12) -> Picture:
        """Returns the end of the past, the forecast, and intervals of 50, 80 and 95 %, as a
        matplotlib Figure. Each series and target has a panel, at most `max_panels` in all. `series`
        names the series to draw; default: evenly spread ones.

        Raises:
            ConfigError: an unknown series, or max_panels below 1.
            DataError: future covariates are missing.
        """
        require_counts(max_panels=max_panels)
        from fastlstm.report.picture import forecast_picture

        return forecast_picture(self.events(series_numbers(self.dataset, series), max_panels))

    def __repr__(self) -> str:
        return f"Forecasts({counted(self.num_rows, 'row')} of {', '.join(self.schema.names)})"

    def _repr_html_(self) -> str:
        return self.plot(max_panels=4)._repr_html_()

    def events(self, of: Sequence[int] | None, limit: int) -> list[dict[str, Any]]:
        """Returns an event `forecast` of each target of the series numbered `of`, without actual
        values; None takes evenly spread series, `limit` events at most.

        Raises:
            DataError: these series are too short, or future covariates are missing.
        """
        segments, sizes = self.dataset.table.segments, self.stored.network.config
        C, h = sizes.num_targets, sizes.horizon
        last = self._last if of is None else self._last[np.isin(segments.series[self._last], of)]
        if not len(last):
            raise DataError("these series are too short to forecast; name others")
        many = min(len(last), max(1, limit // C))
        last = last[np.linspace(0, len(last) - 1, many).astype(np.int64)]
        shown = min(sizes.input_size, shown_past(h))
        rows = segments.first_rows[last] + segments.num_rows[last] - shown
        known = self._known(last)
        center, ends = (self._answers(last, known, levels) for levels in ((), FAN_LEVELS))
        picks = [(n, c) for n in range(len(last)) for c in range(C)][:limit]
        return shown_forecasts(self.dataset, rows, shown, picks, center, ends)

    def _known(self, segments: NDArray[np.int64]) -> NDArray[np.float64] | None:
        """Returns the scaled future covariates of the forecasts, ``(N, h, F)``."""
        stored, sizes = self.stored, self.stored.network.config
        if not sizes.num_future:
            return None
        series = self.dataset.table.segments.series[segments]
        times = _times_ahead(self.dataset, segments, sizes.horizon)
        known = calendar_values(self.dataset, times, stored.config.calendar or ())
        if self.future is not None:
            names = stored.schema.categories
            given = future_covariates(self.future, self.dataset, names, series, times)
            known = np.concatenate([given, known], -1)
        place = sizes.num_targets + sizes.num_past
        return (known - stored.scaler.mean[place:]) / stored.scaler.std[place:]

    @torch.no_grad()
    def _answers(
        self,
        segments: NDArray[np.int64],
        known: NDArray[np.float64] | None,
        quantiles: Sequence[float],
    ) -> NDArray[np.float64]:
        """Returns forecasts or quantiles ``(N, h, C, levels)`` in the table's units, of the windows
        that end the segments."""
        stored, table, sizes = self.stored, self.dataset.table, self.stored.network.config
        ends = table.segments.first_rows[segments] + table.segments.num_rows[segments]
        rows = ends - sizes.input_size
        past = read_windows(table, rows, sizes.input_size)
        self._inputs.add_level(past, rows, sizes)
        empty = past.new_full((len(past), sizes.horizon, past.shape[2]), float("nan"))
        is_missing = past[:, :, : sizes.num_targets].isnan()
        is_unknown = is_missing.all(1)
        self._tell_missing(segments, is_missing, is_unknown)
        values, statics = self._inputs.prepare(torch.cat([past, empty], 1), segments)
        if known is not None:
            place = sizes.num_targets + sizes.num_past
            values[:, sizes.input_size :, place:] = torch.from_numpy(known).float()
        past = values[:, : sizes.input_size, : sizes.num_targets]
        is_without = (past < 0 if sizes.non_negative else past <= 0).any()
        if sizes.normalize == "log" and is_without and not self._has_told_logarithms:
            self._has_told_logarithms = True
            self._say(
                "a target is 0 or less, and the forecaster reads logarithms: its forecasts may be"
                " far off; train again with such rows, or with `normalize='last'`"
            )
        places = self._inputs.places(segments)
        found = stored.answer(values, statics, quantiles, places)
        found = found.masked_fill(is_unknown[:, None, :, None], float("nan")).double()
        scales = self._inputs.scales(segments)
        mean, std = (scale[:, None, : sizes.num_targets, None] for scale in scales)
        return np.asarray(found.numpy() * std + mean)

    def _tell_missing(
        self, segments: NDArray[np.int64], is_missing: Tensor, is_unknown: Tensor
    ) -> None:
        """Tells targets that end half a horizon before the table, and of series without any
        value of a target: there is no level to forecast from."""
        behind = is_missing.flip(1).long().cumprod(1).sum(1).masked_fill(is_unknown, 0).amax(0)
        for name, count in zip(self.dataset.roles.target, behind.tolist(), strict=True):
            if 2 * count >= self.stored.network.config.horizon:
                text = f"'{name}' has no value in the last {counted(count, 'row')}"
                self._say(f"{text}: its forecasts start from older ones")
        if not is_unknown.any():
            return
        series, target = (int(place) for place in is_unknown.nonzero()[0])
        name = self.dataset.series[int(self.dataset.table.segments.series[segments[series]])]
        count = int(is_unknown.any(1).sum())
        more = f" ({count} such series)" if count > 1 else ""
        self._say(
            f"series '{name}' has no value of '{self.dataset.roles.target[target]}'{more}: such"
            " forecasts are NaN"
        )

    def _table(self, segments: NDArray[np.int64], answers: NDArray[np.float64]) -> pa.Table:
        """Returns a row per series and step."""
        times = _times_ahead(self.dataset, segments, answers.shape[1])
        table = step_columns(self.dataset, self._names, segments, times)
        for number, name in enumerate([f"-q{level:g}" for level in self.quantiles] or [""]):
            for c, target in enumerate(self.dataset.roles.target):
                table[f"{target}{name}"] = pa.array(answers[..., c, number].reshape(-1))
        return pa.table(table)


def step_columns(
    dataset: SeriesDataset, names: pa.Array, segments: NDArray[np.int64], times: NDArray[np.int64]
) -> dict[str, pa.Array]:
    """Returns the columns of series and time with a row for each of the `times` ``(N, h)`` of N
    segments; `names` are those of all series."""
    roles, columns = dataset.roles, dict[str, pa.Array]()
    if roles.series is not None:
        series = dataset.table.segments.series[segments]
        columns[roles.series] = names.take(pa.array(np.repeat(series, times.shape[1])))
    columns["step" if roles.time is None else roles.time] = as_times(dataset, times)
    return columns


def _times_ahead(
    dataset: SeriesDataset, last: NDArray[np.int64], horizon: int
) -> NDArray[np.int64]:
    """Returns the times of the steps after the end of the segments `last`, ``(N, h)``."""
    return times_from(dataset, last, dataset.table.segments.num_rows[last], horizon)


def times_from(
    dataset: SeriesDataset, segments: NDArray[np.int64], steps: NDArray[np.int64], count: int
) -> NDArray[np.int64]:
    """Returns the times of `count` steps of each of N segments, from the row in `steps` on; that
    row may lie after the segment. The shape is ``(N, count)``."""
    starts, frequency = dataset.table.segments.start_times[segments], dataset.frequency
    if frequency.unit in ("us", "rows"):
        own = steps[:, None] + np.arange(count, dtype=np.int64)
        return np.asarray(starts[:, None] + own * frequency.step)
    pairs = zip(starts.tolist(), steps.tolist(), strict=True)
    times = [frequency.after(start, step + count)[step:] for start, step in pairs]
    return np.array(times, dtype=np.int64).reshape(-1, count)


def as_times(dataset: SeriesDataset, times: NDArray[np.int64]) -> pa.Array:
    """Returns times of a table as an Arrow array: counted rows, or times of the table's zone."""
    steps = pa.array(times.reshape(-1))
    if dataset.has_clock:
        steps = steps.cast(pa.timestamp("us", None if dataset.is_wall else dataset.time_zone))
        if dataset.is_wall:
            steps = pc.assume_timezone(
                steps, dataset.time_zone, ambiguous="earliest", nonexistent="latest"
            )
    return steps


def kind_of(frame: Any) -> str:
    """Returns the kind of a table: "array", "pandas", "polars", or "arrow" for anything else. Files
    are "pandas" if it is installed: it prints rows, where Arrow prints columns."""
    if isinstance(frame, str | Path | list | tuple) and find_spec("pandas") is not None:
        return "pandas"
    if isinstance(frame, np.ndarray):
        return "array"
    module = type(frame).__module__.split(".")[0]
    return module if module in ("pandas", "polars") else "arrow"


def as_kind(table: pa.Table, kind: str) -> Any:
    """Returns the table as a frame of a kind of `kind_of`; an array is ``(h, columns)``."""
    if kind == "array":
        columns = [table[name].to_numpy() for name in table.column_names if name != "step"]
        return np.stack(columns, 1)
    if kind == "pandas":
        return table.to_pandas()
    if kind == "polars":
        import polars

        return polars.from_arrow(table)
    return table
