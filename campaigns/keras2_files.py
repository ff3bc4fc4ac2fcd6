"""Files of Keras 2 (tf-keras), imported and compared with what tf-keras computes.

`make` needs an environment with tensorflow and tf-keras, `check` needs neither:

usage: TFENV/bin/python campaigns/keras2_files.py make DIR
       .venv/bin/python campaigns/keras2_files.py check DIR
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

LIMIT = 1e-5


def make(folder: Path) -> None:
    """Writes models as `.keras` and `.h5`, each with an input and its output."""
    import tf_keras as keras

    layers, model = keras.layers, keras.Sequential
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 17, (3, 11))
    values = rng.standard_normal((3, 11, 5)).astype("float32")

    def save(network, x, name: str) -> None:
        network(x)
        network.set_weights(
            [w + 0.5 * rng.standard_normal(w.shape).astype(w.dtype) for w in network.get_weights()]
        )
        for layer in network.layers:
            if getattr(layer, "stateful", False):
                layer.reset_states()
        np.savez(folder / f"{name}.npz", x=x, y=np.asarray(network(x)))
        for suffix in (".keras", ".h5"):
            network.save(folder / f"{name}{suffix}")

    def lstm(units: int, **options):
        return layers.LSTM(units, **{"return_sequences": True, **options})

    stacked = [lstm(12), lstm(5, implementation=1, dropout=0.1, recurrent_dropout=0.1)]
    softmax = layers.Dense(17, activation="softmax")
    save(
        model([layers.Embedding(17, 8, batch_input_shape=(None, 11)), *stacked, softmax]),
        tokens,
        "text",
    )
    both = [
        layers.Bidirectional(lstm(6), input_shape=(11, 5)),
        layers.SpatialDropout1D(0.2),
        layers.Bidirectional(lstm(7, recurrent_activation="hard_sigmoid"), merge_mode="sum"),
        layers.LayerNormalization(),
        layers.LSTM(4, go_backwards=True),
        layers.Dense(1, activation="hard_sigmoid"),
    ]
    save(model(both), values, "both ways, hard sigmoid")
    stateful = lstm(6, stateful=True, batch_input_shape=(3, 11, 5))
    save(model([stateful, layers.TimeDistributed(layers.Dense(3))]), values, "stateful")
    x = keras.Input((None, 5))
    graph = layers.Dense(2)(layers.Dropout(0.1)(lstm(6)(x)))
    save(keras.Model(x, graph), values, "functional")
    inner = model([keras.Input((None, 5)), lstm(6), layers.Dense(4)], name="inner")
    save(model([keras.Input((None, 5)), inner, layers.LSTM(3), layers.Dense(2)]), values, "nested")
    x = keras.Input((None, 5))
    major = lstm(6, time_major=True, unit_forget_bias=False, use_bias=False)(x)
    save(keras.Model(x, layers.Dense(2)(major)), values, "time-major")
    make_cudnn(folder, keras, values)


def make_cudnn(folder: Path, keras, values) -> None:
    """Writes a CuDNNLSTM, converted by tf-keras from an LSTM: the layer itself needs a GPU."""
    import h5py
    from tf_keras.src.saving.legacy import hdf5_format

    lstm = keras.layers.LSTM(6, input_shape=(11, 5))
    network = keras.Sequential([lstm, keras.layers.Dense(2)])
    rng = np.random.default_rng(2)
    network.set_weights([rng.standard_normal(w.shape) for w in network.get_weights()])
    target = type("CuDNNLSTM", (), {"units": 6, "name": lstm.name})()
    converted = hdf5_format._convert_rnn_weights(target, lstm.get_weights())
    path = folder / "cudnn.h5"
    network.save(path)
    with h5py.File(path, "r+") as file:
        text = file.attrs["model_config"].replace('"LSTM"', '"CuDNNLSTM"')
        file.attrs["model_config"] = text
        group = file[f"model_weights/{lstm.name}"]
        for name, array in zip(group.attrs["weight_names"], converted, strict=True):
            del group[name]
            group[name] = array
    np.savez(folder / "cudnn.npz", x=values, y=np.asarray(network(values)))


def check(folder: Path) -> int:
    """Imports every file; returns how many differ."""
    import torch

    import fastlstm

    wrong = 0
    for stored in sorted(folder.glob("*.npz")):
        arrays = np.load(stored)
        for path in sorted(folder.glob(f"{stored.stem}.*")):
            if path == stored:
                continue
            module = fastlstm.import_module(path)
            got = module(torch.from_numpy(arrays["x"])).detach()
            got = got.softmax(-1) if module.returns_logits else got
            error = float(np.abs(got.numpy() - arrays["y"]).max())
            wrong += error > LIMIT
            print(f"{path.name:32} {module.made_by:14} largest difference {error:.1e}", flush=True)
    print("all within" if not wrong else f"{wrong} beyond", LIMIT)
    return wrong


if __name__ == "__main__":
    verb, place = sys.argv[1], Path(sys.argv[2])
    place.mkdir(parents=True, exist_ok=True)
    sys.exit(make(place) if verb == "make" else check(place))
