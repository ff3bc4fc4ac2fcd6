"""Keras models for the tests of import and what they compute; Keras runs on torch here."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import warnings

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import keras


def sequential(shape: tuple[int | None, ...], *layers: Any) -> Any:
    """Returns a model of layers behind an input of values, or of tokens if it has one axis."""
    dtype = "int32" if shape == (None,) else None
    return keras.Sequential([keras.Input(shape, dtype=dtype), *layers])


def varied(model: Any, seed: int = 0) -> Any:
    """Returns the model with weights that no initializer gives: all different, biases too."""
    rng = np.random.default_rng(seed)
    model.set_weights(
        [w + 0.4 * rng.standard_normal(w.shape).astype(w.dtype) for w in model.get_weights()]
    )
    return model


def saved(model: Any, path: Path) -> Path:
    """Saves a model, in the format of the suffix."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save(path)
    return path


def outputs(model: Any, x: Any) -> np.ndarray:
    """Returns what Keras computes."""
    return keras.ops.convert_to_numpy(model(x))


def parts_of(path: Path) -> dict[str, bytes]:
    """Returns the files in a `.keras` archive."""
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


def archive(parts: Mapping[str, str | bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """Returns an archive of files."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", compression) as file:
        for name, part in parts.items():
            file.writestr(name, part)
    return data.getvalue()
