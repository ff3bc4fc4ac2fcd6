import subprocess
import sys

import keras
import numpy as np
import pytest
import torch
from keras import layers

from fastlstm.keras import LSTM
from keras_layers import IGNORED

pytestmark = [
    pytest.mark.filterwarnings(IGNORED),
    pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file"),
]

X = np.random.default_rng(0).normal(size=(2, 5, 3)).astype("float32")


def model_of(layer):
    return keras.Sequential(
        [
            keras.Input((5, 3)),
            layers.Bidirectional(layer(4, return_sequences=True)),
            layer(4, activation="relu", recurrent_activation="hard_sigmoid"),
        ]
    )


def test_stock_keras_loads_what_was_saved_here(tmp_path):
    model = model_of(LSTM)
    for suffix in ("keras", "h5"):
        model.save(tmp_path / f"model.{suffix}")
    np.save(tmp_path / "x.npy", X)
    code = """
import sys, warnings
import keras, numpy as np
warnings.simplefilter("ignore")
for suffix in ("keras", "h5"):
    model = keras.saving.load_model("model." + suffix, compile=False)
    kinds = {type(x) for x in model._flatten_layers() if isinstance(x, keras.layers.LSTM)}
    assert kinds == {keras.layers.LSTM}, kinds
    np.save(suffix, model(np.load("x.npy")).detach().numpy())
assert not [name for name in sys.modules if name.startswith("fastlstm")]
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    want = model(X).detach()
    for suffix in ("keras", "h5"):
        found = torch.from_numpy(np.load(tmp_path / f"{suffix}.npy"))
        torch.testing.assert_close(found, want)


def test_the_file_loads_with_our_layer(tmp_path):
    path = tmp_path / "model.keras"
    model = model_of(LSTM)
    model.save(path)
    loaded = keras.saving.load_model(path)
    assert type(loaded.layers[-1]) is LSTM
    assert type(loaded.layers[0].backward_layer) is LSTM
    assert torch.equal(loaded(X), model(X))


def test_a_stock_file_keeps_stock_layers(tmp_path):
    path = tmp_path / "model.keras"
    model_of(layers.LSTM).save(path)
    assert type(keras.saving.load_model(path).layers[-1]) is layers.LSTM


def test_the_copy_that_bidirectional_makes_is_ours():
    wrapper = layers.Bidirectional(LSTM(3))
    assert type(wrapper.forward_layer) is type(wrapper.backward_layer) is LSTM


def test_a_cloned_model_has_our_layers():
    clone = keras.models.clone_model(model_of(LSTM))
    assert type(clone.layers[-1]) is LSTM
