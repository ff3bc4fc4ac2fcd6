"""Examples that take seconds run as they are written."""

import runpy
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fastlstm.report.history import read_history

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(name, *words):
    path = str(EXAMPLES / f"{name}.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [path, *map(str, words)])
        runpy.run_path(path, run_name="__main__")


def test_callbacks(tmp_path):
    text, table = tmp_path / "book.txt", tmp_path / "table.npy"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 1000)
    noise = 0.01 * np.random.default_rng(0).normal(size=800)
    np.save(table, np.sin(np.arange(800) / 4) + noise)
    run_example("callbacks", text, table, tmp_path)
    for name, goal in (("text", 2.5), ("table", 0.5)):
        history = read_history(tmp_path / name / "metrics.jsonl")
        assert history.end["reason"] == f"validation loss {goal} reached"
        assert all(event["largest_gradient"] > 0 for event in history.validations)


class RayOfThisProcess:
    """Runs a task where it is handed in."""

    def init(self, address):
        assert address == "auto"

    def remote(self, **options):
        assert options["num_cpus"] == 1
        return lambda task: SimpleNamespace(remote=task)

    def get(self, results):
        return results


GROUPS = ("a/b", 300), ("c", 9), ("..", 9), ("", 9)
"""Names of groups, of which one is another directory and one is missing, and their rows."""


@pytest.mark.parametrize("more", [["--jobs", "1"], ["--ray", "auto"]])
def test_model_per_group(tmp_path, monkeypatch, capsys, more):
    pytest.importorskip("joblib")
    monkeypatch.setitem(sys.modules, "ray", RayOfThisProcess())
    rows = [f"{store},{day},{day % 7}" for store, n in GROUPS for day in range(n)]
    table, out = tmp_path / "sales.csv", tmp_path / "out"
    table.write_text("\n".join(["store,ds,y", *rows]))
    words = [str(table), "store", str(out), "--horizon", "7", "--steps", "3"]
    for _ in range(2):  # finished groups are skipped
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run_example("model_per_group", *words, *more)
        above, first, second, nameless = capsys.readouterr().out.splitlines()
        assert "of the naive forecast" in first
        assert [above[:12], second[:10]] == ["..: failed: ", "c: failed:"]
        assert nameless.startswith("nan: failed: ")
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["out"]
    assert read_history(out / "group=a%2Fb" / "metrics.jsonl").end["step"] == 3


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras' own
def test_keras_layer(tmp_path, capsys):
    text, model = tmp_path / "book.txt", tmp_path / "model.keras"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    run_example("keras_layer", text, model)
    shown = capsys.readouterr().out
    assert "native" in shown
    assert "bits per character: " in shown
    assert model.stat().st_size > 0


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras' own
def test_keras_to_onnx(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    import keras

    text, model = tmp_path / "book.txt", tmp_path / "model.keras"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    num = len(set(text.read_text()))
    table, lstm = keras.layers.Embedding(num, 8), keras.layers.LSTM(16, return_sequences=True)
    ends = [table, lstm, keras.layers.Dense(num, activation="softmax")]
    keras.Sequential([keras.Input((None,), dtype="int32"), *ends]).save(model)
    run_example("keras_to_onnx", model, text, tmp_path)
    imported, exported, *written = capsys.readouterr().out.split("\n", 2)
    assert imported.startswith("imported: text, made by Keras")
    assert "max error" in exported
    assert len(written[0]) == 201
