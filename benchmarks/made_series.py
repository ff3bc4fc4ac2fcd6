"""Writes a made table of many series: python benchmarks/made_series.py OUT.parquet [ROWS] [SERIES]

Every series has a day and a week of its own shape and strength, a level that wanders, bursts that
follow the past of a hidden driver, and noise that the level scales.
"""

from __future__ import annotations

import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray


def one_series(rows: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Returns the hourly values of one series, shape ``(rows,)``."""
    hours = np.arange(rows)
    day, week = rng.normal(size=24).cumsum(), rng.normal(size=7)
    shape = (day - day.mean())[hours % 24] * (1 + 0.4 * (week - week.mean())[hours // 24 % 7])
    level = rng.normal(scale=0.02, size=rows).cumsum()
    driver = np.zeros(rows)
    for place in range(1, rows):
        driver[place] = 0.98 * driver[place - 1] + rng.normal()
    bursts = np.tanh(np.roll(driver, 12)) * np.roll(np.abs(driver), 36) / 4
    noise = rng.normal(size=rows) * (0.2 + 0.05 * np.abs(level))
    return np.asarray(10 + rng.exponential() * shape + level + bursts + noise)


def main() -> None:
    out, rows, series = sys.argv[1], *map(int, [*sys.argv[2:], "1000000", "50"][:2])
    rng, each = np.random.default_rng(0), rows // series
    times = np.datetime64("2020-01-01", "s") + np.arange(each) * np.timedelta64(3600, "s")
    names = [f"s{number:03d}" for number in range(series)]
    table = pa.table({
        "unique_id": np.repeat(names, each), "ds": np.tile(times, series),
        "y": np.concatenate([one_series(each, rng) for _ in names]),
    })  # fmt: skip
    pq.write_table(table, out)


if __name__ == "__main__":
    main()
