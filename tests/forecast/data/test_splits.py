"""Cuts by time, and scalers that see training rows only."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastlstm.errors import ConfigError, DataError
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.scaled_windows import SeriesScale
from fastlstm.forecast.data.splits import fit_scaler, moments, split_table, validation_steps
from fastlstm.forecast.data.table import Segments, Table
from fastlstm.forecast.data.timeline import Frequency

HOUR = Frequency(3_600_000_000)


def table(starts: tuple[int, ...], lengths: tuple[int, ...]) -> Table:
    """Segments that begin at such hours; every value is the hour it is of."""
    num_rows = np.array(lengths, dtype=np.int64)
    first = np.cumsum(num_rows) - num_rows
    hours = np.concatenate([s + np.arange(n) for s, n in zip(starts, lengths, strict=True)])
    values = np.ascontiguousarray(np.stack([hours, -hours], 1).astype(np.float32))
    times = np.array(starts, dtype=np.int64) * HOUR.step
    segments = Segments(np.arange(len(starts), dtype=np.int64), first, num_rows, times)
    return Table(values, ("a", "b"), segments)


def test_all_series_are_cut_at_one_time() -> None:
    source = table((0, 40, 90), (100, 60, 10))
    split = split_table(source, HOUR, (60, 30, 10))
    hours = source.values[:, 0]
    for segment in range(3):
        first = source.segments.first_rows[segment]
        train = hours[first : split.train_ends[segment]]
        valid = hours[split.train_ends[segment] : split.valid_ends[segment]]
        test = hours[split.valid_ends[segment] : split.test_ends[segment]]
        assert (train < 60).all()
        assert ((valid >= 60) & (valid < 90)).all()
        assert (test >= 90).all()
        assert len(train) + len(valid) + len(test) == source.segments.num_rows[segment]


def test_the_rest_is_split_at_the_end_of_each_series() -> None:
    """A series may end before others, have several segments, or be shorter than the last parts."""
    source = table((0, 40, 70, 90), (100, 20, 12, 8))
    source = replace(source, segments=replace(source.segments, series=np.array([0, 1, 1, 2])))
    split = split_table(source, HOUR, "rest,15,10")
    parts = [split.train_ends, split.valid_ends, split.test_ends] - source.segments.first_rows
    assert parts.T.tolist() == [[75, 90, 100], [17, 20, 20], [0, 2, 12], [0, 0, 8]]
    assert validation_steps(source, HOUR, "rest,15,10") == 15


@pytest.mark.parametrize("split", ["rest", "rest,5", "5,rest,5", "rest,5,0", "rest,1,2,3", "0,5,5"])
def test_another_rest_is_refused(split: str) -> None:
    with pytest.raises(ConfigError, match=r"or rest,48,48: the last rows of each series$"):
        ForecastConfig(horizon=3, split=split)


@pytest.mark.parametrize("split", ["70/10/20", "60/40", "98/1/1"])
def test_shares_are_shares_of_the_rows(split: str) -> None:
    source = table((0, 500), (1000, 500))
    found = split_table(source, HOUR, split)
    share = float(split.split("/")[0]) / 100
    rows = int((found.train_ends - source.segments.first_rows).sum())
    assert abs(rows - share * 1500) <= 2


def test_windows_of_a_part_reach_back_but_not_ahead() -> None:
    source = table((0,), (100,))
    split = split_table(source, HOUR, (60, 30, 10))
    hours = source.values[:, 0]
    for part, low, high in (("train", 0, 60), ("valid", 60, 90), ("test", 90, 100)):
        index = split.windows(source, part, 5, 3)
        rows, _ = index.locate(np.arange(len(index), dtype=np.int64))
        targets = np.stack([hours[row + 5 : row + 8] for row in rows])
        assert ((targets >= low) & (targets < high)).all()
        assert len(rows) == high - low - 2 - (5 if part == "train" else 0)


def test_what_a_part_is_too_short_for_is_said() -> None:
    source = table((0, 96), (92, 8))  # of the second series only test rows
    split = split_table(source, HOUR, (60, 36, 10))
    with pytest.raises(
        DataError,
        match=r"test part: its longest segment without gaps has 8 rows, the horizon needs 9;"
        " give more rows, a smaller `horizon` or another `split`$",
    ):
        split.windows(source, "test", 5, 9)
    with pytest.raises(
        DataError,
        match=r"test part: no segment has 5 rows of input and 4 to forecast; give more rows,"
        " a smaller `input_size` or another `split`$",
    ):
        split.windows(source, "test", 5, 4)


def test_a_scaler_sees_training_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastlstm.forecast.data.table._CELLS", 7)
    source = table((0, 40), (100, 60))
    source.values[3, 0] = np.nan
    split = split_table(source, HOUR, (60, 30, 10))
    before = fit_scaler(source, split.train_ends)
    rows = np.r_[0:60, 100:120]
    np.testing.assert_allclose(before.mean, np.nanmean(source.values[rows], 0), rtol=1e-6)
    np.testing.assert_allclose(before.std, np.nanstd(source.values[rows], 0), rtol=1e-5)
    source.values[60:100] = 1e9
    after = fit_scaler(replace(source), split.train_ends)
    assert (before.mean == after.mean).all()
    assert (before.std == after.std).all()


def test_moments_keep_the_digits_of_values_far_from_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of three rows cut the groups; origins are as far apart as the values are large."""
    monkeypatch.setattr("fastlstm.forecast.data.table._CELLS", 7)
    segments = table((0, 20, 40), (20, 15, 25)).segments
    values = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)
    values[20:35, 1], values[[0, 7, 20, 36]] = 0.1, np.nan
    origin = np.array([[1e15, -1e9], [-1e12, 7.0], [3e9, 0.0]])
    ends, one = np.array([18, 35, 50]), np.zeros(3, dtype=np.int64)
    parts = [values[begin:end].astype(float) for begin, end in ((0, 18), (20, 35), (35, 50))]
    far = Table(values, ("a", "b"), segments, origin)
    mean, variance = moments(far, segments.series, 3, 2, ends)
    np.testing.assert_allclose(variance, [np.nanvar(part, 0) for part in parts], rtol=1e-13)
    np.testing.assert_allclose(mean, origin + [np.nanmean(part, 0) for part in parts], rtol=1e-15)
    assert variance[1, 1] == 0, "a constant has no spread at all"
    for own in (origin[2:], origin / 1e9):  # of all series, and of each
        (mean,), (variance,) = moments(replace(far, origin=own), one, 1, 2, ends)
        offsets = np.broadcast_to(own - own[0], (3, 2))
        whole = np.concatenate([part + off for part, off in zip(parts, offsets, strict=True)])
        np.testing.assert_allclose(mean, own[0] + np.nanmean(whole, 0), rtol=1e-13)
        np.testing.assert_allclose(variance, np.nanvar(whole, 0), rtol=1e-13)
    assert np.isnan(moments(far, segments.series, 3, 2, segments.first_rows)).all()


def test_statistics_of_rows_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over 20 million rows takes seconds, and each choice before training asks for them."""
    source = table((0, 40), (100, 60))
    split, default = split_table(source, HOUR, (60, 30, 10)), (np.zeros(1), np.ones(1))

    def fitted() -> list[np.ndarray]:
        scaler = fit_scaler(source, split.train_ends, categorical=[1])
        scale = SeriesScale.fit(source, ["a", "b"], split.train_ends, default)
        return [scaler.mean, scaler.std, scale.mean, scale.std]

    before = [values.copy() for values in fitted()]
    for values in fitted():
        values[:] = np.nan
    monkeypatch.setattr(Table, "rows", None)
    assert all(map(np.array_equal, before, fitted()))
    assert fit_scaler(source, split.train_ends).std[1] != 1
    with pytest.raises(TypeError):
        fit_scaler(source, split.valid_ends)


def test_a_constant_column_is_divided_by_one_and_categories_stay() -> None:
    source = table((0,), (50,))
    source.values[:, 0] = 123.456
    scaler = fit_scaler(source, np.array([50]), categorical=[1])
    assert scaler.std.tolist() == [1.0, 1.0]
    assert scaler.mean[1] == 0.0
    assert scaler.mean[0] == pytest.approx(123.456)


def test_without_values_a_column_is_divided_by_one() -> None:
    source = table((0, 30), (20, 30))
    empty = Table(np.full((50, 2), np.nan, np.float32), ("a", "b"), source.segments)
    scaler = fit_scaler(empty, np.array([20, 50]))
    assert (scaler.mean.tolist(), scaler.std.tolist()) == ([0.0, 0.0], [1.0, 1.0])
