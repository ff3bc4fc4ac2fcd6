"""Quality and speed of compressed forecasters: one source, every way, one evaluator, seed by seed.

usage: python benchmarks/compression_forecast.py TABLE WAY... [--seeds 0] [--horizon 96]
       [--train-rows 8640]      validation and test have a third of it each
       [--threads 1] --work DIR
       [--results DIR]          default benchmarks/results/<machine>
       python benchmarks/compression_forecast.py list
TABLE is ETTh1. A way that compression.jsonl already has, of this source and seed, is skipped;
--work keeps the runs that other ways need. The source has the settings that users get, and is
trained for 600 steps, or until validation gains no more. Time is CPU time of this process, which
other work on the machine changes little: the steps of `dense` are chosen to take as long as source
and `units-50` together, those of `alone` as long as `student`, its teacher included; cpu_s tells
how well. Errors are in deviations, over every window of validation and test.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe_machine, results_folder

import fastlstm
from fastlstm import Forecaster
from fastlstm.forecast.data.preparation import prepare
from fastlstm.forecast.data.splits import split_table
from fastlstm.forecast.files import read_forecaster
from fastlstm.forecast.table_schema import apply_schema
from fastlstm.forecast.window_forecaster import WindowForecaster

SOURCE: dict[str, Any] = {"steps": 600, "evaluations": 8, "patience": 3}
STEPS = 300
"""Of a compression."""
UNITS = 128
"""Of the smaller models: half of the source's."""
_UNITS_WAY: dict[str, Any] = {"prune": 0.5, "structured": "units", "steps": STEPS}
_UNTAUGHT = {**_UNITS_WAY, "alpha": 0.0}
WAYS: dict[str, dict[str, Any]] = {
    "source": SOURCE,
    "units-50": {**_UNITS_WAY, "steps": 250},
    "student": {"hidden_size": UNITS, "steps": STEPS},
    "dense": {"hidden_size": UNITS, "steps": 3000},
    "dense-1100": {"hidden_size": UNITS, "steps": 1100},
    "alone": {"hidden_size": UNITS, "steps": 370},
    "untaught": {**_UNTAUGHT, "dropout": 0.5},
    "untaught-rate": {**_UNTAUGHT, "dropout": 0.5, "learning_rate": 2e-3},
    "untaught-0.25": {**_UNTAUGHT, "dropout": 0.25},
    "untaught-0": {**_UNTAUGHT, "dropout": 0.0},
    "units-50-dropout": {**_UNITS_WAY, "dropout": 0.5},
    "student-dropout": {"hidden_size": UNITS, "steps": STEPS, "dropout": 0.5},
    **{
        f"{structured}-75{name}": {
            "prune": 0.75,
            "structured": structured,
            "steps": STEPS,
            "schedule": schedule,
        }
        for structured in ("blocks", "none")
        for name, schedule in {"": None, "-late": "polynomial:0.05,0.6,3,10"}.items()
    },
}
"""-late: with the schedule of before."""
_ALONE = ("source", "dense", "dense-1100", "alone")
_BATCH, _ROUNDS = 256, 9


class Bench:
    """The ways of one source and seed."""

    def __init__(self, options: argparse.Namespace, seed: int) -> None:
        self._options, self._seed = options, seed
        third = options.train_rows // 3
        self._split = f"{options.train_rows},{third},{third}"
        self.source = name_of(options)
        self._work = options.work / f"{self.source}-{seed}"

    def measure(self, way: str) -> dict[str, Any]:
        """Trains or compresses in one way; returns what it cost and what came out."""
        fields, out = dict(WAYS[way]), self._work / way
        if out.exists():  # was cut off: its time is not known
            shutil.rmtree(out)
        began, teacher_s = time.process_time(), 0.0
        common = {"seed": self._seed, "threads": self._options.threads, "tensorboard": False}
        if way in _ALONE:
            model = Forecaster(
                horizon=self._options.horizon, split=self._split, **common, **fields
            ).fit(self._options.table, out=out)
            steps, best_step = model.fitted_.steps, model.fitted_.best_step
        else:
            events: list[dict[str, Any]] = []
            report = fastlstm.compress(
                self._work / "source", out=out, data=self._options.table,
                observers=[events.append], **common, **fields,
            )  # fmt: skip
            assert report.training is not None
            steps, teacher_s = report.training.steps, report.training.teacher_s
            best_step = next(e["best_step"] for e in reversed(events) if "best_step" in e)
        cpu_s = time.process_time() - began
        return {
            "source": self.source, "seed": self._seed, "way": way, "fields": fields,
            "table": Path(self._options.table).name, "machine": describe_machine(),
            **errors_of(out, self._options.table),
            "steps": steps, "best_step": best_step, "cpu_s": cpu_s, "teacher_s": teacher_s,
            "windows_per_cpu_s": None if way == "source" else self._speeds(out),
        }  # fmt: skip

    def _speeds(self, out: Path) -> list[float]:
        """Returns windows per second of CPU time of the source and of a result, in turns."""
        runners = [WindowForecaster(read_forecaster(p), "") for p in (self._work / "source", out)]
        rates: list[list[float]] = [[], []]
        for _ in range(_ROUNDS):
            for runner, found in zip(runners, rates, strict=True):
                past = np.zeros((_BATCH, runner.input_size, len(runner.past.names)), runner.dtype)
                began = time.process_time()
                runner.run(past).arrays()
                found.append(_BATCH / (time.process_time() - began))
        return [statistics.median(found) for found in rates]


def errors_of(run: Path, table: str) -> dict[str, dict[str, float]]:
    """Returns mse and mae over every window of validation and test, in deviations."""
    stored = read_forecaster(run)
    dataset = prepare(table, stored.config, like=stored.schema.timeline)
    inputs = apply_schema(dataset, stored)
    split = split_table(dataset.table, dataset.frequency, stored.config.split)
    L, h, C = (getattr(stored.network.config, n) for n in ("input_size", "horizon", "num_targets"))
    errors: dict[str, dict[str, float]] = {}
    for part in ("valid", "test"):
        found = []
        with torch.no_grad():
            for values, statics in inputs.read(
                split.windows(inputs.table, part, L, h).rows(), L + h
            ):
                forecast = stored.network.output.center(stored.network(values, statics))
                found.append((forecast - values[:, L:, :C]).double())
        error = torch.cat(found)
        errors[part] = {"mse": float(error.square().mean()), "mae": float(error.abs().mean())}
    return errors


def name_of(options: argparse.Namespace) -> str:
    """Returns the name of a source in compression.jsonl."""
    return f"{Path(options.table).stem.lower()}-{options.horizon}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("table")
    parser.add_argument("ways", nargs="*")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--horizon", type=int, default=96)
    parser.add_argument("--train-rows", type=int, default=8640)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    if options.table == "list":
        print(*WAYS)
        return
    if options.work is None:
        parser.error("--work DIR is needed: where runs are kept")
    if unknown := [way for way in options.ways if way not in WAYS]:
        parser.error(f"{unknown[0]!r} is no way: {', '.join(WAYS)}")
    torch.set_num_threads(options.threads)
    path = (options.results or results_folder()) / "compression.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    for seed in map(int, options.seeds.split(",")):
        stored = map(json.loads, path.read_text("utf-8").splitlines() if path.exists() else [])
        own = [r for r in stored if (r["source"], r["seed"]) == (name_of(options), seed)]
        rows = {row["way"]: row for row in own}
        bench = Bench(options, seed)
        for way in options.ways:
            if way not in rows:
                rows[way] = bench.measure(way)
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(rows[way]) + "\n")
                print(json.dumps(rows[way]), flush=True)


if __name__ == "__main__":
    main()
