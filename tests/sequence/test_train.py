"""Sequence models in a run directory: resumed bit-exactly, stopped, refused."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

import fastlstm
from fastlstm import SequenceClassifier, SequenceRegressor
from fastlstm.errors import ConfigError, DataError, FormatError, RunDirectoryError, Stopped
from fastlstm.runs.run_directory import kind_of_run

QUICK: dict[str, Any] = {
    "hidden_size": 6, "embed_size": 4, "batch_size": 8, "steps": 12, "held_out": 0.2,
    "dropout": 0.2, "threads": 1, "log_every": 1, "device": "cpu", "patience": 0,
}  # fmt: skip
"""Five steps an epoch of 40 sequences; 12 steps end within the third."""


def sequences(num: int = 50) -> tuple[list[NDArray[np.float64]], NDArray[np.float64]]:
    rng = np.random.default_rng(0)
    X = [rng.normal(size=(n, 2)) for n in rng.integers(3, 9, num)]
    return X, np.array([x[:, 0].sum() for x in X])


X, Y = sequences()


class StopAt:
    """An observer that sends this process SIGTERM at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def newest(run: Path) -> Path:
    return max(run.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))


def events_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_same_files(left: Path, right: Path) -> None:
    for file in sorted(left.glob("*.safetensors")):
        a, b = load_file(file), load_file(right / file.name)
        assert a.keys() == b.keys()
        for name in a:
            assert torch.equal(a[name], b[name]), f"{file.name}:{name}"


@pytest.mark.parametrize("step", [2, 5, 9])
def test_a_stopped_run_ends_bit_equal(tmp_path: Path, step: int) -> None:
    whole = SequenceRegressor(**QUICK).fit(X, Y, out=tmp_path / "whole")
    parts = SequenceRegressor(**QUICK, observers=[StopAt(step)])
    with pytest.raises(Stopped, match=f"SIGTERM; checkpoint-{step} is saved"):
        parts.fit(X, Y, out=tmp_path / "parts")
    parts.set_params(observers=()).fit(X, Y, out=tmp_path / "parts", resume=True)
    assert_same_files(newest(tmp_path / "whole"), newest(tmp_path / "parts"))
    assert_same_files(tmp_path / "whole", tmp_path / "parts")
    assert (whole.predict(X) == parts.predict(X)).all()
    losses = [
        [(e["step"], e["loss"]) for e in events_of(tmp_path / name) if e["event"] == "step"]
        for name in ("whole", "parts")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 12


def test_a_run_is_a_directory_with_a_model_a_report_and_all_events(tmp_path: Path) -> None:
    model = SequenceRegressor(**QUICK).fit(X, Y, out=tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"config.json", "model.safetensors", "metrics.jsonl", "report.html"} <= names
    assert kind_of_run(tmp_path / "run") == kind_of_run(newest(tmp_path / "run")) == "sequence"
    events = events_of(tmp_path / "run")
    start, end = events[0], events[-1]
    assert (start["event"], start["task"], start["unit"]) == ("start", "sequence", "sequences")
    assert start["num_units"] == {"train": 40, "valid": 10}
    assert (end["event"], end["task"], end["step"], end["units"]) == ("end", "sequence", 12, 96)
    assert [e["step"] for e in events if e["event"] == "eval"] == [5, 10, 12]
    loaded = SequenceRegressor.load(tmp_path / "run")
    assert (loaded.predict(X) == model.predict(X)).all()
    with_and_without = SequenceRegressor(**QUICK).fit(X, Y)
    assert (with_and_without.predict(X) == model.predict(X)).all()


def test_a_finished_run_is_continued_for_more_steps(tmp_path: Path) -> None:
    SequenceRegressor(**QUICK).fit(X, Y, out=tmp_path / "run")
    longer = {**QUICK, "steps": 14}
    model = SequenceRegressor(**longer).fit(X, Y, out=tmp_path / "run", resume=True)
    assert model.fitted_.steps == 14
    again = SequenceRegressor(**longer).fit(X, Y, out=tmp_path / "run", resume=True)
    assert (again.predict(X) == model.predict(X)).all()


def test_a_run_resumes_only_with_its_own_data_and_options(tmp_path: Path) -> None:
    out = tmp_path / "run"
    SequenceRegressor(**QUICK).fit(X, Y, out=out)
    with pytest.raises(RunDirectoryError, match="already contains a run"):
        SequenceRegressor(**QUICK).fit(X, Y, out=out)
    other = [*X[:-1], X[-1] + 1e-3]
    for data, answers in ((other, Y), (X, Y + 1), (X[:-1], Y[:-1])):
        with pytest.raises(FormatError, match="was started with other sequences or answers"):
            SequenceRegressor(**QUICK).fit(data, answers, out=out, resume=True)
    with pytest.raises(FormatError, match="was started with other sequences or answers"):
        SequenceClassifier(**QUICK).fit(X, Y > 0, out=out, resume=True)
    for name, value in (("hidden_size", 7), ("learning_rate", 1e-3), ("held_out", 0.3)):
        given = {**QUICK, name: value}
        with pytest.raises(ConfigError, match=f"`{name}={value}`: this run was started with"):
            SequenceRegressor(**given).fit(X, Y, out=out, resume=True)
    assert len([e for e in events_of(out) if e["event"] == "start"]) == 1
    with pytest.raises(ConfigError, match="`resume=True` continues a run directory; give `out`"):
        SequenceRegressor(**QUICK).fit(X, Y, resume=True)


def test_class_weights_are_stored_and_resumed(tmp_path: Path) -> None:
    labels = np.digitize(Y, [-2.0, 1.0])  # JSON has no whole numbers as keys
    given = {**QUICK, "class_weight": {2: 3.0, np.int64(0): 0.5}}
    whole = SequenceClassifier(**given).fit(X, labels, out=tmp_path / "whole")
    parts = SequenceClassifier(**given, observers=[StopAt(5)])
    with pytest.raises(Stopped):
        parts.fit(X, labels, out=tmp_path / "parts")
    other = SequenceClassifier(**{**given, "class_weight": "balanced"})
    with pytest.raises(ConfigError, match=r"`class_weight='balanced'`: this run was started with"):
        other.fit(X, labels, out=tmp_path / "parts", resume=True)
    parts.set_params(observers=(), class_weight={0: 0.5, 2: 3})
    parts.fit(X, labels, out=tmp_path / "parts", resume=True)
    assert_same_files(tmp_path / "whole", tmp_path / "parts")
    loaded = SequenceClassifier.load(tmp_path / "parts")
    assert loaded.class_weight == {0: 0.5, 2: 3.0}
    assert (loaded.predict_proba(X) == whole.predict_proba(X)).all()
    plain = SequenceClassifier(**QUICK).fit(X, labels)
    assert not (plain.predict_proba(X) == whole.predict_proba(X)).all()
    with pytest.raises(DataError, match="`class_weight` is for SequenceClassifier"):
        SequenceRegressor(**given).fit(X, Y)


def test_a_run_of_another_kind_is_refused(tmp_path: Path) -> None:
    SequenceRegressor(**QUICK).fit(X, Y, out=tmp_path / "run")
    with pytest.raises(FormatError, match="is a sequence model, expected a text model"):
        fastlstm.LM.load(tmp_path / "run")
    with pytest.raises(FormatError, match="is a sequence model, expected a forecaster"):
        fastlstm.Forecaster.load(tmp_path / "run")


def test_unstorable_labels_are_refused_before_training(tmp_path: Path) -> None:
    labels = [("a", 1) if y > 0 else None for y in Y]
    with pytest.raises(DataError, match=r"the label .* cannot be stored: give labels"):
        SequenceClassifier(**QUICK).fit(X, labels, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_accumulation_equals_the_big_batch() -> None:
    given = {**QUICK, "dropout": 0.0, "optimizer": "sgd", "class_weight": "balanced"}
    sizes: tuple[dict[str, Any], ...] = ({"batch_size": 12}, {"batch_size": 4, "accumulate": 3})
    models = (SequenceClassifier(**{**given, **each}).fit(X, Y > 2) for each in sizes)
    whole, parts = (model.predict_proba(X) for model in models)
    np.testing.assert_allclose(whole, parts, rtol=1e-4, atol=1e-5)


@pytest.mark.isa
def test_precision_is_as_requested() -> None:
    losses = {
        name: SequenceRegressor(**{**QUICK, "precision": name}).fit(X, Y).fitted_.best_loss
        for name in ("fp32", "bf16", "auto")
    }
    assert losses["fp32"] != losses["bf16"]
    assert losses["auto"] in (losses["fp32"], losses["bf16"])
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.05)
    with pytest.raises(ConfigError, match="`precision='fp16'` needs an NVIDIA GPU"):
        SequenceRegressor(**{**QUICK, "precision": "fp16"}).fit(X, Y)


@pytest.mark.usefixtures("no_bf16_products")
def test_bf16_uses_no_product_that_torch_lacks() -> None:
    model = SequenceRegressor(**{**QUICK, "precision": "bf16"}).fit(X, Y)
    assert model.fitted_.reason
