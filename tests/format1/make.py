"""Made the stored set of format 1: `stored/` and what today's code answers, `answers.json`.

usage: PYTHONPATH=tests python -m format1.make

This ran once, with the last code that wrote format 1. The set stands for the runs that people
have: it is never made anew after the format changed, and this script refuses then. Delete nothing
in it while fastlstm reads format 1.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

from pyarrow import csv

import fastlstm
from fastlstm.errors import Stopped
from fastlstm.forecast import files as forecaster_files
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.train import train_forecaster
from fastlstm.text import config as text_config
from fastlstm.text.data.text import prepare_text
from fastlstm.training import checkpoint
from format1 import answers
from golden import figures, material
from golden.courses import Stop, fast_clock

MARGIN = 1e-3
TEXT: dict[str, Any] = {
    "embed_size": 8, "rnn_size": 8, "batch_size": 4, "seq_length": 8, "split": "60/20/20",
    "precision": "fp32", "device": "cpu", "threads": 1, "tensorboard": False, "sample_every": 0,
    "log_every": 1, "eval_every": 3, "keep_checkpoints": 1, "seed": 3, "learning_rate": 0.05,
}  # fmt: skip
OPTIONS: dict[str, Any] = {
    "num_layers": 2, "layer_norm": True, "recurrent_dropout": 0.2, "residual": True,
    "dropout": 0.2, "ema": 0.9,
}  # fmt: skip
TABLE: dict[str, Any] = {
    "horizon": 4, "input_size": 8, "patch": 2, "hidden_size": 2, "steps": 12, "dropout": 0.1,
    "batch_size": 8, "evaluations": 4, "seed": 3, "threads": 1, "tensorboard": False,
    "keep_checkpoints": 1, "time": "ds", "series": "unique_id",
}  # fmt: skip


def main() -> None:
    versions = text_config.FORMAT_VERSION, checkpoint.FORMAT_VERSION, forecaster_files._FORMAT
    if versions != (1, 1, 2):
        raise SystemExit(f"this fastlstm writes the formats {versions}, the set is of (1, 1, 2)")
    target = Path(__file__).with_name("stored")
    # In there, so that the runs hold relative paths only.
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        os.environ["FASTLSTM_CACHE"] = "cache"
        _make()
        if target.exists():
            shutil.rmtree(target)
        _keep(Path(name), target)
    _ask(target)
    print(sum(p.stat().st_size for p in target.rglob("*") if p.is_file()), "bytes")


def _make() -> None:
    Path("text.txt").write_text(material.text(1200), encoding="utf-8")
    whole = material.table(100, 2)
    rows = material.holed(whole)
    rows = rows.append_column("count", [material.counts(len(rows))])
    csv.write_csv(rows, "table.csv")
    one = material.table(90).select(["unique_id", "ds", "y"])
    csv.write_csv(one, "one.csv")

    finished: dict[str, Any] = {**TEXT, "log_every": 20, "eval_every": 20, "observers": ()}
    fastlstm.train("text.txt", out="char", steps=40, **OPTIONS, **finished)
    tied = {"vocab": "byte", "tie_weights": True, "optimizer": "adam", "learning_rate": 0.02}
    fastlstm.train("text.txt", out="byte", steps=40, **{**finished, **tied})
    bpe = {"vocab": "bpe", "vocab_size": 270, "batch_size": 2}
    fastlstm.train("text.txt", out="bpe", steps=40, **{**finished, **bpe})
    _make_stopped_text()

    known = {
        "target": ("y", "temp"), "future": ("plan", "day"), "static": ("shop", "size"),
        "categorical": ("day", "shop"), "channels": "joint", "output": "quantiles",
        "normalize": "standard", "bidirectional": True, "balance": True, "ignore": ("count",),
        "split": "60/20/20", "past": (), "patch": 1,
    }  # fmt: skip
    config = ForecastConfig(**{**TABLE, **known})
    train_forecaster(answers.table(Path(), "table"), config, out="windows")
    streams = {
        "target": "y", "past": ("temp",), "output": "student_t", "tbptt": 8, "batch_size": 2,
        "ignore": ("plan", "day", "shop", "size", "count"), "split": "60/20/20",
    }  # fmt: skip
    train_forecaster(
        answers.table(Path(), "table"), ForecastConfig(**{**TABLE, **streams}), out="streams"
    )
    counted = {
        "target": "count", "past": (), "output": "negative_binomial", "num_layers": 2,
        "decoder": "autoregressive", "split": "60/20/20", "hidden_size": 1,
        "ignore": ("plan", "day", "shop", "size", "y", "temp"),
    }  # fmt: skip
    train_forecaster(
        answers.table(Path(), "table"), ForecastConfig(**{**TABLE, **counted}), out="counts"
    )
    # One with averaged and best weights and a carried state, one that has neither yet.
    _make_stopped_table("streams-stopped", 5, tbptt=8, batch_size=2)
    _make_stopped_table("windows-stopped", 2, ema=0.0)


def _make_stopped_text() -> None:
    """Stops a run at step 5, of the first seed whose models write what hangs on no rounding."""
    small = {"embed_size": 4, "rnn_size": 4, "accumulate": 2, "batch_size": 2, "lane_reset": 0.2}
    for seed in range(40):
        stop = Stop(5)
        with contextlib.suppress(Stopped):
            fastlstm.train(
                "text.txt", out="text-stopped", steps=12, observers=[stop.observe], stop=stop,
                **{**OPTIONS, **TEXT, **small, "seed": seed},
            )  # fmt: skip
        names = ("text-stopped", "text-stopped/checkpoint-5")
        if min(answers.smallest_margin(Path(), name) for name in names) > MARGIN:
            return
        shutil.rmtree("text-stopped")
    raise SystemExit("no seed whose text hangs on no rounding")


def _make_stopped_table(name: str, step: int, **fields: Any) -> None:
    stop = Stop(step)
    fields = {**TABLE, "hidden_size": 1, "target": "y", "split": "50,20,20", **fields}
    with contextlib.suppress(Stopped), fast_clock():
        train_forecaster(
            answers.table(Path(), "one"), ForecastConfig(**fields), out=name, stop=stop,
            observers=[stop.observe],
        )  # fmt: skip


def _keep(made: Path, target: Path) -> None:
    """Copies what is read: of finished runs no checkpoint, of the cache the text."""
    stopped = ("text-stopped", "windows-stopped", "streams-stopped")
    for name in ("char", "byte", "bpe", "windows", "streams", "counts", *stopped):
        left_out = ["report.html", ".lock"] + ["checkpoint-*"] * (name not in stopped)
        shutil.copytree(made / name, target / name, ignore=shutil.ignore_patterns(*left_out))
    for name in ("text.txt", "table.csv", "one.csv"):
        shutil.copy(made / name, target / name)
    prepare_text("text.txt", cache_dir="kept").train_counts()
    shutil.copytree("kept", target / "cache", ignore=shutil.ignore_patterns(".lock"))


def _ask(target: Path) -> None:
    """Writes answers.json."""
    for name in answers.TEXT_MODELS:
        margin = answers.smallest_margin(target, name)
        print(f"{name}: smallest margin {margin:.4f}")
        if margin < MARGIN:
            raise SystemExit(f"{name} writes what hangs on rounding; give it another seed")
    found: dict[str, Any] = {"made on": figures.machine()}
    for question, ask in answers.QUESTIONS.items():
        with tempfile.TemporaryDirectory() as copy:
            os.environ["FASTLSTM_CACHE"] = f"{copy}/measured"
            shutil.copytree(target, Path(copy) / "set")
            found[question] = ask(Path(copy) / "set")
    session = fastlstm.LM.load(target / "char").session()
    session.read("the quick na")
    session.write(3, temperature=0.0)
    server = answers.served(target, {"prompt": "the quick na"})
    blobs = {
        "unsigned": base64.b64encode(session.save()).decode(),
        "signed": base64.b64encode(session.save(answers.KEY)).decode(),
        "served": server["session"],
    }
    after = {
        "unsigned": answers.session(target, blobs["unsigned"], None),
        "signed": answers.session(target, blobs["signed"], answers.KEY),
        "served": answers.served(target, {"prompt": "", "session": blobs["served"]})["text"],
    }
    found["sessions"] = {"blobs": blobs, "written": after}
    path = Path(__file__).with_name("answers.json")
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
