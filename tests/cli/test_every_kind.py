"""Every verb on every kind of run: it works, or one line says what does instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from pyarrow import csv
from torch import nn

import fastlstm
from compression_source import text_of
from fastlstm.cli import serve
from fastlstm.cli.main import main
from fastlstm.errors import DataError
from fastlstm.runs.find_run import REFUSED
from fastlstm.runs.run_directory import kind_of_run
from fastlstm.serve import server
from series_frames import long_table

SMALL = ["--steps", "2", "--threads", "1", "--no-tensorboard", "--precision", "fp32"]
TEXT = [*SMALL, "--rnn-size", "16", "--embed-size", "8", "--seq-length", "16", "--batch-size", "4"]
TABLE = [*SMALL, "--horizon", "4", "--input-size", "24", "--patch", "4", "--hidden-size", "8"]
SEQUENCE: dict[str, Any] = {"hidden_size": 4, "embed_size": 3, "steps": 2, "threads": 1}
COLUMNS = {"text": "text", "forecaster": "forecaster", "sequence": "sequence model"}
KINDS = (
    "char", "byte", "bpe", "one_series", "series", "classifier", "regressor", "imported_text",
    "imported_classifier", "imported_keras", "imported_onnx",
)  # fmt: skip


class Runs:
    """Small runs of every kind, each made when it is asked for, and data to give with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rng = np.random.default_rng(0)
        self.X = rng.normal(size=(30, 6, 3)).astype(np.float32)
        self.text, self.npz = folder / "book.txt", folder / "sequences.npz"
        self.text.write_text(text_of(3000))
        self.table, self.one = folder / "table.csv", folder / "one.csv"
        csv.write_csv(long_table(120), self.table)
        csv.write_csv(long_table(120, 1).drop_columns(["unique_id"]), self.one)

    def data(self, kind: str) -> Path:
        family = kind_of_run(self.run(kind))
        if family == "text":
            return self.text
        if family == "forecaster":
            return self.one if kind == "one_series" else self.table
        names = {"classifier": np.array(["down", "up"]), "imported_classifier": np.arange(2)}
        y = names[kind][np.arange(30) % 2] if kind in names else self.X[:, 0, 0]
        np.savez(self.npz, X=self.X, y=y, lengths=np.arange(30) % 6 + 1)
        return self.npz

    def run(self, kind: str) -> Path:
        out = self.folder / kind
        if not out.exists():
            self._make(kind, out)
        return out

    def _make(self, kind: str, out: Path) -> None:
        if kind in ("char", "byte", "bpe"):
            size = ["--vocab-size", "300"] if kind == "bpe" else []
            given = ["train", str(self.text), "--vocab", kind, *size, *TEXT]
            assert main([*given, "--out", str(out)]) == 0
        elif kind in ("one_series", "series"):
            source = self.one if kind == "one_series" else self.table
            target = [] if kind == "series" else ["--target", "y"]
            assert main(["train", str(source), *TABLE, *target, "--out", str(out)]) == 0
        elif kind == "classifier":
            labels = np.array(["down", "up"])[np.arange(30) % 2]
            fastlstm.SequenceClassifier(**SEQUENCE).fit(self.X, labels, out=out)
        elif kind == "regressor":
            fastlstm.SequenceRegressor(**SEQUENCE).fit(self.X, self.X[:, 0, 0], out=out)
        else:
            self._import(kind, out)

    def _import(self, kind: str, out: Path) -> None:
        torch.manual_seed(0)
        file = self.folder / f"{kind}.safetensors"
        given: dict[str, Any] = {}
        if kind == "imported_text":
            chars = "".join(sorted(set(self.text.read_text())))
            parts = {"embed": nn.Embedding(len(chars), 4), "lstm": nn.LSTM(4, 8)}
            module: nn.Module = nn.ModuleDict({**parts, "out": nn.Linear(8, len(chars))})
            given = {"chars": chars}
        else:
            module = nn.ModuleDict({"lstm": nn.LSTM(3, 5), "out": nn.Linear(5, 2)})
            given = {"classes": kind == "imported_classifier"}
        if kind == "imported_keras":
            from keras_models import keras, saved, varied

            stack = [keras.Input((None, 3)), keras.layers.LSTM(5), keras.layers.Dense(1)]
            file, given = saved(varied(keras.Sequential(stack)), file.with_suffix(".keras")), {}
        elif kind == "imported_onnx":
            from onnx_models import exported

            class Last(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.lstm, self.out = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 1)

                def forward(self, x: torch.Tensor) -> Any:
                    return self.out(self.lstm(x)[0][:, -1])

            file, given = file.with_suffix(".onnx"), {}
            file.write_bytes(exported(Last(), torch.zeros(2, 7, 3)))
        else:
            safetensors.torch.save_file(module.state_dict(), file)
        fastlstm.import_run(file, out=out, **given)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("kinds"))


def loaded(path: str, settings: Any, *_: Any) -> None:
    server._load(path, settings)


def reached(*_: Any, **__: Any) -> None:
    raise DataError("the run was taken")


Given = Callable[[Runs, str, Path], list[Any]]
VERBS: dict[str, Given] = {
    "info": lambda runs, kind, _: ["info", runs.run(kind)],
    "evaluate": lambda runs, kind, _: ["evaluate", runs.run(kind), runs.data(kind)],
    "generate": lambda runs, kind, _: ["generate", runs.run(kind), "--length", 5],
    "forecast": lambda runs, kind, _: ["forecast", runs.run(kind), runs.data(kind)],
    "serve": lambda runs, kind, _: ["serve", runs.run(kind)],
    "compress": lambda runs, kind, out: [
        *("compress", runs.run(kind), "--to", "int8", "--out", out, "--data", runs.data(kind)),
    ],
    "export": lambda runs, kind, out: ["export", runs.run(kind), "--to", "onnx", "--out", out],
    "train --start": lambda runs, kind, out: [
        *("train", runs.data(kind), "--start", runs.run(kind), "--out", out, *SMALL),
    ],
    "profile": lambda runs, kind, _: ["profile", runs.run(kind)],
    "predict": lambda runs, kind, _: ["predict", runs.run(kind), "--budget", "2m"],
    "scale": lambda runs, kind, _: ["scale", runs.run(kind), "--link", "1gbit"],
    "compare": lambda runs, kind, _: ["compare", runs.run(kind), runs.run(kind)],
    "monitor": lambda runs, kind, out: ["monitor", runs.run(kind), "--export", f"{out}.html"],
}
MEASURING = ("profile", "predict", "scale")


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_verb_works_or_names_what_does(runs, kind, verb, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(serve, "_serve_function", lambda: loaded)
    for place in ("profile.profile_run", "predict.predict_run", "predict.predict_forecaster"):
        monkeypatch.setattr(f"fastlstm.tuning.{place}", reached)
    monkeypatch.setattr("fastlstm.tuning.planned_run.plan_run", reached)
    path, argv = runs.run(kind), VERBS[verb](runs, kind, tmp_path / "out")
    capfd.readouterr()
    code, (out, err) = main([str(word) for word in argv]), capfd.readouterr()
    family = kind_of_run(path)
    assert family is not None
    if (instead := REFUSED.get(verb, {}).get(family)) is not None:
        assert (code, err.count("\n")) == (2, 1), err
        assert f"which `fastlstm {verb}` does not take; {instead.format(run=path)}" in err
    elif verb in MEASURING and not kind.startswith("imported"):
        assert (code, "the run was taken" in err) == (2, True), err
    elif verb in MEASURING:
        assert "do not say what it was trained on" in err
    elif verb == "compare" and kind.startswith("imported"):
        assert "no training is recorded there" in err
    else:
        assert code == 0, (out, err)


def told(verb: str) -> str:
    cells = [REFUSED.get(verb, {}).get(kind, "yes").format(run="RUN") for kind in COLUMNS]
    return f"| `{verb}` | {' | '.join(cells)} |"


def test_the_table_of_the_documentation_is_this_one(repository):
    page = (repository / "docs/runs.md").read_text()
    lines = [f"| verb | {' | '.join(COLUMNS.values())} |", "|---|---|---|---|", *map(told, VERBS)]
    assert "\n".join(lines) in page, "\n".join(lines)
    assert REFUSED.keys() <= VERBS.keys()
