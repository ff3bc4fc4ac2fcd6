"""A text model of Keras: trained, imported, scored, trained on, compressed, exported. One table.

The recipe is the usual one for characters: Embedding(256) -> LSTM -> softmax on windows of 100,
batches of 128, Adam(0.002, clipnorm=1), one epoch of the first 90 % of TEXT; the next 5 % are
scored. Keras trains on torch with `fastlstm.keras.accelerate`; its own score is that of stock
Keras, the layers having been restored.

usage: KERAS_BACKEND=torch python campaigns/keras_recipe.py TEXT [--full] [--budget 60s]
    --full            512 units and the whole text; else 64 units and 400,000 characters
    --units N, --characters N   other sizes
    --model FILE      a model of the recipe trained elsewhere, such as by Keras on TensorFlow
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np

import fastlstm
from fastlstm.keras import accelerate, restore
from fastlstm.text.evaluation import evaluate

WINDOW, BATCH = 100, 128


class Row(NamedTuple):
    """A line of the table: bits per character of the validation part, and the file."""

    label: str
    at_windows: float | None = None
    carried: float | None = None
    num_bytes: int | None = None
    seconds: float | None = None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("text")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--units", type=int)
    parser.add_argument("--characters", type=int)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--budget", default="60s")
    asked = parser.parse_args()
    began = time.perf_counter()
    text = Path(asked.text).read_text(encoding="utf-8-sig")
    text = text[: asked.characters or (len(text) if asked.full else 400_000)]
    train, valid = text[: int(0.9 * len(text))], text[int(0.9 * len(text)) : int(0.95 * len(text))]
    vocabulary = sorted(set(text))
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part, content in (("all", text), ("train", train), ("valid", valid)):
            (folder / f"{part}.txt").write_text(content, encoding="utf-8")
        file = asked.model or folder / "model.keras"
        if asked.model is None:
            units = asked.units or (512 if asked.full else 64)
            rows.append(_train_by_keras(train, valid, vocabulary, units, file))
        rows += _by_fastlstm(file, folder, valid, asked.budget)
    print(f"\n{'':30}{'windows':>9}{'carried':>9}{'bytes':>12}{'seconds':>9}   (bits/char)")
    for row in rows:
        numbers = (
            (row.at_windows, "9.4f"), (row.carried, "9.4f"), (row.num_bytes, "12,d"),
            (row.seconds, "9.0f"),
        )  # fmt: skip
        cells = [
            " " * int(kind.partition(".")[0].partition(",")[0])
            if value is None
            else format(value, kind)
            for value, kind in numbers
        ]
        print(f"{row.label:30}{''.join(cells)}")
    print(f"\n{len(text):,} characters, {time.perf_counter() - began:.0f} s in all")


def _train_by_keras(train: str, valid: str, vocabulary: list[str], units: int, file: Path) -> Row:
    """Trains for one epoch and saves; returns what stock Keras scores the model as."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((WINDOW,), dtype="int32"),
            keras.layers.Embedding(len(vocabulary), 256),
            keras.layers.LSTM(units, return_sequences=True),
            keras.layers.Dense(len(vocabulary), activation="softmax"),
        ]
    )
    optimizer = keras.optimizers.Adam(0.002, clipnorm=1.0)
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy")
    windows = _windows(train, vocabulary)
    windows = windows[: max(1, len(windows) // BATCH) * BATCH]  # whole batches, as the recipe
    began = time.perf_counter()
    accelerate(model).fit(windows[:, :-1], windows[:, 1:], batch_size=BATCH, verbose=2)
    seconds = time.perf_counter() - began
    model.save(file)
    windows = _windows(valid, vocabulary)
    nats = restore(model).evaluate(windows[:, :-1], windows[:, 1:], batch_size=BATCH, verbose=0)
    return Row("Keras", nats / math.log(2), None, file.stat().st_size, seconds)


def _windows(text: str, vocabulary: list[str]) -> np.ndarray:
    """Returns `(N, 101)` ids: 100 characters and the one after each."""
    index = {character: k for k, character in enumerate(vocabulary)}
    ids = np.array([index[character] for character in text], dtype="int32")
    num = len(ids) // (WINDOW + 1)
    return ids[: num * (WINDOW + 1)].reshape(num, WINDOW + 1)


def _by_fastlstm(file: Path, folder: Path, valid: str, budget: str) -> list[Row]:
    run, on, int8 = (folder / name for name in ("run", "on", "int8"))
    valid_file = str(folder / "valid.txt")
    began = time.perf_counter()
    imported = fastlstm.import_run(file, out=run, text=str(folder / "all.txt"))
    print(f"imported {imported.made_by}: {'; '.join(imported.notes)}")
    ends = [time.perf_counter()]
    fastlstm.train(
        folder / "train.txt", start=run, out=on, budget=budget, valid=valid_file, sample_every=0,
        observers=(),
    )  # fmt: skip
    ends.append(time.perf_counter())
    report = fastlstm.compress(on, out=int8, to="int8", data=valid_file, observers=())
    ends.append(time.perf_counter())
    rows = [
        Row("imported", *_scores(run, valid), report.source.file_bytes, ends[0] - began),
        Row(f"trained on for {budget}", *_scores(on, valid), report.source.file_bytes,
            ends[1] - ends[0]),
        Row("int8", *_scores(int8, valid), report.result.file_bytes, ends[2] - ends[1]),
    ]  # fmt: skip
    for weights in ("fp32", "int8"):
        began = time.perf_counter()
        exported = fastlstm.export(
            on,
            to="litert",
            weights=weights,
            out=folder / f"litert-{weights}",
            check_text=valid_file,
        )
        seconds, proof = time.perf_counter() - began, exported.proof
        assert proof is not None
        on_text = proof.figures["text"]
        own, _, there = on_text["bits_per_char"].values()
        print(
            f"LiteRT {weights}: largest error {proof.max_error:.1e}; on the first"
            f" {on_text['num_tokens']:,} characters {there:.4f} bits/char there, {own:.4f} of the"
            f" run; the same character likeliest at {on_text['agreement']:.2%}"
        )
        rows.append(Row(f"LiteRT {weights}", None, None, exported.num_bytes, seconds))
    return rows


def _scores(path: Path, text: str) -> tuple[float, float]:
    """Returns bits per character from zero states at windows, and with the state carried on."""
    lm = fastlstm.LM.load(path)
    ids = lm.tokenizer.encode(text)
    at_windows = evaluate(lm.model, ids, lm.tokenizer, zero_state_window=WINDOW)
    return at_windows.bits_per_char, evaluate(lm.model, ids, lm.tokenizer).bits_per_char


if __name__ == "__main__":
    main()
