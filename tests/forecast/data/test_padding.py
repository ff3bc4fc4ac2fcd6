"""Empty rows before each series: rows, times, splits, and forecasts of short series."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fastlstm import Forecaster
from fastlstm.errors import DataError
from fastlstm.forecast.config import ForecastConfig, ReadOptions
from fastlstm.forecast.data.calendar import calendar_parts, row_times
from fastlstm.forecast.data.dataset import prepare_table
from fastlstm.forecast.data.padding import own_rows, padded
from fastlstm.forecast.data.preparation import prepare, require_counts
from fastlstm.forecast.data.roles import RoleRequest
from fastlstm.forecast.data.splits import split_table, validation_steps
from fastlstm.forecast.forecast_table import read_past
from fastlstm.forecast.plan import longest_segments
from fastlstm.forecast.train import train_forecaster
from series_frames import QUICK_RUN, long_table

LENGTHS = (90, 25, 60)
RAGGED = {**QUICK_RUN, "input_size": None, "patch": None, "horizon": 6, "split": "rest,6,6"}


def ragged(lengths: tuple[int, ...] = LENGTHS, scale: float = 1.0) -> pa.Table:
    """Waves of an hour a row, with another temperature; series of other lengths."""
    parts = []
    for number, length in enumerate(lengths):
        part = long_table(length, 1)
        y = np.round(scale * (50 + 20 * np.sin(np.arange(length) / 4 + number)), 3)
        names = pa.array([f"s{number:02}"] * length)
        parts.append(part.set_column(0, "unique_id", names).set_column(2, "y", pa.array(y)))
    return pa.concat_tables(parts)


@pytest.mark.parametrize("kind", ["float32", "int16"])
def test_rows_are_moved_behind_empty_ones(kind: str, tmp_path: Path) -> None:
    table = ragged().drop_columns("temp")
    if kind == "int16":
        table = table.set_column(2, "y", pa.array(np.round(table["y"].to_numpy())))
    hole = np.r_[:40, 70 : table.num_rows]  # the first series has two segments
    plain = prepare_table(table.take(hole), ReadOptions(gaps="split"), cache_dir=tmp_path)
    found = padded(plain, 7)
    assert found.table.values.dtype == kind
    assert found.has_missing
    segments = found.table.segments
    assert segments.num_rows.tolist() == [47, 20, 32, 67]
    assert segments.first_rows.tolist() == [0, 47, 67, 99]
    is_own = np.isin(np.arange(166), np.r_[0:7, 67:74, 99:106], invert=True)
    rows = found.table.rows(0, 166)
    assert np.isnan(rows[~is_own]).all()
    assert (rows[is_own] == plain.table.rows(0, 145)).all()
    assert (row_times(found)[is_own] == row_times(plain)).all()
    for given, want in zip(own_rows(found.table, found.frequency),
                           own_rows(plain.table, plain.frequency), strict=True):  # fmt: skip
        assert given.tolist() == want.tolist()
    assert padded(plain, 0) is plain


@pytest.mark.parametrize(
    "dates",
    [
        np.arange("2019-03", "2026-10", dtype="M8[M]").astype("M8[us]"),
        np.arange("2019-04", "2026-11", dtype="M8[M]").astype("M8[D]") - np.timedelta64(1, "D"),
        np.busday_offset("2024-01-01", np.arange(91), roll="forward").astype("M8[us]"),
        np.arange(91),
    ],
    ids=["months", "last days of months", "business days", "numbers"],
)
def test_times_go_back_by_the_frequency(dates: Any, tmp_path: Path) -> None:
    table = pa.table({"ds": dates, "y": np.arange(91.0) ** 0.5})
    plain = prepare_table(table, cache_dir=tmp_path)
    late = prepare_table(table.slice(20), cache_dir=tmp_path)
    assert (row_times(padded(late, 20)) == row_times(plain)).all()


@pytest.mark.parametrize("split", ["70/10/20", "40,10", "40,10,8", "rest,12,5"])
def test_parts_are_the_same_with_and_without_padding(split: str, tmp_path: Path) -> None:
    plain = prepare_table(ragged(), request=RoleRequest(target=("y",)), cache_dir=tmp_path)
    found = padded(plain, 30)
    ends = [split_table(each.table, each.frequency, split) for each in (plain, found)]
    added = 30 * np.arange(1, len(LENGTHS) + 1)
    for name in ("train_ends", "valid_ends", "test_ends"):
        want, got = (getattr(each, name) for each in ends)
        is_any = want > plain.table.segments.first_rows
        assert (got - added == want)[is_any].all()
        assert (got - added <= plain.table.segments.first_rows)[~is_any].all()
    steps = {validation_steps(each.table, each.frequency, split) for each in (plain, found)}
    assert len(steps) == 1


def trained(table: pa.Table, **changes: Any) -> tuple[Any, list[dict[str, Any]]]:
    events = list[dict[str, Any]]()
    config = ForecastConfig(**{**RAGGED, **changes})
    return train_forecaster(table, config, observers=[events.append]), events


@pytest.mark.parametrize("calendar", [None, ("hour",)], ids=["no calendar", "calendar"])
def test_short_series_are_padded_and_forecast(calendar: Any) -> None:
    table = ragged((200,) * 12 + (28,) * 3)
    found, events = trained(table, calendar=calendar)
    [told] = [e["text"] for e in events if "before each series" in e.get("text", "")]
    assert told == (
        "18 empty rows before each series, as 3 of 15 series are too short for the input of 24"
        " steps; `pad_start=0` adds none"
    )
    config = found.stored.config
    assert (config.pad_start, config.input_size, found.stored.network.config.has_missing) == (
        18, 24, True,
    )  # fmt: skip
    start = next(event for event in events if event["event"] == "start")
    assert (start["rows"], start["series"]) == (table.num_rows, 15)
    again = read_past(found.stored, table)  # as a forecast reads it
    for name in ("series", "first_rows", "num_rows", "start_times"):
        own = getattr(found.dataset.table.segments, name)
        assert (own == getattr(again.table.segments, name)).all()
    rows = [each.table.rows(0, each.table.num_rows) for each in (found.dataset, again)]
    np.testing.assert_array_equal(*rows)


def test_only_tables_that_need_it_are_padded() -> None:
    even, few, wide = (120,) * 15, (200,) * 20 + (28,) * 2, (200,) * 12 + (28,) * 3
    for lengths, changes in ((even, {}), (few, {}), (wide, {"pad_start": 0}),
                             (wide, {"input_size": 4})):  # fmt: skip
        found, events = trained(ragged(lengths), **changes)
        assert not found.stored.config.pad_start
        assert not [e for e in events if "before each series" in e.get("text", "")]


def test_a_padded_forecaster_forecasts_every_series_at_its_end(tmp_path: Path) -> None:
    table = ragged((200,) * 12 + (28,) * 2 + (5,))
    options = {n: v for n, v in RAGGED.items() if n in ForecastConfig.__dataclass_fields__}
    with pytest.warns(UserWarning, match=r"1 of 15 series .* \('s14' has 0\): not trained on;"):
        model = Forecaster(**{**options, "steps": 120}).fit(table)
    with pytest.warns(UserWarning, match="series 's14' ends in 5 rows without gaps, a forecast"):
        forecast = model.predict(table)
    assert forecast["unique_id"].to_pylist() == [f"s{k:02}" for k in range(14) for _ in range(6)]
    ends = {n: table.filter(pa.compute.equal(table["unique_id"], n))["ds"][-1].as_py()
            for n in ("s00", "s13")}  # fmt: skip
    first = dict(reversed(list(zip(*forecast.select(["unique_id", "ds"]).to_pydict().values(),
                                   strict=True))))  # fmt: skip
    assert {n: (first[n] - ends[n]).total_seconds() for n in ends} == {"s00": 3600, "s13": 3600}
    model.save(tmp_path / "model")
    assert (
        Forecaster.load(tmp_path / "model")
        .predict(ragged((200, 28)))
        .equals(model.predict(ragged((200, 28))))
    )
    errors = model.backtest()
    assert np.isfinite(errors["forecaster"]["mae"])


def test_padding_that_is_asked_for_is_read_with_the_table(tmp_path: Path) -> None:
    config = ForecastConfig(pad_start=9, target=("y",), cache_dir=str(tmp_path))
    found = prepare(ragged(), config)
    assert found.table.padding == 9
    assert found.table.num_rows == sum(LENGTHS) + 27
    assert prepare(ragged(), replace(config, pad_start=None)).table.padding == 0


def test_cross_validation_reads_the_table_that_was_padded() -> None:
    options = {**RAGGED, "steps": 60, "split": "70/10/20"}
    found = Forecaster(**options).cross_validation(ragged((200,) * 12 + (28,) * 3), n_windows=2)
    errors = np.abs(found["y"].to_numpy() - found["y-forecast"].to_numpy())
    assert errors.mean() < 5.0  # of waves of 20


def test_a_padded_input_is_a_multiple_of_the_patch() -> None:
    found, _ = trained(ragged((200,) * 12 + (28,) * 3), patch=5, steps=1)
    assert (found.stored.config.input_size, found.stored.config.pad_start) == (20, 14)


def test_a_wrong_count_is_named_by_its_row_in_the_table(tmp_path: Path) -> None:
    y = np.where(np.arange(60) == 43, -1.0, 5.0)
    table = pa.table({"unique_id": ["a"] * 40 + ["b"] * 20, "ds": [*range(40), *range(20)], "y": y})
    with pytest.raises(DataError, match="'y' is -1 in row 3 of series 'b', expected counts"):
        require_counts(padded(prepare_table(table, cache_dir=tmp_path), 30))


def test_padding_teaches_no_calendar(tmp_path: Path) -> None:
    dates = np.arange("2019-01", "2021-07", dtype="M8[M]").astype("M8[us]")
    plain = prepare_table(pa.table({"ds": dates, "y": np.arange(30.0) ** 0.5}), cache_dir=tmp_path)
    for num, dataset in ((0, plain), (18, padded(plain, 18))):
        assert calendar_parts(dataset, np.array([20 + num]))[0] == ()
        assert calendar_parts(dataset, np.array([26 + num]))[0] == ("year",)


def test_the_linear_path_learns_from_whole_windows_of_long_series() -> None:
    table, noise = ragged((200,) * 12 + (28,) * 3), np.random.default_rng(1)
    y = table["y"].to_numpy() + noise.normal(size=table.num_rows)
    table, maes = table.set_column(2, "y", pa.array(y)), []
    for changes in ({}, {"pad_start": 0, "input_size": 24}):
        model = Forecaster(**{**RAGGED, "split": "70/10/20", "steps": 2, **changes})
        with warnings.catch_warnings(action="ignore"):  # of the short series
            maes.append(model.fit(table).backtest()["ridge"]["mae"])
    assert maes[0] < 1.3 * maes[1]


def test_the_longest_segment_may_be_one_without_padding(tmp_path: Path) -> None:
    source = ragged((60,)).drop_columns("temp").take(np.r_[:10, 40:60])
    plain = prepare_table(source, ReadOptions(gaps="split"), cache_dir=tmp_path)
    table = padded(plain, 5).table
    split = split_table(table, plain.frequency, "50,5,5")
    assert longest_segments(table, split).tolist() == [15]
    assert longest_segments(table, split, is_padded=False).tolist() == [10]
    split = split_table(table, plain.frequency, "58,1,1")
    assert longest_segments(table, split).tolist() == [18]
    assert longest_segments(table, split, is_padded=False).tolist() == [18]
