"""Files of sequence models: round trips; forged files are named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save

from fastlstm import SequenceClassifier, SequenceRegressor
from fastlstm.cli import info
from fastlstm.errors import (
    ConfigError,
    CorruptFileError,
    DataError,
    FormatError,
    RunDirectoryError,
)
from fastlstm.runs.run_directory import RunDirectory

SMALL: dict[str, Any] = {
    "hidden_size": 4, "embed_size": 3, "steps": 2, "threads": 1, "device": "cpu"
}  # fmt: skip
RNG = np.random.default_rng(0)
X = [RNG.normal(1e6, 3.0, size=(n, 2)) for n in RNG.integers(3, 7, 30)]
NUMBERS = np.array([x[0, 0] / 7 for x in X])


def fitted(y: Any, **given: Any) -> Any:
    kind = SequenceRegressor if np.asarray(y[0]).dtype.kind == "f" else SequenceClassifier
    return kind(**SMALL, **given).fit(X, y)


@pytest.mark.usefixtures("same_random_numbers")
@pytest.mark.parametrize("y", [NUMBERS, np.stack([NUMBERS, NUMBERS * 0 + 1 / 3], 1)])
def test_a_saved_regressor_predicts_the_same(tmp_path: Path, y: Any) -> None:
    model = SequenceRegressor(**SMALL, pooling="mean", num_layers=2, seed=5).fit(X, y)
    model.save(tmp_path / "model")
    loaded = SequenceRegressor.load(tmp_path / "model")
    assert (loaded.predict(X) == model.predict(X)).all()
    assert loaded.score(X, y) == model.score(X, y)
    assert loaded.get_params() == model.get_params()
    assert loaded.n_features_in_ == 2
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {".lock", "config.json", "model.safetensors", "manifest.json"}


@pytest.mark.parametrize(
    "labels",
    [
        ["down", "up"], [0, 7], [0.25, -3.0], [False, True], ["a", 1, 2.5], [10**30, 3],
        np.array(["z", "a"]), np.array([2, 0], np.int16), np.array([1.5, 0.5], np.float32),
        np.array(["longer than the classes are", "a", "b"])[1:],
    ],
    ids=str,
)  # fmt: skip
def test_a_saved_classifier_keeps_its_classes(tmp_path: Path, labels: Any) -> None:
    y = np.tile(labels, 15) if isinstance(labels, np.ndarray) else labels * (30 // len(labels))
    model = SequenceClassifier(**SMALL).fit(X, y)
    model.save(tmp_path / "model")
    loaded = SequenceClassifier.load(tmp_path / "model")
    assert loaded.classes_.tolist() == model.classes_.tolist()
    assert [type(c) for c in loaded.classes_.tolist()] == [type(c) for c in model.classes_.tolist()]
    assert loaded.classes_.dtype.kind == model.classes_.dtype.kind
    assert (loaded.predict_proba(X) == model.predict_proba(X)).all()
    assert loaded.predict(X).tolist() == model.predict(X).tolist()


@pytest.mark.parametrize(
    "labels",
    [
        [("a", 1), ("b", 2)], [None, "a"], [b"a", b"b"], [math.inf, 0.0],
        np.array(["2024-01-01", "2024-01-02"], "datetime64[ns]"),
    ],
    ids=str,
)  # fmt: skip
def test_labels_that_json_cannot_represent_are_named(tmp_path: Path, labels: Any) -> None:
    y = labels[np.arange(30) % 2] if isinstance(labels, np.ndarray) else list(labels) * 15
    model = SequenceClassifier(**SMALL).fit(X, y)
    with pytest.raises(DataError, match=r"the label .* cannot be stored: give labels that are"):
        model.save(tmp_path / "model")


def test_unfitted_and_missing_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not fitted yet"):
        SequenceRegressor().save(tmp_path / "model")
    with pytest.raises(RunDirectoryError, match="no such run"):
        SequenceRegressor.load(tmp_path / "model")
    fitted(NUMBERS).save(tmp_path / "model")
    with pytest.raises(FormatError, match=r"is a regressor: open it with .*SequenceRegressor\.lo"):
        SequenceClassifier.load(tmp_path / "model")
    SequenceClassifier(**SMALL).fit(X, np.median(NUMBERS) < NUMBERS).save(tmp_path / "labels")
    with pytest.raises(FormatError, match=r"is a classifier: open it with .*Classifier\.load"):
        SequenceRegressor.load(tmp_path / "labels")


def forge(run: Path, name: str, change: Callable[[Any], None]) -> None:
    """Changes a file and publishes it with a valid hash."""
    path = run / name
    values = json.loads(path.read_text()) if name.endswith(".json") else load_file(path)
    change(values)
    data = json.dumps(values).encode() if name.endswith(".json") else save(values)
    RunDirectory(run).publish({name: data})


def put(*path: str, value: Any) -> Callable[[Any], None]:
    def change(values: Any) -> None:
        for key in path[:-1]:
            values = values[key]
        values[path[-1]] = value

    return change


CONFIG: list[tuple[Callable[[Any], None], str]] = [
    (put("format", value=2), "is not of a sequence model of format 1"),
    (put("train", "hidden_size", value=5), "hidden_size of 'train' and of 'network' differ"),
    (put("train", "epochs", value="x"), "`epochs` is 'x'"),
    (put("train", "patches", value=1), "unknown key 'patches'"),
    (put("network", "num_layers", value=10**6), "no such network|differ"),
    (put("network", "num_columns", value=3), "mean is expected to be 3 finite numbers"),
    (put("network", "has_missing", value=True), "is .*describes"),
    (put("network", "pooling", value="max"), "`pooling` is 'max'"),
    (lambda c: c.pop("network"), "'network' is missing"),
    (put("network", value=[1]), "config.json"),
    (put("scale", "mean", value=[0.0]), "mean is expected to be 2"),
    (put("scale", "std", value=[0.0, 1.0]), "std is expected to be 2"),
    (put("scale", "std", value=["a", 1.0]), "std is expected to be 2"),
    (put("answers", value=5), "config.json"),
    (put("answers", "kind", value="colours"), "the kind of answers is 'colours'"),
    (put("answers", "classes", value=["a"]), "its classes are not 2"),
    (put("answers", "classes", value={"a": 1, "b": 2}), "its classes are not 2"),
    (put("answers", "classes", value=["a", "a"]), "not distinct"),
    (put("answers", "classes", value=["a", ["b"]]), "its classes are not 2"),
    (put("answers", "dtype", value="<U90000000"), "its classes are no <U90000000"),
    (put("answers", "dtype", value="<i4"), "config.json"),
    (put("answers", "dtype", value="V9"), "have an unsupported type"),
    (put("answers", "dtype", value=[["x", "<i4"]]), "config.json"),
    (
        put("data", "key", value=5),
        r"config.json: it holds invalid values \(data.key is 5, expected a text\); put",
    ),
]


@pytest.mark.parametrize(("change", "message"), CONFIG)
def test_an_invalid_description_is_named(
    tmp_path: Path, change: Callable[[Any], None], message: str
) -> None:
    fitted(["a", "b"] * 15).save(tmp_path / "model")
    SequenceClassifier.load(tmp_path / "model")
    forge(tmp_path / "model", "config.json", change)
    with pytest.raises((CorruptFileError, FormatError), match=message) as caught:
        SequenceClassifier.load(tmp_path / "model")
    assert str(tmp_path) in str(caught.value)


def test_invalid_number_answers_are_named(tmp_path: Path) -> None:
    for name, value in (("mean", [0.0, 1.0]), ("std", [-1.0]), ("is_flat", 1), ("mean", None)):
        fitted(NUMBERS).save(tmp_path / "model")
        forge(tmp_path / "model", "config.json", put("answers", name, value=value))
        with pytest.raises(
            CorruptFileError, match=rf"config.json: it holds invalid values \({name}"
        ):
            SequenceRegressor.load(tmp_path / "model")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    fitted(NUMBERS).save(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CorruptFileError, match=r"model\.safetensors"):
        SequenceRegressor.load(tmp_path / "model")


def test_info_says_what_a_run_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SequenceClassifier(**SMALL).fit(X, ["a", "b", "c"] * 10, out=tmp_path / "run")
    assert info.run([str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "one of 3 classes for each sequence" in shown
    assert "1 LSTM layer of 4 units" in shown
    assert info.run([str(tmp_path / "run"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["kind"], facts["answers"], facts["damage"]) == ("sequence", "labels", [])
    fitted(NUMBERS).save(tmp_path / "model")
    assert info.run([str(tmp_path / "model")]) == 0
    assert "1 number for each sequence" in capsys.readouterr().out
