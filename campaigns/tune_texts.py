"""Campaigns of `tune_quality` on texts."""

from __future__ import annotations

import itertools
import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tune_campaign import Campaign

from fastlstm.text import size_plan
from fastlstm.text.config import TrainConfig
from fastlstm.text.data.tokenizer import CharTokenizer
from fastlstm.text.size_plan import EMBED_SIZES
from fastlstm.text.train import train
from fastlstm.training.optimizer import DEFAULT_LEARNING_RATE
from fastlstm.tuning.job import Space
from fastlstm.tuning.planned_run import plan_run
from fastlstm.tuning.text_job import TextJob, whole_run_bits
from fastlstm.tuning.tune import Search

GRID: dict[str, list[Any]] = {
    "rnn_size": [96, 128, 192, 256], "batch_size": [16, 32], "seq_length": [64, 128],
    "optimizer": [("muon", 1.0), ("muon", 2.0), ("adamw", 1.0)],
}  # fmt: skip
"""The 48 settings; with the optimizer, its learning rate over the default one."""


class TextCampaign(Campaign):
    """Texts: bits/char."""

    names = ("rnn_size", "embed_size", "batch_size", "seq_length", "optimizer", "learning_rate")
    factors = (("rnn_size", "embed_size"), ("batch_size",), ("seq_length",), ("optimizer",))
    job = TextJob()

    def rates(self) -> None:
        text = self.data.read_text(encoding="utf-8")
        tokenizer = CharTokenizer("".join(sorted(set(text))))
        ids = tokenizer.encode(text)
        given = {"budget", "threads", "precision"}
        config = TrainConfig(budget=f"{self.budget_s:g}s", threads=1, precision="fp32")
        with (
            mock.patch.object(size_plan, "time", SimpleNamespace(perf_counter=time.process_time)),
            mock.patch.object(size_plan, "PLANNING_SHARE", math.inf),  # as if all were known
        ):
            plan = size_plan.SizePlan(config, given, ids, tokenizer, time.process_time())
            best, why = plan.choose()
            config = best.config
            print(why)
            found: list[Space] = []
            names = {*given, "rnn_size", "embed_size", "batch_size", "seq_length", "optimizer"}
            search = Search(None, config, given, Path(), axes=tuple(self.job.fields))
            plan_run(
                str(self.data), config, names,
                look=lambda trainer: found.append(self.job.prepare(trainer, search, print)),
            )  # fmt: skip
            rates = {}
            for options in [*self.around(found[0]), *self.settings()]:
                timed = replace(config, **options)
                if (key := self.rate_key(options)) not in rates:
                    step_s = size_plan.step_seconds(timed, ids, tokenizer)
                    rates[key] = self.units(options) / step_s
        self._keep({"kind": "rates", "default": asdict(found[0]), "rates": rates})

    def settings(self) -> list[dict[str, Any]]:
        found = []
        for size, batch, length, (optimizer, factor) in itertools.product(*GRID.values()):
            found.append({
                "rnn_size": size, "embed_size": EMBED_SIZES[size], "batch_size": batch,
                "seq_length": length, "optimizer": optimizer,
                "learning_rate": factor * DEFAULT_LEARNING_RATE[optimizer],
            })  # fmt: skip
        return found

    def units(self, options: Mapping[str, Any]) -> int:
        return int(options["batch_size"] * options["seq_length"])

    def rate_key(self, options: Mapping[str, Any]) -> str:
        names = ("rnn_size", "batch_size", "seq_length", "optimizer")
        return "/".join(str(options[name]) for name in names)

    def label(self, options: Mapping[str, Any]) -> str:
        return f"{self.rate_key(options)}/{options['learning_rate']:g}"

    def result(self, row: Mapping[str, Any]) -> float:
        return float(row["end"]["best_bits_per_char"])

    def expected(
        self, row: Mapping[str, Any], space: Space, seconds: float, whole_s: float
    ) -> float:
        end, lengths_s = row["end"], (seconds, whole_s)
        start = {**row["start"], "model": {"num_layers": 1, **row["start"]["model"]}}
        return whole_run_bits(start, end, row["options"], space, lengths_s)

    def train(self, options: Mapping[str, Any], steps: int, seed: int) -> dict[str, Any]:
        kept: dict[str, Any] = {}

        def keep(event: Any) -> None:
            kept[event["event"]] = event

        config = replace(
            TrainConfig(), **options, steps=steps, seed=seed, threads=1, precision="fp32",
            tensorboard=False, sample_every=0,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            train(
                str(self.data), out=Path(folder, "run"), config=config, observers=[keep],
                given={*options, "steps", "seed", "threads", "precision"}, as_text=True,
            )  # fmt: skip
        start = {
            "model": {name: kept["start"]["model"][name] for name in ("rnn_size", "num_layers")},
            "num_units": kept["start"]["num_units"],
        }
        names = ("units", "step", "best_bits_per_char", "elapsed_s")
        end = {name: kept["end"][name] for name in names}
        end["spent_s"] = {"setup": kept["end"]["spent_s"]["setup"]}
        return {"start": start, "end": end}
