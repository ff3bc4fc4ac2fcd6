"""Second pass over a table: rows in the order of series and time, cut where a step is missing.

Works on mapped files a stretch at a time, so that memory does not grow with the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import DataError, Setting, counted
from fastlstm.forecast.data.ingest import IngestResult
from fastlstm.forecast.data.table import Segments, rows_at_once
from fastlstm.forecast.data.timeline import (
    BUSINESS_DAYS,
    DAYS,
    ROWS,
    Frequency,
    are_business_days,
    find_frequency,
    show_time,
)
from fastlstm.system.storage import allocate

_ROWS = 1 << 20
"""Rows of a stretch."""


@dataclass(frozen=True)
class Policy:
    """What to do with times that are not as they should be.

    Attributes:
        disorder: rows of a series that go back in time are an error, or are sorted.
        duplicates: two rows of one series and time are an error, or the first or last one counts.
        gaps: a window never crosses one, or missing rows are put in, without values.
    """

    disorder: Literal["error", "sort"] = "error"
    duplicates: Literal["error", "first", "last"] = "error"
    gaps: Literal["split", "fill"] = "split"


@dataclass(frozen=True)
class Arranged:
    """A table's rows in order.

    Attributes:
        values: file of (N, C) float32.
        num_rows: N, after what was left out or put in.
        segments: of the rows.
        frequency: of the times.
        counts: rows sorted, duplicates left out, gaps, rows put in; what was found, by name.
    """

    values: Path
    num_rows: int
    segments: Segments
    frequency: Frequency
    counts: dict[str, int]


class Arrangement:
    """The pass itself.

    Args:
        intaken: what the first pass wrote; its files are rearranged.
        num_columns: C.
        policy: what to do about disorder, duplicates and gaps.
        origin: what messages call the table.
        like: the frequency that another table has; taken where the times allow it, too.
    """

    def __init__(
        self,
        intaken: IngestResult,
        num_columns: int,
        policy: Policy,
        origin: str,
        like: Frequency | None = None,
    ) -> None:
        self._in, self._columns, self._policy, self._origin = intaken, num_columns, policy, origin
        self._like = like
        self._num_rows = intaken.num_rows
        self._counts = {"sorted": 0, "duplicates": 0, "gaps": 0, "filled": 0}
        self._num_in_series = intaken.counts.copy()
        self._paths = {"values": intaken.values}
        if intaken.times is not None:
            self._paths["times"] = intaken.times

    def run(self) -> Arranged:
        """Arranges the rows.

        Raises:
            DataError: disorder, duplicates or times off the grid, where the policy refuses them.
        """
        if not self._in.is_grouped:
            self._group()
        if self._in.times is None:
            counts = self._in.counts
            first = np.cumsum(counts) - counts
            series = np.arange(len(counts), dtype=np.int64)
            segments = Segments(series, first, counts, np.zeros_like(first))
            return self._arranged(segments, ROWS)
        self._order()
        self._remove_duplicates()
        times = self._map("times")
        frequency = self._frequency(times)
        segments = self._cut(times, frequency)
        if self._policy.gaps == "fill" and self._counts["gaps"]:
            segments = self._fill(segments, frequency)
        return self._arranged(segments, frequency)

    def _arranged(self, segments: Segments, frequency: Frequency) -> Arranged:
        return Arranged(self._paths["values"], self._num_rows, segments, frequency, self._counts)

    # files --------------------------------------------------------------------------------------

    def _map(self, name: str, mode: Literal["r", "r+"] = "r") -> NDArray[Any]:
        dtype, shape = self._layout(name, self._num_rows)
        return np.memmap(self._paths[name], dtype=dtype, mode=mode, shape=shape)

    def _new(self, name: str, num_rows: int) -> tuple[Path, NDArray[Any]]:
        path = self._paths[name].with_suffix(".new")
        dtype, shape = self._layout(name, num_rows)
        allocate(path, math.prod(shape) * np.dtype(dtype).itemsize)
        return path, np.memmap(path, dtype=dtype, mode="r+", shape=shape)

    def _layout(self, name: str, num_rows: int) -> tuple[type, tuple[int, ...]]:
        if name == "values":
            return np.float32, (num_rows, self._columns)
        return np.int64, (num_rows,)

    def _move(self, num_rows: int, places: Any, fill_missing: bool = False) -> None:
        """Writes every row to another place.

        Args:
            num_rows: of the new files.
            places: called with first and last row of a stretch; returns the new row of each, and
                -1 for one that is left out.
            fill_missing: values that no row is written to are NaN.
        """
        targets = {name: self._new(name, num_rows) for name in self._paths}
        sources = {name: self._map(name) for name in self._paths}
        if fill_missing:
            targets["values"][1][:] = np.nan
        for first, last in self._stretches():
            to = places(first, last)
            kept = to >= 0
            for name, (_, target) in targets.items():
                target[to[kept]] = sources[name][first:last][kept]
        del sources
        for name, (path, target) in targets.items():
            del target
            path.replace(self._paths[name])
        self._num_rows = num_rows

    def _stretches(self) -> Iterator[tuple[int, int]]:
        size = rows_at_once(self._columns, _ROWS)
        for first in range(0, self._num_rows, size):
            yield first, min(first + size, self._num_rows)

    # order --------------------------------------------------------------------------------------

    def _group(self) -> None:
        """Puts the rows of every series together, in the order they came."""
        counts = self._num_in_series
        free = np.cumsum(counts) - counts
        every: NDArray[np.int32] = np.memmap(self._in.codes, dtype=np.int32, mode="r")

        def places(first: int, last: int) -> NDArray[np.int64]:
            codes = every[first:last]
            order = np.argsort(codes, kind="stable")
            in_order = codes[order]
            starts = np.flatnonzero(np.diff(in_order, prepend=-1))
            lengths = np.diff(starts, append=len(codes))
            rank = np.arange(len(codes)) - np.repeat(starts, lengths)
            to = np.empty(len(codes), dtype=np.int64)
            to[order] = free[in_order] + rank
            free[in_order[starts]] += lengths
            return to

        self._move(self._num_rows, places)

    def _is_same(self, begin: int, last: int) -> NDArray[np.bool_]:
        """Returns which of the rows ``begin + 1 .. last - 1`` are of the series of the one before
        them."""
        starts = np.cumsum(self._num_in_series)[:-1]
        low, high = np.searchsorted(starts, (begin + 1, last))
        same = np.ones(last - begin - 1, dtype=np.bool_)
        same[starts[low:high] - begin - 1] = False
        return same

    def _series_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        ends = np.cumsum(self._num_in_series)
        return np.asarray(np.searchsorted(ends, rows, side="right"), dtype=np.int64)

    def _neighbours(self) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.bool_]]]:
        """Yields, per stretch, its first row, each row's step in time from the one before it, and
        whether that is of the same series."""
        times = self._map("times")
        for first, last in self._stretches():
            begin = max(first - 1, 0)
            yield begin + 1, np.diff(times[begin:last]), self._is_same(begin, last)

    def _order(self) -> None:
        """Sees that times do not go back within a series; sorts where that is wanted."""
        for first, step, same in self._neighbours():
            back = np.flatnonzero((step < 0) & same)
            if len(back):
                if self._policy.disorder == "error":
                    raise self._fault(
                        first + int(back[0]), "goes back in time", Setting("disorder", "sort")
                    )
                self._sort()
                return

    def _sort(self) -> None:
        files = {name: self._map(name, "r+") for name in ("values", "times")}
        counts = self._num_in_series
        for end, count in zip(np.cumsum(counts).tolist(), counts.tolist(), strict=True):
            rows = slice(end - count, end)
            times = files["times"][rows]
            if (np.diff(times) >= 0).all():
                continue
            order = np.argsort(times, kind="stable")
            self._counts["sorted"] += int((order != np.arange(count)).sum())
            for file in files.values():
                file[rows] = file[rows][order]

    def _remove_duplicates(self) -> None:
        found = 0
        for first, step, same in self._neighbours():
            double = np.flatnonzero((step == 0) & same)
            if len(double) and self._policy.duplicates == "error":
                raise self._fault(
                    first + int(double[0]), "has the time of the row before it",
                    Setting("duplicates", "last"), " (or first)",
                )  # fmt: skip
            found += len(double)
        if not found:
            return
        self._counts["duplicates"] = found
        times = self._map("times")
        gone_in_series = np.zeros_like(self._num_in_series)
        shift = 0 if self._policy.duplicates == "first" else 1
        done = 0

        def places(first: int, last: int) -> NDArray[np.int64]:
            nonlocal done
            # A row goes when its neighbour towards the one that counts has the same time.
            begin, end = max(first - 1 + shift, 0), min(last + shift, self._num_rows)
            double = (np.diff(times[begin:end]) == 0) & self._is_same(begin, end)
            edge = np.zeros(last - first - len(double), dtype=np.bool_)
            gone = np.concatenate([double, edge] if shift else [edge, double])
            to = done + np.cumsum(~gone) - 1
            done += int((~gone).sum())
            np.add.at(gone_in_series, self._series_of(first + np.flatnonzero(gone)), 1)
            return np.where(gone, -1, to)

        self._move(self._num_rows - found, places)
        self._num_in_series -= gone_in_series

    def _fault(self, row: int, what: str, *cure: object) -> DataError:
        code, time = int(self._series_of(np.array([row]))[0]), int(self._map("times")[row])
        series = f"series '{self._in.series[code]}': " if len(self._in.series) > 1 else ""
        named = f"row {row + 1}, " if self._in.is_grouped else "the row of "
        shown = show_time(time) if self._in.has_clock else str(time)
        apart: list[object] = []
        if self._in.series == [""]:  # no column tells series apart
            apart = [
                "if the table holds several series, give ", Setting("series", ...),
                ", the column that tells them apart; else ",
            ]  # fmt: skip
        where = f"{self._origin}: {series}{named}{shown}, {what}; "
        return DataError(where, *apart, "correct it, or give ", *cure)

    # steps --------------------------------------------------------------------------------------

    def _frequency(self, times: NDArray[np.int64]) -> Frequency:
        sample = np.asarray(times[:_ROWS])
        same = self._is_same(0, len(sample))
        like = self._like
        is_alike = like is not None and (like.unit == "rows") != self._in.has_clock
        if like is not None and is_alike and like.fits(sample, same):
            return like
        found = find_frequency(sample, same, self._origin, self._in.has_clock)
        if found == BUSINESS_DAYS and not all(
            are_business_days(times[first:last]) for first, last in self._stretches()
        ):
            return DAYS
        return found

    def _cut(self, times: NDArray[np.int64], frequency: Frequency) -> Segments:
        """Cuts the rows where a step is missing or a new series begins."""
        cuts = [np.zeros(1, dtype=np.int64)]
        for first, last in self._stretches():
            begin = max(first - 1, 0)
            same = self._is_same(begin, last)
            off = np.flatnonzero(~frequency.are_whole_steps(times[begin:last]) & same)
            if len(off):
                raise self._fault(
                    begin + 1 + int(off[0]),
                    f"is no whole step of {frequency} behind the one before",
                    Setting("ignore", ...),
                    " with the time column, so that rows are counted",
                )
            gap = same & (np.diff(frequency.ticks(times[begin:last])) != 1)
            self._counts["gaps"] += int(gap.sum())
            cuts.append(begin + 1 + np.flatnonzero(gap | ~same))
        rows = np.concatenate(cuts)
        lengths = np.diff(rows, append=self._num_rows)
        series = self._series_of(rows)
        self._check_mixed(series, lengths, frequency)
        return Segments(series, rows, lengths, np.asarray(times[rows], dtype=np.int64))

    def _check_mixed(
        self, series: NDArray[np.int64], lengths: NDArray[np.int64], frequency: Frequency
    ) -> None:
        """Refuses a series most of whose rows stand alone: it has another frequency."""
        alone = np.bincount(series[lengths == 1], minlength=len(self._in.series))
        rows = np.bincount(series, weights=lengths, minlength=len(self._in.series))
        other = np.flatnonzero((alone > rows / 2) & (rows > 2))
        if len(other):
            name = self._in.series[int(other[0])]
            raise DataError(
                f"{self._origin}: series '{name}' does not step by {frequency} as the others do"
                f" ({len(other)} such series); bring all to one frequency, or train on them apart"
            )

    def _fill(self, segments: Segments, frequency: Frequency) -> Segments:
        """Puts the missing rows in, without values, so that every series is one segment."""
        same = np.diff(segments.series) == 0
        ends = segments.first_rows + segments.num_rows - 1
        last_ticks = frequency.ticks(self._map("times")[ends])
        first_ticks = frequency.ticks(segments.start_times)
        missing = np.where(same, first_ticks[1:] - last_ticks[:-1] - 1, 0)
        before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(missing)])
        self._counts["filled"] = int(before[-1])
        new_rows = self._num_rows + self._counts["filled"]
        if new_rows > 4 * self._num_rows:
            raise DataError(
                f"{self._origin}: filling {counted(self._counts['gaps'], 'gap')} would make"
                f" {counted(new_rows, 'row')} of {self._num_rows}; leave ",
                Setting("gaps", "split"),
            )

        def places(first: int, last: int) -> NDArray[np.int64]:
            rows = np.arange(first, last)
            segment = np.searchsorted(segments.first_rows, rows, side="right") - 1
            return np.asarray(rows + before[segment])

        self._move(new_rows, places, fill_missing=True)
        starts = np.flatnonzero(np.concatenate([[True], ~same]))
        first_rows = (segments.first_rows + before)[starts]
        lengths = np.diff(first_rows, append=new_rows)
        return Segments(segments.series[starts], first_rows, lengths, segments.start_times[starts])
