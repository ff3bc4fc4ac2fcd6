"""Windows in the order that is asked for; level and spread of series, against NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from fastlstm.forecast.data.dataset import SeriesDataset, prepare_table
from fastlstm.forecast.data.scaled_windows import CONSTANT, ScaledWindows, SeriesScale
from fastlstm.forecast.data.splits import Scaler
from fastlstm.forecast.data.table import Segments, Table, table_from_array
from fastlstm.forecast.model.network import ForecasterConfig

ORIGIN = np.array([[1e9, 0.0]])
MEAN, STD = np.array([1e9 + 3, 0.0]), np.array([2.0, 1.0])


def table() -> Table:
    """Ten rows of a number, stored minus its origin, and a category; series 1 begins in row 6."""
    rows = np.stack([np.arange(10), np.arange(10) % 3], 1).astype(np.float32)
    first, lengths = np.array([0, 4, 6]), np.array([4, 2, 4])
    segments = Segments(np.array([0, 0, 1]), first, lengths, np.zeros(3, dtype=np.int64))
    plain = table_from_array(rows)
    return Table(rows, plain.columns, segments, ORIGIN)


@pytest.mark.parametrize(("size", "sizes"), [(1, [1, 1, 1]), (2, [2, 1]), (256, [3])])
def test_windows_are_read_in_the_given_order(size: int, sizes: list[int]) -> None:
    statics = np.array([[0.0], [1.0]], dtype=np.float32)
    windows = ScaledWindows(table(), Scaler(MEAN, STD), statics)
    parts = list(windows.read(np.array([8, 0, 4]), ForecasterConfig(1, 1, patch=1), size))
    assert [len(values) for values, _ in parts] == sizes
    values = torch.cat([values for values, _ in parts])
    assert (2 * values[..., 0] + 3).tolist() == [[8, 9], [0, 1], [4, 5]]
    static = torch.cat([static for _, static in parts if static is not None])
    assert static[:, 0].tolist() == [1, 0, 0]


DEFAULT = np.array([3.0]), np.array([2.0])


def series(rng: np.random.Generator, rows: int = 200) -> dict[str, np.ndarray]:
    wave = np.sin(np.arange(rows) / 5)
    gaps = 7 + rng.normal(size=rows)
    gaps[::3] = np.nan
    return {"total": 1e9 + 10 * wave, "shop": 50 + wave, "flat": np.full(rows, 3e6), "gaps": gaps}


def dataset_of(made: dict[str, np.ndarray], cache: Path, is_mixed: bool = False) -> SeriesDataset:
    rows = len(made["shop"])
    names, times = np.repeat(list(made), rows), np.tile(np.arange(rows), len(made))
    values = np.concatenate(list(made.values()))
    order = np.argsort(times, kind="stable") if is_mixed else np.arange(len(times))
    columns = {"unique_id": names[order], "ds": times[order], "y": values[order]}
    return prepare_table(pa.table(columns), cache_dir=cache)


@pytest.mark.parametrize("is_mixed", [False, True], ids=["grouped", "mixed"])
def test_each_series_keeps_its_digits_beside_a_large_one(tmp_path: Path, is_mixed: bool) -> None:
    made = series(np.random.default_rng(0))
    dataset = dataset_of(made, tmp_path, is_mixed)
    rows = dataset.table.whole_rows(0, dataset.table.num_rows)[:, 0].reshape(4, -1)
    for name, values in zip(dataset.series, rows, strict=True):
        error = np.nanmax(np.abs(values - made[name]))
        assert error <= 1e-5 * max(np.nanstd(made[name]), 1e-6)


def test_scales_are_those_of_the_training_rows(tmp_path: Path) -> None:
    made = series(np.random.default_rng(1))
    dataset = dataset_of(made, tmp_path)
    ends = dataset.table.segments.first_rows + 150
    scale = SeriesScale.fit(dataset.table, dataset.series, ends, DEFAULT)
    for number, name in enumerate(dataset.series):
        train = made[name][:150]
        spread = CONSTANT * 3e6 if name == "flat" else np.nanstd(train)
        np.testing.assert_allclose(scale.mean[number], np.nanmean(train), rtol=1e-8)
        np.testing.assert_allclose(scale.std[number], spread, rtol=1e-5)


def test_an_unknown_series_has_the_scale_of_its_own_rows(tmp_path: Path) -> None:
    made = series(np.random.default_rng(2))
    known = dataset_of({n: made[n] for n in ("total", "flat", "gaps", "shop")}, tmp_path)
    ends = known.table.segments.first_rows + 100
    scale = SeriesScale.fit(known.table, known.series, ends, DEFAULT)
    other = dataset_of({"new": made["shop"] * 1e-3, "shop": made["shop"]}, tmp_path)
    mean, std, places, _ = scale.of(other.table, other.series)
    assert places.tolist() == [-1, scale.names.index("shop")]
    np.testing.assert_allclose(std[0], 1e-3 * made["shop"].std(), rtol=1e-5)
    assert mean[1] == scale.mean[scale.names.index("shop")]


def test_windows_alone_have_the_scale_of_their_rows() -> None:
    windows = np.random.default_rng(3).normal(5, 2, size=(4, 30, 2))
    windows[1, ::2] = np.nan
    windows[2] = 4.0
    windows[3] = np.nan
    scale = SeriesScale((), *(np.zeros((0, 2)),) * 2)
    mean, std = (of.numpy() for of in scale.of_windows(torch.from_numpy(windows), None))
    np.testing.assert_allclose(mean[:3], np.nanmean(windows[:3], 1))
    np.testing.assert_allclose(std[:2], np.nanstd(windows[:2], 1))
    assert (std[2:] == [[4 * CONSTANT] * 2, [CONSTANT] * 2]).all()


def test_a_series_without_training_rows_has_the_scale_of_all(tmp_path: Path) -> None:
    made = series(np.random.default_rng(4))
    made["gaps"][:150] = np.nan
    dataset = dataset_of(made, tmp_path)
    ends = dataset.table.segments.first_rows + 150
    scale = SeriesScale.fit(dataset.table, dataset.series, ends, DEFAULT)
    place = scale.names.index("gaps")
    assert (scale.mean[place, 0], scale.std[place, 0]) == (3.0, 2.0)
