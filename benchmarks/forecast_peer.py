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
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from forecast_sets import SETS, table_of
from machine import describe_machine, results_folder

from fastlstm import Forecaster
from fastlstm.forecast.calibration import forecast

PEERS = ("DLinear", "NHITS", "LSTM")
_MAX_COVERED = 4000


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
    rows = model._windows(model.dataset_, "test", 1)[1].rows(_MAX_COVERED)
    levels, inside = (0.025, 0.1, 0.9, 0.975), []
    for found, actual in forecast(
        model.network_, model._inputs, rows, model.stored_.calibration, levels
    ):
        low, below, above, high = (found[..., k] for k in range(4))
        pair = [(actual >= below) & (actual <= above), (actual >= low) & (actual <= high)]
        inside.append(np.stack([part.numpy() for part in pair]))
    by_step = np.concatenate(inside, 1).mean((1, 3))
    return {
        "mae": {kind: figures["mae"] for kind, figures in scores.items()},
        "mse": scores["forecaster"]["mse"],
        "coverage": {80: by_step[0].tolist(), 95: by_step[1].tolist()},
        "fit_s": took,
        "calendar": model.stored_.config.calendar,
        "steps": model.fitted_.steps,
    }


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
