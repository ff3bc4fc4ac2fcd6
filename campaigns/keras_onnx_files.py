"""ONNX files that tf2onnx writes of Keras 2 models (tf-keras), imported and compared with tf-keras.

`make` needs an environment with tensorflow, tf-keras, tf2onnx and onnx, `check` needs none of them:

usage: TFENV/bin/python campaigns/keras_onnx_files.py make DIR [OPSET, default 18]
       .venv/bin/python campaigns/keras_onnx_files.py check DIR
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
from keras2_files import check


def make(folder: Path, opset: int) -> None:
    """Writes models as `.onnx`, each with an input and its output."""
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import tf2onnx
    import tf_keras as keras

    layers = keras.layers
    rng = np.random.default_rng(1)

    def lstm(units: int, **options):
        return layers.LSTM(units, **{"return_sequences": True, **options})

    def both(inner, merge: str = "concat"):
        return layers.Bidirectional(inner, merge_mode=merge)

    last = {"return_sequences": False}
    softmax = layers.Dense(9, activation="softmax")
    models = {
        "text": [layers.Embedding(9, 6), lstm(8), lstm(7), softmax],
        "window": [lstm(8, **last), layers.Dense(9, activation="softmax")],
        "stacked": [lstm(8), lstm(5, **last), layers.Dense(2)],
        "both": [both(lstm(8)), both(lstm(5, **last)), layers.Dense(2)],
        "both, sum": [both(lstm(8), "sum"), lstm(5, **last), layers.Dense(2)],
        "both, ave, last": [both(lstm(8, **last), "ave"), layers.Dense(2)],
        "both, mul": [both(lstm(8), "mul"), layers.Dense(2), layers.Softmax()],
        "hard_sigmoid": [lstm(8, recurrent_activation="hard_sigmoid", **last), layers.Dense(2)],
        "relu": [lstm(8, activation="relu", use_bias=False, **last), layers.Dense(2)],
        "backwards": [lstm(8, go_backwards=True, **last), layers.Dense(2)],
        "backwards, steps": [lstm(8, go_backwards=True), layers.Dense(2)],
        "front": [
            layers.Dense(4, activation="relu"),
            lstm(8),
            layers.TimeDistributed(layers.Dense(2)),
        ],
    }
    for name, parts in models.items():
        shape, dtype = ((None,), "int32") if name == "text" else ((None, 3), "float32")
        model = keras.Sequential([keras.Input(shape, dtype=dtype), *parts])
        model.set_weights([rng.uniform(-0.5, 0.5, w.shape) for w in model.get_weights()])
        path = folder / f"{name}.onnx"
        tf2onnx.convert.from_keras(model, opset=opset, output_path=str(path))
        x = rng.integers(0, 9, (3, 6)).astype("int32")
        x = x if name == "text" else rng.standard_normal((3, 6, 3)).astype("float32")
        np.savez(folder / f"{name}.npz", x=x, y=np.asarray(model(x)))


if __name__ == "__main__":
    verb, place = sys.argv[1], Path(sys.argv[2])
    place.mkdir(parents=True, exist_ok=True)
    number = int(sys.argv[3]) if len(sys.argv) > 3 else 18
    sys.exit(make(place, number) if verb == "make" else check(place))
