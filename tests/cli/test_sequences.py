"""`evaluate` and `forecast` of sequence models, and the files of sequences that they read."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

import fastlstm
from fastlstm.cli.main import main

SMALL: dict[str, Any] = {"hidden_size": 4, "embed_size": 3, "steps": 3, "threads": 1}
TEXTS = pyarrow.csv.ConvertOptions(column_types={"label": pa.string()})
RNG = np.random.default_rng(0)
X = RNG.normal(size=(30, 6, 3)).astype(np.float32)
LENGTHS = np.arange(30) % 6 + 1
LABELS = np.array(["down", "up"])[np.arange(30) % 3 % 2]
NUMBERS = np.stack([X[:, 0, 0], 100 * X[:, 0, 1]], 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A classifier and two regressors, and sequences as files."""
    folder = tmp_path_factory.mktemp("sequences")
    fastlstm.SequenceClassifier(**SMALL).fit(X, LABELS).save(folder / "labels")
    fastlstm.SequenceRegressor(**SMALL).fit(X, NUMBERS).save(folder / "two")
    fastlstm.SequenceRegressor(**SMALL).fit(X, NUMBERS[:, 0]).save(folder / "one")
    np.save(folder / "X.npy", X)
    np.savez(folder / "labels.npz", X=X, y=LABELS, lengths=LENGTHS)
    np.savez(folder / "two.npz", X=X, y=NUMBERS)
    return folder


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)


def test_figures_are_those_of_the_estimators(printed):
    padded = [steps[:length] for steps, length in zip(X, LENGTHS, strict=True)]
    facts = json.loads(printed("evaluate", "labels", "labels.npz", "--json"))
    model = fastlstm.SequenceClassifier.load("labels")
    assert facts["accuracy"] == model.score(padded, LABELS)
    assert facts["most_frequent"] == 20 / 30
    facts = json.loads(printed("evaluate", "two", "two.npz", "--json"))
    two = fastlstm.SequenceRegressor.load("two")
    assert facts["r2"] == two.score(X, NUMBERS)
    assert facts["mae"] == pytest.approx(np.abs(two.predict(X) - NUMBERS).mean())
    shown = printed("evaluate", "labels", "labels.npz")
    assert "; always down: 66.67%" in shown
    answers = model.predict(padded)
    right, num = int((answers[LABELS == "up"] == "up").sum()), int((LABELS == "up").sum())
    answered = int((answers == "up").sum())
    line = f"{right} of {num} found ({right / num:.0%}); {right} of {answered} answers right"
    assert re.search(rf"class up +{re.escape(line)}", shown)


def test_right_answers_by_class(printed):
    facts = json.loads(printed("evaluate", "labels", "labels.npz", "--json"))
    assert sum(pair["num"] for pair in facts["answers"]) == len(X)
    right = sum(pair["num"] for pair in facts["answers"] if pair["label"] == pair["answer"])
    assert right / len(X) == facts["accuracy"]


@pytest.mark.parametrize(("labels", "shown"), [([1, "1"], {"1", "'1'"}), ([1, "up"], {"1", "up"})])
def test_classes_that_look_alike_are_told_apart(labels, shown, tmp_path):
    fastlstm.SequenceClassifier(**SMALL).fit(X, (labels * 15)[:30]).save(tmp_path / "run")
    assert main(["forecast", str(tmp_path / "run"), "X.npy", "--out", "alike.csv"]) == 0
    table = pyarrow.csv.read_csv("alike.csv", convert_options=TEXTS)
    assert set(table.column_names) == {"label", *(f"p-{name}" for name in shown)}
    assert set(table["label"].to_pylist()) <= shown


def test_answers_are_a_table(capfdbinary):
    assert main(["forecast", "labels", "labels.npz"]) == 0
    lines = capfdbinary.readouterr().out.decode().splitlines()
    assert lines[0] == '"label","p-down","p-up"'
    assert len(lines) == 31
    for run, names in (("one", ["answer"]), ("two", ["answer-0", "answer-1"])):
        assert main(["forecast", run, "X.npy", "--out", f"{run}.parquet"]) == 0
        table = pyarrow.parquet.read_table(f"{run}.parquet")
        assert table.column_names == names
        predicted = fastlstm.SequenceRegressor.load(run).predict(X).reshape(30, -1)
        assert (np.stack([table[name].to_numpy() for name in names], 1) == predicted).all()


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["evaluate", "labels", "X.npy"], "X.npy has no array y, but X: write one with"),
        (["evaluate", "labels", "lables.npz"], "no file lables.npz (did you mean 'labels.npz'?)"),
        (["evaluate", "labels", "two.npz"], "y has shape (30, 2), expected one label"),
        (["evaluate", "labels", "other.npz"], "no label of other.npz is a class of labels: ['down"),
        (["evaluate", "two", "labels.npz"], "expected numbers of shape (N,) or (N, K)"),
        (["evaluate", "two", "few.npz"], "got 30 sequences and 3 answers"),
        (["evaluate", "labels", "labels.npz", "--lanes", "4"], "--lanes is not an option for"),
        (["forecast", "labels", "labels.npz", "--gaps", "fill"], "--gaps is not an option for"),
        (["forecast", "labels", "book.txt"], "book.txt is no .npy or .npz file of numbers"),
        (["forecast", "labels", "pickled.npy"], "pickled.npy is no .npy or .npz file of numbers"),
        (["forecast", "labels", "cut.npz"], "cut.npz is no .npy or .npz file of numbers"),
        (["forecast", "labels", "header.npy"], "header.npy is no .npy or .npz file of numbers"),
        (["forecast", "labels", "huge.npy"], "huge.npy does not fit into memory; divide its sequ"),
        (["forecast", "labels", "/proc/self/mem"], "cannot read /proc/self/mem: Input/output err"),
        (["evaluate", "labels", "bytes.npz"], "bytes.npz is no .npy or .npz file of numbers"),
        (["evaluate", "labels", "none.npz"], "X of none.npz has shape (0, 6, 3): write one"),
        (["forecast", "labels", "flat.npy"], "X of flat.npy has shape (6,): write one"),
        (["forecast", "labels", "short.npz"], "`lengths` is not 1 to 6 for each sequence"),
        (["forecast", "labels", "long.npz"], "`lengths` is not 1 to 6 for each sequence"),
        (["forecast", "labels", "X.npy", "--out", "a.txt"], "expected a file name ending in .par"),
        (["forecast", "labels", "wide.npy"], "the sequences have 4 columns"),
        (["forecast", "labels", "labels"], "no file labels"),
    ],
)
def test_bad_input_is_one_line(argv, told, refused):
    np.savez("other.npz", X=X, y=np.arange(30))
    np.savez("few.npz", X=X, y=NUMBERS[:3])
    np.savez("short.npz", X=X, lengths=LENGTHS[:4])
    np.savez("long.npz", X=X, lengths=[6, 6, 6, *[7] * 27])
    np.save("flat.npy", X[0, :, 0])
    np.save("wide.npy", np.zeros((3, 2, 4)))
    np.save("pickled.npy", np.array([{}]), allow_pickle=True)
    Path("cut.npz").write_bytes(Path("labels.npz").read_bytes()[:900])
    Path("book.txt").write_text("a text\n")
    head = b"{'descr':'<f4','shape':(1,(((".ljust(53) + b"\n"
    Path("header.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head)
    huge = {"descr": "<f8", "fortran_order": False, "shape": (2**57, 1, 1)}
    with open("huge.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, huge)
    np.savez("none.npz", X=X[:0], y=LABELS[:0])
    with zipfile.ZipFile("bytes.npz", "w") as archive:
        archive.writestr("X", b"12")
        archive.writestr("y", b"12")
    assert told in refused(*argv)


def test_an_imported_model_reads_tokens(tmp_path, printed):
    import safetensors.torch
    from torch import nn

    parts = {"embed": nn.Embedding(7, 4), "lstm": nn.LSTM(4, 8), "out": nn.Linear(8, 3)}
    safetensors.torch.save_file(nn.ModuleDict(parts).state_dict(), tmp_path / "m.safetensors")
    run = fastlstm.import_run(tmp_path / "m.safetensors", out=tmp_path / "run", classes=True)
    np.savez(tmp_path / "t.npz", X=RNG.integers(0, 7, (9, 5)), y=np.arange(9) % 3)
    facts = json.loads(printed("evaluate", run.path, tmp_path / "t.npz", "--json"))
    assert 0 <= facts["accuracy"] <= 1


def test_unknown_labels_and_unread_arrays_are_named(capsys):
    labels = np.array([f"{label}s" if label == LABELS[0] else label for label in LABELS])
    np.savez("strange.npz", X=X, y=labels, sample_weight=np.ones(30))
    assert main(["evaluate", "labels", "strange.npz"]) == 0
    said = capsys.readouterr().err
    assert "strange.npz also has sample_weight, not used" in said
    assert f"{LABELS[0]}s in strange.npz is no class of the model" in said
    assert f"classes that do not occur: {LABELS[0]}" in said


@pytest.mark.parametrize("name", ["labels", "one"])
def test_one_answer_each_may_have_two_axes(name, tmp_path, printed):
    found = []
    y = LABELS if name == "labels" else NUMBERS[:, 0]
    for number, answers in enumerate((y, y[:, None])):
        np.savez(tmp_path / f"{number}.npz", X=X, y=answers)
        found.append(
            json.loads(printed("evaluate", name, str(tmp_path / f"{number}.npz"), "--json"))
            | {"data": ""}
        )
    assert found[0] == found[1]
