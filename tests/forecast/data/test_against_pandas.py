"""Made tables of every kind, read by us and by pandas: every window holds the same values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.names import canonical
from fastlstm.forecast.data.preparation import prepare
from fastlstm.forecast.data.window_index import index_windows, read_windows

pandas = pytest.importorskip("pandas")

FREQUENCIES = ["D", "h", "15min", "B", "W-SUN", "MS", "ME", "QS", "s"]
ZONES = [None, "UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe"]
STARTS = ["2020-03-20", "2020-10-20", "2021-01-31", "1969-12-20"]
LENGTH = 4


def made(seed: int) -> tuple[Any, str]:
    """Returns a table and its frequency: rows missing, doubled and mixed, values missing."""
    rng = np.random.default_rng(seed)
    freq, zone = str(rng.choice(FREQUENCIES)), ZONES[rng.integers(len(ZONES))]
    parts = []
    for number in range(int(rng.integers(1, 5))):
        count = int(rng.integers(40, 160 if freq != "QS" else 60))  # Arrow's zones end in 2037
        starts = STARTS if zone is None else STARTS[:3]
        times = pandas.date_range(rng.choice(starts), periods=count, freq=freq)
        if zone is not None and freq in ("h", "15min", "s"):
            times = times.tz_localize("UTC").tz_convert(zone)
        elif zone is not None:
            times = times.tz_localize(zone, nonexistent="shift_forward")
        part = pandas.DataFrame({"ds": times, "id": (f"s{number}", number, 1.0 * number)[seed % 3]})
        parts.append(part[rng.random(count) > rng.choice([0.0, 0.05])])
    frame = pandas.concat(parts, ignore_index=True)
    total = len(frame)
    frame["y"] = rng.normal(size=total) + rng.choice([0.0, 1e6, 1e9])
    frame["count"] = rng.integers(0, 90, total)
    frame["open"] = rng.random(total) > 0.5
    frame["small"] = rng.normal(size=total).astype(np.float32)
    frame.loc[rng.random(total) < 0.03, "y"] = np.nan
    frame = pandas.concat([frame, frame.sample(int(rng.integers(0, 4)), random_state=seed)])
    if rng.random() < 0.5:
        frame = frame.sample(frac=1.0, random_state=seed)
    return frame.reset_index(drop=True), freq


def expected(frame: Any, freq: str, last: bool, fill: bool) -> dict[str, list[tuple[Any, Any]]]:
    """Returns, per series, first time and values of every window, as pandas finds them."""
    found = {}
    step = pandas.tseries.frequencies.to_offset(freq)
    for name, part in frame.groupby("id", sort=False):
        rows = part.sort_values("ds", kind="stable")
        rows = rows.drop_duplicates("ds", keep="last" if last else "first")
        present = np.flatnonzero(rows["y"].notna())
        rows = rows[: present[-1] + 1] if len(present) else rows  # rows behind the last target go
        times = rows["ds"]
        if times.dt.tz is not None and freq not in ("h", "15min", "s"):
            local = times.dt.tz_localize(None)
            times = local.dt.normalize()  # midnights that the clocks left out
        grid = pandas.date_range(times.iloc[0], times.iloc[-1], freq=step)
        values = rows.drop(columns=["ds", "id"]).astype(float).to_numpy()
        whole = pandas.DataFrame(values, index=pandas.DatetimeIndex(times)).reindex(grid)
        is_there = np.asarray(grid.isin(pandas.DatetimeIndex(times)))
        assert is_there.sum() == len(rows)
        starts = [
            start
            for start in range(len(grid) - LENGTH + 1)
            if fill or is_there[start : start + LENGTH].all()
        ]
        found[canonical(name)] = [
            (grid[start].tz_localize(None) if grid.tz is None else
             grid[start].tz_convert("UTC").tz_localize(None),
             whole.to_numpy()[start : start + LENGTH])
            for start in starts
        ]  # fmt: skip
    return found


def windows(dataset: SeriesDataset) -> dict[str, list[tuple[Any, NDArray[np.float64]]]]:
    found: dict[str, list[tuple[Any, NDArray[np.float64]]]] = {
        canonical(name): [] for name in dataset.series
    }
    table, segments = dataset.table, dataset.table.segments
    rows = index_windows(table, LENGTH).rows()
    origins = table.origins(segments.series[segments.of_rows(rows)])
    values = read_windows(table, rows, LENGTH).numpy() + origins[:, None]
    for row, segment, window in zip(rows, segments.of_rows(rows), values, strict=True):
        place = int(row - segments.first_rows[segment])
        time = dataset.frequency.after(int(segments.start_times[segment]), place + 1)[-1]
        name = canonical(dataset.series[int(segments.series[segment])])
        found[name].append((pandas.Timestamp(int(time), unit="us"), window))
    return found


@pytest.mark.parametrize("seed", range(60))
def test_every_window_is_that_of_pandas(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 3:
        for name in ("arrange._BLOCK_ROWS", "records._BATCH_ROWS"):
            monkeypatch.setattr(f"fastlstm.forecast.data.{name}", 3 + seed * 7 % 57)
    frame, freq = made(seed)
    last, fill = bool(seed & 1), bool(seed & 2)
    config = ForecastConfig(
        target=("y",), series="id", past=("count", "open", "small"), disorder="sort",
        duplicates="last" if last else "first", gaps="fill" if fill else "split",
    )  # fmt: skip
    source: Any = frame
    if seed % 4 == 1:
        source = tmp_path / "a.parquet"
        frame.to_parquet(source)
    elif seed % 4 == 2 and frame["ds"].dt.tz is None:
        source = tmp_path / "a.csv"
        frame.to_csv(source, index=False)
    elif seed % 4 == 3:
        source = tmp_path
        for number in range(0, len(frame), 37):
            frame[number : number + 37].to_parquet(tmp_path / f"{number:05}.parquet")
    wanted = expected(frame, freq, last, fill)
    found = windows(prepare(source, config))
    assert set(found) == set(wanted)
    for name, due in wanted.items():
        assert [time for time, _ in found[name]] == [time for time, _ in due], (name, freq)
        if due:
            np.testing.assert_allclose(
                np.stack([v for _, v in found[name]]), np.stack([v for _, v in due]),
                rtol=1e-6, atol=1e-6,
            )  # fmt: skip
