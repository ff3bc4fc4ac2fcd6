"""Second pass over a table: sorts rows by series and time and cuts them into segments at gaps.

Works on mapped files, a block of rows at a time, so memory use does not grow with the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import DataError, counted
from fastlstm.forecast.data.ingest import SKIPPED, TableIngest
from fastlstm.forecast.data.problems import CurableError, Finding, settings
from fastlstm.forecast.data.table import Segments, row_blocks
from fastlstm.forecast.data.timeline import (
    BUSINESS_DAYS,
    DAY_US,
    DAYS,
    ROWS,
    Frequency,
    Timeline,
    are_business_days,
    find_frequency,
    show_time,
)
from fastlstm.system.storage import allocate

_BLOCK_ROWS = 1 << 20
_MOST_FILLED = 1.25
"""Largest growth of a table by rows that are filled in by default: every Sunday may be missing, but
not every night."""
_LONGEST_FILLED = 0.07
"""Longest gap that is filled by default, as a share of the rows of a series: a longer one could
cover the validation part."""
_MOST_DROPPED, _FEW_DROPPED = 0.01, 10
"""Dropping rows that share a time is proposed up to this share of all rows, or this number."""


class Arrangement:
    """Puts the rows of a table in order; rearranges the files of the first pass.

    The frequency of `like` is used if the times fit it. For messages, `origin` is the name of the
    table, and `find_key` returns the columns that tell series apart, or "".

    Attributes:
        num_rows: may differ from those ingested.
        counts: rows that were sorted, duplicates, gaps, and rows that were filled in.
        frequency: of the rows; rows are counted until `run` has found it.
    """

    def __init__(
        self,
        ingested: TableIngest,
        origin: str,
        like: Timeline | None,
        find_key: Callable[[], str],
    ) -> None:
        self._find_key = find_key
        self._in, self._options, self._origin = ingested, ingested.options, origin
        self._like, self.frequency, self.num_rows = like, ROWS, ingested.num_rows
        self.counts = dict.fromkeys(("sorted", "duplicates", "gaps", "filled", "ends"), 0)
        self._num_in_series = ingested.counts
        self._shifts: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        """By drop of rows: from which row on the numbers were larger, and by how much."""
        self._paths = {"values": ingested.values}
        if ingested.times is not None:
            self._paths["times"] = ingested.times

    def run(self) -> Segments:
        """Arranges the rows; returns their segments. Raises DataError: disorder or duplicates that
        the policy refuses, or irregular times."""
        if not self._in.is_grouped:
            self._group()
        if self._in.times is None:
            self._cut_ends()
            counts = self._num_in_series
            first = np.cumsum(counts) - counts
            return Segments(np.arange(len(counts)), first, counts, np.zeros_like(first))
        if self._in.num_skipped:
            self._drop(np.flatnonzero(self._map("times") == SKIPPED))
            for column in self._in.columns.values():
                column.missing -= self._in.num_skipped
        self._order()
        self._remove_duplicates()
        self._cut_ends()
        self.frequency = self._find_frequency()
        segments = self._cut()
        return self._fill(segments) if self.counts["gaps"] else segments

    def _map(self, name: str, mode: Literal["r", "r+"] = "r") -> NDArray[Any]:
        is_values = name == "values"
        dtype: type = np.float32 if is_values else np.int64
        shape = (self.num_rows, len(self._in.columns)) if is_values else (self.num_rows,)
        return np.memmap(self._paths[name], dtype=dtype, mode=mode, shape=shape)

    def _move(self, num_rows: int, places: Any) -> None:
        """Moves every row to new files of `num_rows` rows; added ones have no values.

        `places` maps a block of rows ``(begin, end)`` to new row numbers; -1 drops a row.
        """
        sources, targets = {name: self._map(name) for name in self._paths}, {}
        for name, source in sources.items():
            path, shape = self._paths[name].with_suffix(".new"), (num_rows, *source.shape[1:])
            allocate(path, math.prod(shape) * source.itemsize)
            targets[name] = np.memmap(path, dtype=source.dtype, mode="r+", shape=shape)
        if num_rows > self.num_rows:
            targets["values"][:] = np.nan
        for begin, end in self._blocks():
            to = places(begin, end)
            is_used = to >= 0
            for name, target in targets.items():
                target[to[is_used]] = sources[name][begin:end][is_used]
        for path in self._paths.values():
            path.with_suffix(".new").replace(path)
        self.num_rows = num_rows

    def _blocks(self) -> Iterator[tuple[int, int]]:
        return row_blocks(0, self.num_rows, len(self._in.columns), _BLOCK_ROWS)

    def _group(self) -> None:
        """Makes the rows of every series adjacent, in their original order."""
        counts = self._num_in_series
        free = np.cumsum(counts) - counts
        all_codes: NDArray[np.int32] = np.memmap(self._in.codes, dtype=np.int32, mode="r")

        def places(first: int, last: int) -> NDArray[np.int64]:
            codes = all_codes[first:last]
            order = np.argsort(codes, kind="stable")
            in_order = codes[order]
            starts = np.flatnonzero(np.diff(in_order, prepend=-1))
            lengths = np.diff(starts, append=len(codes))
            rank = np.arange(len(codes)) - np.repeat(starts, lengths)
            to = np.empty(len(codes), dtype=np.int64)
            to[order] = free[in_order] + rank
            free[in_order[starts]] += lengths
            return to

        self._move(self.num_rows, places)

    def _is_same(self, begin: int, last: int) -> NDArray[np.bool_]:
        """Returns which rows ``begin + 1 .. last - 1`` are of the same series as the row before."""
        starts = np.cumsum(self._num_in_series)[:-1]
        low, high = np.searchsorted(starts, (begin + 1, last))
        same = np.ones(last - begin - 1, dtype=np.bool_)
        same[starts[low:high] - begin - 1] = False
        return same

    def _series_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        ends = np.cumsum(self._num_in_series)
        return np.asarray(np.searchsorted(ends, rows, side="right"), dtype=np.int64)

    def _neighbours(self) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.bool_]]]:
        """Yields a row, the times from the row before it on, and `_is_same` of these, per block."""
        times = self._map("times")
        for first, last in self._blocks():
            begin = max(first - 1, 0)
            yield begin + 1, times[begin:last], self._is_same(begin, last)

    def _order(self) -> None:
        """Checks that times increase within each series, or sorts them."""
        for first, times, same in self._neighbours():
            if len(back := np.flatnonzero((np.diff(times) < 0) & same)):
                if self._options.disorder == "error":
                    found = ("rows out of order", {"disorder": "sort"})
                    raise self._fault(first + int(back[0]), "is earlier than the row before", found)
                return self._sort()

    def _sort(self) -> None:
        files = {name: self._map(name, "r+") for name in ("values", "times")}
        counts = self._num_in_series
        for end, count in zip(np.cumsum(counts).tolist(), counts.tolist(), strict=True):
            rows = slice(end - count, end)
            times = files["times"][rows]
            if (np.diff(times) >= 0).all():
                continue
            order = np.argsort(times, kind="stable")
            self.counts["sorted"] += int((order != np.arange(count)).sum())
            for file in files.values():
                file[rows] = file[rows][order]

    def _remove_duplicates(self) -> None:
        blocks = self._neighbours()
        found = [first + np.flatnonzero((np.diff(t) == 0) & same) for first, t, same in blocks]
        doubles = np.concatenate(found)
        num_duplicates = len(doubles)
        if not num_duplicates:
            return
        if self._options.duplicates == "error":
            raise self._fault_of_duplicates(doubles)
        self.counts["duplicates"] = num_duplicates
        self._drop(doubles if self._options.duplicates == "first" else doubles - 1)

    def _drop(self, rows: NDArray[np.int64]) -> None:
        """Drops rows, whose numbers are in order."""

        def places(first: int, last: int) -> NDArray[np.int64]:
            begin, end = np.searchsorted(rows, (first, last))
            gone = np.zeros(last - first, dtype=np.bool_)
            gone[rows[begin:end] - first] = True
            return np.where(gone, -1, np.arange(first, last) - begin - np.cumsum(gone))

        gone = np.bincount(self._series_of(rows), minlength=len(self._num_in_series))
        self._move(self.num_rows - len(rows), places)
        self._num_in_series = self._num_in_series - gone
        self._shifts.append((rows - np.arange(len(rows)), np.arange(len(rows) + 1)))

    def _cut_ends(self) -> None:
        """Drops the rows behind the last target of each series, where forecasts begin; keeps them
        with future covariates, which a table of the future continues."""
        names, future = self._in.roles.target, self._in.roles.future
        if future or not any(self._in.columns[name].missing for name in names):
            return
        values, last = self._map("values"), np.full(len(self._num_in_series), -1)
        for begin, end in self._blocks():
            rows = begin + np.flatnonzero(~np.isnan(values[begin:end, : len(names)]).all(1))
            np.maximum.at(last, self._series_of(rows), rows)
        ends = np.cumsum(self._num_in_series)
        gone = np.where(last < 0, 0, ends - 1 - last)  # nothing of a series without any target
        if not gone.any():
            return
        self.counts["ends"] = int(gone.sum())
        self._drop(np.repeat(ends - np.cumsum(gone), gone) + np.arange(self.counts["ends"]))
        moved = self._map("values")
        left = sum(np.isnan(moved[begin:end]).sum(0) for begin, end in self._blocks())
        for column, count in zip(self._in.columns.values(), np.asarray(left), strict=True):
            column.missing = int(count)

    def _fault_of_duplicates(self, rows: NDArray[np.int64]) -> DataError:
        """Returns the error for rows with the time of the row before; proposes to drop them only
        where they are few."""
        share = f"{len(rows):,} of {counted(self.num_rows, 'row')}"
        text = f"several rows have the same time (`duplicates='last'` drops {share})"
        found: Finding | None = (text, {"duplicates": "last"})
        more = f" (or first), which drops {share}"
        if not self._options.snap and len(rows) > max(_MOST_DROPPED * self.num_rows, _FEW_DROPPED):
            found = None
            more = (
                f"{share} have the time of another, too many to drop: name the columns that tell"
                " series apart with `series`, or all columns of the time with `time`; or give"
                " `ignore` with the columns of the time, to count rows"
            )
        return self._fault(int(rows[0]), "has the same time as the row before", found, more)

    @property
    def _is_local(self) -> bool:
        """Clock times without a zone, of which an hour may come twice in autumn."""
        return self._in.has_clock and self._in.time_zone is None

    @property
    def _zone_cure(self) -> str:
        """Advice on times with offsets: days and months of a zone are irregular in UTC."""
        is_by_offset = self._in.time_zone == "UTC" and self._options.tz is None
        return " give the zone of the clocks, as `tz='Europe/Berlin'`," if is_by_offset else ""

    def _row(self, row: int) -> str:
        code, time = int(self._series_of(np.array([row]))[0]), int(self._map("times")[row])
        series = f"series '{self._in.series[code]}': " if len(self._in.series) > 1 else ""
        for begins, shifts in self._shifts[::-1]:
            row += int(shifts[np.searchsorted(begins, row, side="right")])
        is_in_order = self._in.is_grouped and not self.counts["sorted"]
        shown = show_time(time) if self._in.has_clock else str(time)
        named = f"row {row + 1}, {shown}," if is_in_order else f"the row of {shown}"
        return f"{self._origin}: {series}{named}"

    def _fault(self, row: int, what: str, found: Finding | None, more: str = "") -> DataError:
        """Returns the error for a row out of order, or of the series that a key tells apart.

        Without `found`, `more` says why no option is proposed.
        """
        where = f"{self._row(row)} {what}"
        cure = f"correct it, or give {settings(found[1])}{more}" if found else more
        if self._is_local and self._map("times")[row] % DAY_US:
            cure += "; for local clock times give their zone, such as `tz='Europe/Berlin'`"
        if key := self._find_key():
            names = " and ".join(key.split(","))
            own = (f"several series, told apart by {names}", {"series": key})
            other = f"; if they are one series, {cure}" if found else ""
            return CurableError(
                f"{where}; each {names} has its own times: give {settings(own[1])}{other}", own
            )
        if found is None:
            return DataError(f"{where}; {cure}")
        apart = ""
        if self._in.series == [""]:  # there is no column of series
            apart = "if the table has several series, name their column with `series`; otherwise "
        return CurableError(f"{where}; {apart}{cure}", found)

    def _find_frequency(self) -> Frequency:
        times = self._map("times")
        sample = np.asarray(times[:_BLOCK_ROWS])
        same, like = self._is_same(0, len(sample)), self._like
        is_alike = like is not None and (like.frequency.unit == "rows") != self._in.has_clock
        if like is not None and is_alike and like.frequency.fits(sample, same):
            return like.frequency
        frequency = find_frequency(sample, same, self._origin, self._in.has_clock, self._zone_cure)
        if frequency == BUSINESS_DAYS and not all(
            are_business_days(times[first:last]) for first, last in self._blocks()
        ):
            return DAYS
        return frequency

    def _cut(self) -> Segments:
        """Cuts the rows at gaps and where a new series begins."""
        cuts = [np.zeros(1, dtype=np.int64)]
        for first, times, same in self._neighbours():
            off = np.flatnonzero(~self.frequency.are_whole_steps(times) & same)
            if len(off):
                raise DataError(
                    f"{self._row(first + int(off[0]))} is not a whole number of steps"
                    f" ({self.frequency}) after the row before; correct it,{self._zone_cure}"
                    " round times with `snap`, or give `ignore` with the time column to count rows"
                    " instead"
                )
            gap = same & (np.diff(self.frequency.ticks(times)) != 1)
            self.counts["gaps"] += int(gap.sum())
            cuts.append(first + np.flatnonzero(gap | ~same))
        rows = np.concatenate(cuts)
        lengths = np.diff(rows, append=self.num_rows)
        series, num_series = self._series_of(rows), len(self._in.series)
        alone = np.bincount(series[lengths == 1], minlength=num_series)
        counts = np.bincount(series, weights=lengths, minlength=num_series)
        other = np.flatnonzero((alone > counts / 2) & (counts > 2))  # mostly isolated rows
        if len(other):
            name = self._in.series[int(other[0])]
            raise DataError(
                f"{self._origin}: series '{name}' does not have the frequency of the others,"
                f" {self.frequency} ({len(other)} such series); resample them to one frequency, or"
                " train on them separately"
            )
        return Segments(series, rows, lengths, np.asarray(self._map("times")[rows]))

    def _fill(self, segments: Segments) -> Segments:
        """Adds empty rows at gaps, so that every series is one segment, if `gaps` says so."""
        same = np.diff(segments.series) == 0
        ends = segments.first_rows + segments.num_rows - 1
        last_ticks = self.frequency.ticks(self._map("times")[ends])
        first_ticks = self.frequency.ticks(segments.start_times)
        missing = np.where(same, first_ticks[1:] - last_ticks[:-1] - 1, 0)
        before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(missing)])
        new_rows, gaps = self.num_rows + int(before[-1]), self._options.gaps
        if gaps is None and (self._like is None or self._like.may_miss):
            longest = _LONGEST_FILLED * self.num_rows / max(1, len(self._in.series))
            is_small = new_rows <= _MOST_FILLED * self.num_rows
            gaps = "fill" if is_small and missing.max(initial=0) <= longest else "split"
        if gaps != "fill":
            return segments
        self.counts["filled"] = int(before[-1])
        if new_rows > 4 * self.num_rows:
            raise DataError(
                f"{self._origin}: filling {counted(self.counts['gaps'], 'gap')} would grow the"
                f" table from {self.num_rows} to {counted(new_rows, 'row')}; use `gaps='split'`"
            )

        def places(first: int, last: int) -> NDArray[np.int64]:
            rows = np.arange(first, last)
            return np.asarray(rows + before[segments.of_rows(rows)])

        self._move(new_rows, places)
        starts = np.flatnonzero(np.concatenate([[True], ~same]))
        first_rows = (segments.first_rows + before)[starts]
        lengths = np.diff(first_rows, append=new_rows)
        return Segments(segments.series[starts], first_rows, lengths, segments.start_times[starts])
