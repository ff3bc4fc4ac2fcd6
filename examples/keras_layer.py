"""Trains a Keras model of characters on fastlstm's kernels and saves a stock Keras file.

usage: KERAS_BACKEND=torch python examples/keras_layer.py TEXT MODEL.keras [EPOCHS]
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np

import fastlstm
from fastlstm.keras import accelerate

WINDOW = 50


def main() -> None:
    text = Path(sys.argv[1]).read_text(encoding="utf-8")
    epochs = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    characters = sorted(set(text))
    tokens = np.array([characters.index(c) for c in text[:100_000]], dtype="int32")
    rows = (len(tokens) - 1) // WINDOW
    x = tokens[: rows * WINDOW].reshape(rows, WINDOW)
    y = tokens[1 : rows * WINDOW + 1].reshape(rows, WINDOW)
    model = keras.Sequential(
        [
            keras.Input((WINDOW,), dtype="int32"),
            keras.layers.Embedding(len(characters), 64),
            keras.layers.LSTM(256, return_sequences=True),
            keras.layers.Dense(len(characters)),
        ]
    )
    accelerate(model)  # the one line that differs from a Keras program
    print(fastlstm.explain(model, T=WINDOW, B=64))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(x, y, batch_size=64, epochs=epochs, verbose=2)
    print(f"bits per character: {history.history['loss'][-1] / np.log(2):.3f}")
    model.save(sys.argv[2])  # stock Keras loads it, without fastlstm


if __name__ == "__main__":
    main()
