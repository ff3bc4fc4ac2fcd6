"""SavedModels of Keras 2 and 3, imported without TensorFlow and compared with what Keras computes.

`make` needs an environment with tensorflow, tf-keras and Keras 3, `check` needs none of them:

usage: TFENV/bin/python tests/campaigns/saved_model_import.py make DIR
       .venv/bin/python tests/campaigns/saved_model_import.py check DIR
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

LIMIT = 1e-5
RNG = np.random.default_rng(1)
TOKENS = RNG.integers(0, 17, (3, 11))
VALUES = RNG.standard_normal((3, 11, 5)).astype("float32")


def models(keras):
    """Yields models with their inputs and names."""
    layers, model = keras.layers, keras.Sequential

    def lstm(units: int, **options):
        return layers.LSTM(units, **{"return_sequences": True, **options})

    tokens = keras.Input((11,), dtype="int32")
    any_steps = keras.Input((None,), dtype="int32")
    values = keras.Input((None, 5))
    fixed = keras.Input((11, 5))
    softmax = layers.Dense(17, activation="softmax")
    yield "text", model([tokens, layers.Embedding(17, 8), lstm(12), lstm(9), softmax]), TOKENS
    x = layers.Embedding(17, 8)(any_steps)
    x = layers.Dropout(0.1)(lstm(6, dropout=0.2)(x))
    yield "functional text", keras.Model(any_steps, layers.Dense(17)(x)), TOKENS
    yield (
        "windowed",
        model([fixed, lstm(6, use_bias=False), layers.LSTM(4), layers.Dense(2)]),
        VALUES,
    )
    hard = {"recurrent_activation": "hard_sigmoid"}
    yield "hard sigmoid", model([values, lstm(6, **hard), layers.LSTM(5, activation="relu", **hard),
                                 layers.Dense(3, activation="hard_sigmoid")]), VALUES  # fmt: skip
    for merge in ("concat", "sum", "ave", "mul"):
        both = [layers.Bidirectional(lstm(6), merge_mode=merge),
                layers.Bidirectional(layers.LSTM(4), merge_mode=merge)]  # fmt: skip
        yield f"both ways, {merge}", model([values, *both, layers.Dense(1)]), VALUES
    ends = [layers.LSTM(4, go_backwards=True), layers.Activation("softsign"), layers.Dense(2)]
    yield "backwards", model([values, lstm(6, go_backwards=True), *ends]), VALUES
    for name, x in (("known steps", fixed), ("any steps", values)):
        dense = layers.Dense(3, activation="tanh")
        yield f"TimeDistributed, {name}", model([x, lstm(6), layers.TimeDistributed(dense)]), VALUES
    normal = [lstm(6), layers.LayerNormalization(), layers.LSTM(4), layers.Dense(2)]
    yield "layer norm", model([values, *normal]), VALUES
    for name in ("relu", "elu", "selu", "softplus", "sigmoid", "exponential"):
        yield name, model([values, lstm(6), layers.Dense(4, activation=name), lstm(3)]), VALUES
    inner = model([keras.Input((None, 5)), lstm(6), layers.Dense(4)], name="inner")
    yield "nested", model([values, inner, layers.LSTM(3)]), VALUES
    yield "masked", model([tokens, layers.Embedding(17, 8, mask_zero=True), lstm(6)]), TOKENS
    x = lstm(5)(values)
    yield "residual", keras.Model(values, layers.Dense(2)(layers.Add()([x, values]))), VALUES
    yield "GRU", model([values, layers.GRU(4)]), VALUES


def make(folder: Path) -> None:
    """Writes the models of both Keras versions, each in a process of its own."""
    for version in ("2", "3"):
        environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, __file__, f"make-{version}", str(folder)]
        subprocess.run(command, check=True, env={**environment, "TF_CPP_MIN_LOG_LEVEL": "3"})


def make_version(folder: Path, version: str) -> None:
    if version == "2":
        import tf_keras as keras
    else:
        import keras
    for name, network, x in models(keras):
        network.set_weights(
            [w + 0.5 * RNG.standard_normal(w.shape).astype(w.dtype) for w in network.get_weights()]
        )
        path = folder / f"Keras {version}, {name}"
        if version == "2":
            network.save(path, save_format="tf")
        else:
            network.export(str(path), verbose=False)
        np.savez(f"{path}.npz", x=x, y=np.asarray(network(x)))


def check(folder: Path) -> int:
    """Imports every model; returns how many differ."""
    import torch

    import fastlstm

    wrong = 0
    for stored in sorted(folder.glob("*.npz")):
        arrays = np.load(stored)
        try:
            module = fastlstm.import_module(stored.with_suffix(""))
            got = module(torch.from_numpy(arrays["x"])).detach()
        except fastlstm.FastLSTMError as error:
            print(f"{stored.stem:32} refused: {str(error)[:150]}", flush=True)
            continue
        got = got.softmax(-1) if module.returns_logits else got
        error = float(np.abs(got.numpy() - arrays["y"]).max())
        wrong += not error <= LIMIT
        print(f"{stored.stem:32} largest difference {error:.1e}", flush=True)
    print("all that were read are within" if not wrong else f"{wrong} beyond", LIMIT)
    return wrong


if __name__ == "__main__":
    verb, place = sys.argv[1], Path(sys.argv[2])
    place.mkdir(parents=True, exist_ok=True)
    if verb.startswith("make-"):
        make_version(place, verb[-1])
    else:
        sys.exit(make(place) if verb == "make" else check(place))
