"""Compares what the search of `fastlstm tune` chooses with the best of 48 settings.

usage: python tests/campaigns/tune_quality.py RESULTS.jsonl TEXT rates [--budget 10]
       python tests/campaigns/tune_quality.py RESULTS.jsonl TEXT PART [--budget 10]
PART is search, grid, seeds or report, in this order.
`rates` finds the default of a budget and times a step of every setting, in seconds of the process,
not of the clock. All else trains by steps, as many as the setting reaches in so many seconds at
that rate, so that the results do not depend on what else the machine does. One thread, fp32. Every
run is one line; a run that is there is not repeated. `search` gets 15 % of the time of the 48 runs
of the budget.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from fastlstm.text import size_plan
from fastlstm.text.config import TrainConfig
from fastlstm.text.data.tokenizer import CharTokenizer
from fastlstm.text.size_plan import EMBED_SIZES
from fastlstm.text.train import train
from fastlstm.training.optimizer import DEFAULT_LEARNING_RATE
from fastlstm.tuning import halving
from fastlstm.tuning.job import Default
from fastlstm.tuning.moves import FIELDS, label_of, options_of
from fastlstm.tuning.planned_run import plan_run
from fastlstm.tuning.preparation import prepare
from fastlstm.tuning.text_job import TextJob, whole_run_bits
from fastlstm.tuning.tune import Search

SHARE = 0.15
_SHORTEST = 1 / 12
SEEDS = (0, 1, 2)
GRID: dict[str, list[Any]] = {
    "rnn_size": [96, 128, 192, 256], "batch_size": [16, 32], "seq_length": [64, 128],
    "optimizer": [("muon", 1.0), ("muon", 2.0), ("adamw", 1.0)],
}  # fmt: skip
"""The 48 settings; with the optimizer, its learning rate over the default one."""
NAMES = ("rnn_size", "embed_size", "batch_size", "seq_length", "optimizer", "learning_rate")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("part", choices=("rates", "search", "grid", "seeds", "report"))
    parser.add_argument("--budget", type=float, default=10.0)
    parser.add_argument("--most", type=int, default=1000, help="end after so many new runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    campaign = Campaign(options.results, options.text, options.budget, options.most)
    getattr(campaign, options.part)()


class Campaign:
    """Runs of one text and budget, kept in a file."""

    def __init__(self, path: Path, text: Path, budget_s: float, most: int) -> None:
        self.path, self.text, self.budget_s, self.left = path, text, budget_s, most
        self.rows = [json.loads(t) for t in path.read_text("utf-8").splitlines()] if (
            path.exists()
        ) else []  # fmt: skip

    def rates(self) -> None:
        """Keeps the default of the budget and the tokens/s of every setting near it."""
        text = self.text.read_text(encoding="utf-8")
        tokenizer = CharTokenizer("".join(sorted(set(text))))
        ids = tokenizer.encode(text)
        given = {"budget", "threads", "precision"}
        config = TrainConfig(budget=f"{self.budget_s:g}s", threads=1, precision="fp32")
        with (
            mock.patch.object(size_plan, "time", SimpleNamespace(perf_counter=time.process_time)),
            mock.patch.object(size_plan, "PLANNING_SHARE", math.inf),  # as if all were known
        ):
            plan = size_plan.SizePlan(config, given, ids, tokenizer, time.process_time())
            config, why = plan.choose()
            print(why)
            found: list[Any] = []
            names = {*given, "rnn_size", "embed_size", "batch_size", "seq_length", "optimizer"}
            plan_run(
                str(self.text), config, names,
                look=lambda trainer: found.append(
                    prepare(TextJob(), trainer, given, Search(Path(), axes=tuple(FIELDS)), print)
                ),
            )  # fmt: skip
            default = found[0]
            rates = {}
            for options in [*_around(default), *settings()]:
                timed = replace(config, **options)
                if (key := _rate_key(options)) not in rates:
                    step_s = size_plan.step_seconds(timed, ids, tokenizer)
                    rates[key] = options["batch_size"] * options["seq_length"] / step_s
        self._keep({"kind": "rates", "default": default.to_dict(), "rates": rates})

    def search(self) -> None:
        """Runs the search with a part of the time of the grid."""
        halving.MIN_TRIAL_S = _SHORTEST * self.budget_s
        used = [0.0]
        run = partial(self._expected, used)
        setup = self._setup["default"]
        best, bits, default = halving.search(
            setup["changes"],
            setup["rates"],
            SHARE * len(settings()) * self.budget_s,
            self.budget_s,
            run,
        )
        print(f"search: {label_of(best)}, {bits:.3f} bits/char expected beside {default:.3f};"
              f" {used[0]:.0f} s of training")  # fmt: skip
        self._keep({"kind": "choice", "options": self._options(best), "label": label_of(best)})

    def grid(self) -> None:
        """Trains every setting, and the default, for the whole budget."""
        for options in [self._options({}), *settings()]:
            print(
                f"{_label(options)}: {self._bits(options, self.budget_s, SEEDS[0]):.4f}", flush=True
            )

    def seeds(self) -> None:
        """Trains the best settings, the default and the choice with all seeds."""
        for options, seed in itertools.product(self._finalists(), SEEDS):
            print(
                f"{_label(options)}, seed {seed}: {self._bits(options, self.budget_s, seed):.4f}",
                flush=True,
            )

    def report(self) -> None:
        """Prints the best settings and those of search and default, paired by seed."""
        finalists = self._finalists()
        bits = np.array([[self._bits(o, self.budget_s, s) for s in SEEDS] for o in finalists])
        best = bits[2:].mean(axis=1).min()
        names = ["default", "search", *(f"best {n}" for n in range(1, len(finalists) - 1))]
        for name, options, found in zip(names, finalists, bits, strict=True):
            print(f"{name}: {_label(options)}: {found.mean():.4f} ({found.mean() - best:+.4f} from"
                  f" the best; seeds {found.round(4).tolist()})")  # fmt: skip

    @property
    def _setup(self) -> dict[str, Any]:
        return next(row for row in self.rows if row["kind"] == "rates" and self._is_own(row))

    def _finalists(self) -> list[dict[str, Any]]:
        """Returns the options of default, choice and the three best of the grid."""
        choice = [r for r in self.rows if r["kind"] == "choice" and self._is_own(r)][-1]
        ranked = sorted(settings(), key=lambda o: self._bits(o, self.budget_s, SEEDS[0]))
        return [self._options({}), choice["options"], *ranked[:3]]

    def _options(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        options = options_of(self._setup["default"]["options"], changes)
        return {name: options[name] for name in NAMES}

    def _rate(self, options: Mapping[str, Any]) -> float | None:
        return self._setup["rates"].get(_rate_key(options))

    def _steps(self, options: Mapping[str, Any], seconds: float) -> int:
        """Returns the steps in so many seconds; by factors, if the settings were not timed."""
        rate = self._rate(options)
        if rate is None:
            own = self._options({})
            rate = self._rate(own)
            for names in (
                ("rnn_size", "embed_size"),
                ("batch_size",),
                ("seq_length",),
                ("optimizer",),
            ):
                changed = {**own, **{name: options[name] for name in names}}
                rate *= self._rate(changed) / self._rate(own)
        return max(1, int(seconds * rate / (options["batch_size"] * options["seq_length"])))

    def _expected(self, used: list[float], changes: Mapping[str, Any], seconds: float) -> float:
        options = self._options(changes)
        used[0] += seconds
        steps, whole = self._steps(options, seconds), self._steps(options, self.budget_s)
        end = self._run(options, steps, SEEDS[0])
        default = Default(**self._setup["default"])
        lengths_s = seconds, seconds * whole / steps
        bits = whole_run_bits(end["start"], end["end"], options, default, lengths_s)
        print(f"  {seconds:.1f} s, {steps} steps, {label_of(changes)}:"
              f" {end['end']['best_bits_per_char']:.3f},"
              f" whole {bits:.3f}", flush=True)  # fmt: skip
        return bits

    def _bits(self, options: Mapping[str, Any], seconds: float, seed: int) -> float:
        row = self._run(options, self._steps(options, seconds), seed)
        return float(row["end"]["best_bits_per_char"])

    def _run(self, options: Mapping[str, Any], steps: int, seed: int) -> dict[str, Any]:
        """Returns the start and the end of a run, trained now or known."""
        key = {"kind": "run", "options": dict(options), "steps": steps, "seed": seed}
        for row in self.rows:
            if row["text"] == self.text.name and all(row.get(n) == v for n, v in key.items()):
                return row
        if self.left == 0:
            sys.exit("more runs are left: start it again")
        self.left -= 1
        kept: dict[str, Any] = {}

        def keep(event: Any) -> None:
            kept[event["event"]] = event

        config = replace(
            TrainConfig(), **options, steps=steps, seed=seed, threads=1, precision="fp32",
            tensorboard=False, sample_every=0,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            train(
                str(self.text), out=Path(folder, "run"), config=config, observers=[keep],
                given={*options, "steps", "seed", "threads", "precision"}, as_text=True,
            )  # fmt: skip
        start = {
            "model": {"rnn_size": options["rnn_size"]},
            "num_units": kept["start"]["num_units"],
        }
        names = ("units", "step", "best_bits_per_char", "elapsed_s")
        end = {name: kept["end"][name] for name in names}
        end["spent_s"] = {"setup": kept["end"]["spent_s"]["setup"]}
        return self._keep({**key, "start": start, "end": end})

    def _is_own(self, row: Mapping[str, Any]) -> bool:
        return row["text"] == self.text.name and row.get("budget_s") == self.budget_s

    def _keep(self, row: dict[str, Any]) -> dict[str, Any]:
        row = {"text": self.text.name, "budget_s": self.budget_s, **row}
        row = json.loads(json.dumps(row))
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return row


def settings() -> list[dict[str, Any]]:
    """Returns the options of the 48 settings."""
    found = []
    for size, batch, length, (optimizer, factor) in itertools.product(*GRID.values()):
        found.append({
            "rnn_size": size, "embed_size": EMBED_SIZES[size], "batch_size": batch,
            "seq_length": length, "optimizer": optimizer,
            "learning_rate": factor * DEFAULT_LEARNING_RATE[optimizer],
        })  # fmt: skip
    return found


def _around(default: Default) -> list[dict[str, Any]]:
    """Returns the options of the default and of its single changes."""
    every = [options_of(default.options, changes) for changes in ({}, *default.changes)]
    return [{name: options[name] for name in NAMES} for options in every]


def _rate_key(options: Mapping[str, Any]) -> str:
    names = ("rnn_size", "batch_size", "seq_length", "optimizer")
    return "/".join(str(options[name]) for name in names)


def _label(options: Mapping[str, Any]) -> str:
    return f"{_rate_key(options)}/{options['learning_rate']:g}"


if __name__ == "__main__":
    main()
