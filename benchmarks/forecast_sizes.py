"""What a forecaster of each size ends at in equal times: complete runs, the data of the size plan.

usage: python benchmarks/forecast_sizes.py TABLE [--horizons 96] [--sizes 64,128,256,384,512]
       [--seconds 3,18,85]     of training steps: what budgets of 10 s, 30 s and 2 min have for them
       [--steps 30,60,120]     numbers of steps in place of seconds
       [--set NAME=VALUE ...]  other options of the forecaster
       [--rates]               only time the steps; to be run on a quiet machine
       [--no-test] [--threads 1] [--seed 0] [--results DIR]
Steps are timed once per size and kept; runs are ended by the number of steps that fit, so that a
busy machine changes nothing. Every run is one JSON line of forecast_sizes.jsonl in DIR
(benchmarks/results/<machine>); a run that is there is not repeated.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine, results_folder

from fastlstm import Forecaster
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.preparation import prepare
from fastlstm.forecast.data.splits import split_table
from fastlstm.forecast.plan import untrained_forecaster
from fastlstm.forecast.size_plan import step_seconds

RATE_THREADS = 2
_NUM_TIMED = 3
_MOST_EVALUATIONS, _STEPS_PER_EVALUATION = 8, 60


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("table")
    parser.add_argument("--horizons", default="96")
    parser.add_argument("--sizes", default="64,128,256,384,512")
    parser.add_argument("--seconds", default="3,18,85")
    parser.add_argument("--steps", default="")
    parser.add_argument("--set", nargs="*", default=[])
    parser.add_argument("--rates", action="store_true")
    parser.add_argument("--no-test", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results")
    options = parser.parse_args()
    path = Path(options.results or results_folder()) / "forecast_sizes.jsonl"
    torch.set_num_threads(options.threads)
    more = dict(pair.split("=", 1) for pair in options.set)
    for horizon in map(int, options.horizons.split(",")):
        for size in map(int, options.sizes.split(",")):
            fields = {"horizon": horizon, "hidden_size": size, **map_numbers(more)}
            for steps in map(int, filter(None, options.steps.split(","))):
                run(options, fields | {"steps": steps, "seed": options.seed}, None, path)
            for seconds in () if options.steps else map(float, options.seconds.split(",")):
                rate = stored(path, {"kind": "rate", **shape_of(fields)})
                if rate is None:
                    rate = timed(options.table, fields, path)
                steps = max(1, round(seconds / rate["step_s"]))
                if not options.rates:
                    run(options, fields | {"steps": steps, "seed": options.seed}, seconds, path)


def shape_of(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns what the time of a step depends on: tables of one form take the same."""
    return {name: value for name, value in fields.items() if name != "split"}


def map_numbers(options: dict[str, str]) -> dict[str, Any]:
    """Returns options with numbers where they are numbers."""
    found: dict[str, Any] = {}
    for name, text in options.items():
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


def stored(path: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the line that has all of `key`, if there is one."""
    rows = map(json.loads, path.read_text("utf-8").splitlines()) if path.exists() else ()
    return next((row for row in rows if key == {name: row.get(name) for name in key}), None)


def keep(path: Path, row: dict[str, Any]) -> dict[str, Any]:
    """Adds a line to the results."""
    row = {**row, "machine": describe_machine()}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    return row


def timed(table: str, fields: dict[str, Any], path: Path) -> dict[str, Any]:
    """Times the steps of a size."""
    before = torch.get_num_threads()
    torch.set_num_threads(RATE_THREADS)
    config = ForecastConfig(**fields)
    dataset = prepare(table, config, lambda done, total: None)
    split = split_table(dataset.table, dataset.frequency, config.split)
    untrained = untrained_forecaster(config, config, dataset, split)
    untrained = replace(untrained, config=replace(untrained.config, precision="fp32"))
    seconds = min(step_seconds(untrained, dataset, split) for _ in range(_NUM_TIMED))
    torch.set_num_threads(before)
    print(f"{fields}: {1000 * seconds:.1f} ms per step", flush=True)
    return keep(path, {"kind": "rate", **shape_of(fields), "step_s": seconds})


def run(options: Any, fields: dict[str, Any], seconds: float | None, path: Path) -> None:
    """Trains one forecaster, unless the file has its result."""
    key = {"table": Path(options.table).name, "fields": fields, "seconds": seconds}
    if stored(path, key) is not None:
        return
    evaluations = min(_MOST_EVALUATIONS, max(2, fields["steps"] // _STEPS_PER_EVALUATION))
    events: list[dict[str, Any]] = []
    names = {"target": fields["target"].split(",")} if "target" in fields else {}
    model = Forecaster(
        **(fields | names),
        eval_every=max(1, -(-fields["steps"] // evaluations)),
        observers=[events.append],
    ).fit(options.table)
    row = {
        **key, "valid_loss": model.fitted_.best_loss, "best_step": model.fitted_.best_step,
        "curve": [(e["step"], e["loss"]) for e in events if e["event"] == "eval"],
        "train_s": model.fitted_.train_s,
    }  # fmt: skip
    if not options.no_test:
        scores = model.backtest(scaled=True, stride=4)
        row |= {name: scores["forecaster"][name] for name in ("mse", "mae")}
        row["naive_mse"] = scores["seasonal_naive"]["mse"]
    keep(path, row)
    tested = "" if options.no_test else f", mse {row['mse']:.4f}"
    print(f"{fields}: {row['valid_loss']:.4f}{tested}", flush=True)


if __name__ == "__main__":
    main()
