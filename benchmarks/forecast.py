"""Accuracy of the forecaster on ETTh1 or ETTm1: every horizon, several seeds, time and coverage.

usage: python benchmarks/forecast.py TABLE [--horizons 24,48,96,168,336,720] [--seeds 3]
       [--train-rows 8640]      validation and test have a third of it each; 34560 for ETTm1
       [--results DIR]          default benchmarks/results/<machine>
The split is the one of the literature: 12, 4 and 4 months of 30 days; columns are z-scored by the
training rows; all seven variables are forecast; errors are in deviations, over every test window.
The weights kept are those best on the validation rows, and the settings are those of two or three
whose first seed is best there; test rows are looked at once, at the end. Stores one JSON line per
horizon in forecast.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from machine import describe_machine, results_folder

from fastlstm import Forecaster

CANDIDATES: tuple[dict[str, Any], ...] = (
    {"learning_rate": 1e-3, "steps": 600},
    {"learning_rate": 5e-4, "steps": 500},
)
WIDE: dict[str, Any] = {"learning_rate": 1e-3, "steps": 600, "hidden_size": 512, "ema": 0.995}
"""Tried, too, at 96 steps; at 336 it overfits (benchmarks/log)."""
WIDE_HORIZONS = (96,)


def fit(path: str, horizon: int, train_rows: int, seed: int, **settings: Any) -> dict[str, Any]:
    """Trains once; returns the figures, and the validation loss over the run."""
    events: list[dict[str, Any]] = []
    third = train_rows // 3
    began = time.perf_counter()
    model = Forecaster(
        horizon=horizon, split=(train_rows, third, third), seed=seed, observers=[events.append],
        **settings,
    ).fit(path)  # fmt: skip
    seconds = time.perf_counter() - began
    return {
        "seed": seed,
        **settings,
        "fit_s": seconds,
        "valid_loss": model.fitted_.best_loss,
        "best_step": model.fitted_.best_step,
        "curve": [event["loss"] for event in events if event["event"] == "eval"],
        "model": model,
    }


def evaluated(run: dict[str, Any]) -> dict[str, Any]:
    """Adds what the test rows say."""
    model = run.pop("model")
    scores = model.backtest(scaled=True)
    best_naive = min(scores[name]["mse"] for name in ("naive", "seasonal_naive"))
    return {**run, **scores["forecaster"], "naive_mse": best_naive}


def measure(path: str, horizon: int, train_rows: int, seeds: int) -> dict[str, Any]:
    """Returns the runs of one horizon; its settings are chosen on validation by seed 0."""
    candidates = CANDIDATES + ((WIDE,) if horizon in WIDE_HORIZONS else ())
    tried = [fit(path, horizon, train_rows, 0, **settings) for settings in candidates]
    losses = [run["valid_loss"] for run in tried]
    chosen = losses.index(min(losses))
    more = (fit(path, horizon, train_rows, seed, **candidates[chosen]) for seed in range(1, seeds))
    runs = [evaluated(tried[chosen]), *map(evaluated, more)]
    errors = [run["mse"] for run in runs]
    return {
        "machine": describe_machine(),
        "table": Path(path).name,
        "horizon": horizon,
        "mse": statistics.mean(errors),
        "mse_spread": max(errors) - min(errors),
        "mae": statistics.mean(run["mae"] for run in runs),
        "coverage_80": statistics.mean(run["coverage_80"] for run in runs),
        "coverage_95": statistics.mean(run["coverage_95"] for run in runs),
        "fit_s": statistics.mean(run["fit_s"] for run in runs),
        "candidates": candidates,
        "valid_losses": losses,
        "chosen": chosen,
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("table")
    parser.add_argument("--horizons", default="24,48,96,168,336,720")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--train-rows", type=int, default=8640)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    results = options.results or results_folder()
    for horizon in map(int, options.horizons.split(",")):
        found = measure(options.table, horizon, options.train_rows, options.seeds)
        print(
            f"  {found['table']} {horizon:4}  mse {found['mse']:.4f} (spread"
            f" {found['mse_spread']:.4f})  mae {found['mae']:.4f}  intervals hold"
            f" {found['coverage_80']:.1%} and {found['coverage_95']:.1%}  {found['fit_s']:.0f} s",
            flush=True,
        )
        with (results / "forecast.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
