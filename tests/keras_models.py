"""Keras models for the tests of import and what they compute; Keras runs on torch here."""

import io
import os
import zipfile

os.environ["KERAS_BACKEND"] = "torch"

import warnings

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import keras


def sequential(shape, *layers):
    """Returns a model of layers behind an input of values, or of tokens if it has one axis."""
    dtype = "int32" if shape == (None,) else None
    return keras.Sequential([keras.Input(shape, dtype=dtype), *layers])


def varied(model, seed=0):
    """Returns the model with weights that no initializer gives: all different, biases too."""
    rng = np.random.default_rng(seed)
    model.set_weights(
        [w + 0.4 * rng.standard_normal(w.shape).astype(w.dtype) for w in model.get_weights()]
    )
    return model


def saved(model, path):
    """Saves a model, in the format of the suffix."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save(path)
    return path


def outputs(model, x):
    """Returns what Keras computes."""
    return keras.ops.convert_to_numpy(model(x))


def parts_of(path):
    """Returns the files in a `.keras` archive."""
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


def archive(parts, compression=zipfile.ZIP_STORED):
    """Returns an archive of files."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", compression) as file:
        for name, part in parts.items():
            file.writestr(name, part)
    return data.getvalue()
