"""The tables of `forecast_peer.py` and its peers' side: made tables, ETT files, their parts.

usage: PEER_PYTHON benchmarks/forecast_sets.py SET MODEL SECONDS SEED TABLES
Run by forecast_peer.py with an interpreter that has neuralforecast: trains LSTM, NHITS or DLinear
on a set, evaluates it on every test window, prints one JSON line.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Floats = NDArray[np.float64]
HOLIDAYS = ((1, 1), (5, 1), (7, 4), (10, 3), (11, 11), (12, 25), (12, 26))


@dataclass(frozen=True)
class Set:
    """A table with its parts.

    Attributes:
        horizon: steps ahead.
        parts: rows of the training, validation and test part.
        input_size: steps that the peers read.
        file: of ETT; None for a made table.
    """

    horizon: int
    parts: tuple[int, int, int]
    input_size: int = 336
    file: str | None = None


SETS = {
    "ETTh1 24": Set(24, (8640, 2880, 2880), file="ETTh1.csv"),
    "ETTh1 96": Set(96, (8640, 2880, 2880), file="ETTh1.csv"),
    "ETTm1 24": Set(24, (34560, 11520, 11520), file="ETTm1.csv"),
    "ETTm1 96": Set(96, (34560, 11520, 11520), file="ETTm1.csv"),
    "hourly load": Set(24, (24480, 3480, 7080)),
    "daily temperature": Set(14, (2550, 370, 730)),
    "retail counts": Set(28, (280, 40, 80), 112),
}


def table_of(name: str, tables: Path) -> pd.DataFrame:
    """Returns series, time and value of a set in rows, columns unique_id, ds, y."""
    each = SETS[name]
    if each.file is not None:
        wide = pd.read_csv(tables / each.file, parse_dates=["date"]).rename(columns={"date": "ds"})
        return wide.melt("ds", var_name="unique_id", value_name="y")
    rng, rows = np.random.default_rng(0), sum(each.parts)
    make, count = {"hourly load": (_load, 1), "daily temperature": (_temperature, 1)}.get(
        name, (_retail, 1000)
    )
    series = [make(rows, rng) for _ in range(count)]
    return pd.concat(
        pd.DataFrame({"unique_id": f"s{n:04d}", "ds": times, "y": y})
        for n, (times, y) in enumerate(series)
    )


def _walk(rows: int, rng: np.random.Generator, phi: float, scale: float) -> Floats:
    """Returns an autoregression of order 1."""
    values = rng.normal(scale=scale, size=rows)
    for row in range(1, rows):
        values[row] += phi * values[row - 1]
    return np.asarray(values)


def _load(rows: int, rng: np.random.Generator) -> tuple[pd.DatetimeIndex, Floats]:
    """A load like AEP's: days by season, weekends, holidays, weather."""
    t = pd.date_range("2015-01-01", periods=rows, freq="h")
    hour, year = t.hour.to_numpy(), 2 * np.pi * t.day_of_year.to_numpy() / 365.25
    dates = t.month.to_numpy() * 100 + t.day.to_numpy()
    off = (t.day_of_week.to_numpy() >= 5) | np.isin(dates, [100 * m + d for m, d in HOLIDAYS])
    day = -np.cos(2 * np.pi * (hour - 4) / 24) + 0.4 * np.sin(4 * np.pi * (hour - 7) / 24)
    y = 0.12 * day * (1 + 0.3 * np.cos(year - 3.44)) * (1 - 0.35 * off) - 0.09 * off
    y += 0.08 * (np.cos(2 * year - 0.52) + 0.4 * np.cos(year - 0.26))
    y += 0.03 * _walk(rows, rng, 0.985, 0.25) + _walk(rows, rng, 0.9, 0.006)
    return t, 15000 * (1 + y)


def _temperature(rows: int, rng: np.random.Generator) -> tuple[pd.DatetimeIndex, Floats]:
    """Daily minima: a year, and weather that lasts for days."""
    t = pd.date_range("1981-01-01", periods=rows, freq="D")
    year = 2 * np.pi * (t.day_of_year.to_numpy() - 20) / 365.25
    return t, 11 - 5 * np.cos(year) + _walk(rows, rng, 0.65, 2.2)


def _retail(rows: int, rng: np.random.Generator) -> tuple[pd.DatetimeIndex, Floats]:
    """Counts of an article: weekdays of its own, a level that wanders, promotions."""
    t = pd.date_range("2014-01-01", periods=rows, freq="D")
    base, week = rng.lognormal(0.3, 1.0), 1 + 0.15 * rng.normal(size=7)
    week[5:] += 0.4
    level = np.exp(_walk(rows, rng, 0.98, 0.05))
    promotion = np.where(_walk(rows, rng, 0.95, 1) > 4.5, 1.6, 1.0)
    rate = np.clip(base * week[t.day_of_week.to_numpy()] * level * promotion, 0, None)
    return t, rng.poisson(rate).astype(float)


def main() -> None:
    name, kind, seconds, seed, tables = sys.argv[1:6]
    try:
        from neuralforecast import NeuralForecast, models
        from neuralforecast.losses.pytorch import MAE
    except ImportError as error:
        sys.exit(f"neuralforecast: {error}")
    logging.disable(logging.WARNING)
    each, frames = SETS[name], []
    train, valid, test = each.parts
    for series, rows in table_of(name, Path(tables)).groupby("unique_id"):
        y = rows["y"].to_numpy(float)[: sum(each.parts)]
        y = (y - y[:train].mean()) / (y[:train].std() or 1.0)
        frames.append(pd.DataFrame({"unique_id": series, "ds": np.arange(len(y)), "y": y}))
    options: dict[str, Any] = {
        "h": each.horizon, "input_size": each.input_size, "loss": MAE(), "alias": "peer",
        "random_seed": int(seed), "max_time": {"seconds": float(seconds)}, "max_steps": 10**6,
        "enable_progress_bar": False, "logger": False, "enable_checkpointing": False,
        "accelerator": "cpu", "num_sanity_val_steps": 0,
    }  # fmt: skip
    found = NeuralForecast([getattr(models, kind)(**options)], freq=1).cross_validation(
        pd.concat(frames), val_size=valid, test_size=test, n_windows=None, step_size=1
    )
    error = (found["peer"] - found["y"]).abs()
    print(json.dumps({"mae": float(error.mean()), "windows": len(found) // each.horizon}))


if __name__ == "__main__":
    main()
