"""Errors of forecasts beside ridge, the seasonal naive forecast and neuralforecast's models.

usage: python benchmarks/forecast_peer.py TABLES [--peer-python PATH] [--seconds 60] [--seeds 3]
       [--sets NAME …] [--results DIR]
TABLES is a folder with ETTh1.csv and ETTm1.csv, PATH an interpreter with neuralforecast; without it
only ours run. All read the same rows, train for as long one after the other, and are evaluated on
every test window; errors are in training deviations of each series. The peers have their defaults
and the mean absolute error as loss. Stores a JSON line per set in forecast_peer.jsonl.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from forecast_sets import SETS, table_of
from machine import describe_machine, results_folder
from numpy.typing import NDArray

from fastlstm import Forecaster

PEERS = ("DLinear", "NHITS", "LSTM")
_MAX_COVERED = 4000
_RECALIBRATIONS = 10
Parts = tuple[int, int, int]
Rows = NDArray[np.int64]
Covered = NDArray[np.bool_]


def own(name: str, tables: Path, seconds: int, seed: int) -> dict[str, Any]:
    """Trains ours; returns its errors, those of simple forecasts, and coverage by step."""
    each, table = SETS[name], table_of(name, tables)
    if each.file is not None:
        table = table.pivot(index="ds", columns="unique_id", values="y").reset_index()
    elif table["unique_id"].nunique() == 1:
        table = table.drop(columns="unique_id")
    targets = tuple(c for c in table if c not in ("ds", "unique_id"))
    began = time.perf_counter()
    model = Forecaster(
        horizon=each.horizon, target=targets, split=each.parts, budget=f"{seconds}s", seed=seed,
        verbose=False,
    ).fit(table)  # fmt: skip
    took = time.perf_counter() - began
    scores = model.backtest(scaled=True)
    static = coverage_by_step(model, rows_of_test(model, _MAX_COVERED))
    rolling = recalibrated_coverage(model, table, each.parts)
    return {
        "mae": {kind: figures["mae"] for kind, figures in scores.items()},
        "mse": scores["forecaster"]["mse"],
        "coverage": shares(static),
        "coverage_recalibrated": shares(rolling),
        "fit_s": took,
        "calendar": model.stored_.config.calendar,
        "steps": model.fitted_.steps,
    }


def rows_of_test(model: Forecaster, limit: int | None = None) -> Rows:
    """Returns the first rows of the test windows."""
    return model._windows(model.dataset_, "test", 1)[1].rows(limit)


def coverage_by_step(model: Forecaster, rows: Rows) -> Covered:
    """Returns which values lie within their 80 % and 95 % intervals, shape ``(2, N, h, C)``."""
    found, actual = model.stored_.forecast(model._inputs, rows, (0.025, 0.1, 0.9, 0.975))
    low, below, above, high = (found[..., k] for k in range(4))
    return np.stack([(actual >= below) & (actual <= above), (actual >= low) & (actual <= high)])


def recalibrated_coverage(model: Forecaster, table: pd.DataFrame, parts: Parts) -> Covered:
    """As `coverage_by_step`, recalibrated at every tenth of the test part on the rows before it."""
    rows, times = rows_of_test(model), np.sort(table["ds"].unique())
    first_rows = model.dataset_.table.segments.first_rows
    segments = model.dataset_.table.segments.of_rows(rows)
    origins = rows + model.network_.config.input_size - first_rows[segments]
    cuts = np.linspace(sum(parts[:2]), sum(parts), _RECALIBRATIONS + 1).astype(int)
    found = []
    for begin, end in itertools.pairwise(cuts):
        chosen = rows[(origins >= begin) & (origins < end)]
        if len(chosen):
            model.recalibrate(table[table["ds"] < times[begin]])
            found.append(coverage_by_step(model, chosen[:: len(rows) // _MAX_COVERED + 1]))
    return np.concatenate(found, 1)


def shares(inside: Covered) -> dict[int, list[float]]:
    """Returns the share of every step, by level."""
    both = inside.mean((1, 3))
    return {80: both[0].tolist(), 95: both[1].tolist()}


def peer(python: str, name: str, kind: str, tables: Path, seconds: int, seed: int) -> float | None:
    """Returns the error of one of `PEERS`, None where it failed."""
    worker = str(Path(__file__).parent / "forecast_sets.py")
    command = [python, worker, name, kind, str(seconds), str(seed), str(tables)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return float(json.loads(lines[-1])["mae"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("tables", type=Path)
    parser.add_argument("--peer-python")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    path = (options.results or results_folder()) / "forecast_peer.jsonl"
    for name in options.sets:
        args = options.tables, options.seconds
        runs = [own(name, *args, seed) for seed in range(options.seeds)]
        errors = {
            kind: statistics.median(run["mae"][kind] for run in runs) for kind in runs[0]["mae"]
        }
        for kind in PEERS if options.peer_python else ():
            of_seeds = [
                peer(options.peer_python, name, kind, *args, seed) for seed in range(options.seeds)
            ]
            if None in of_seeds:
                sys.exit(f"{options.peer_python} did not run neuralforecast's {kind}")
            errors[kind] = statistics.median(error for error in of_seeds if error is not None)
        result = {
            "machine": describe_machine(), "set": name, "seconds": options.seconds,
            "seeds": options.seeds, "mae": errors, "runs": runs,
        }  # fmt: skip
        print(f"  {name}: " + ", ".join(f"{kind} {error:.4f}" for kind, error in errors.items()))
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
