"""`accelerate` turns a Keras model's LSTM layers into fastlstm's, `restore` turns them back."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

import keras

from fastlstm.errors import UsageError, kind_of_value
from fastlstm.keras.lstm import LSTM
from fastlstm.ops.left_alone import left_alone

Layer = TypeVar("Layer", bound=Any)

_OWN_FIELDS = ("strict", "_has_warned", "_known_weights")
"""Attributes of an `LSTM` instance that Keras' layer lacks."""


def accelerate(model: Layer) -> Layer:
    """Turns every `keras.layers.LSTM` of a model into a `fastlstm.keras.LSTM`, in place.

    The layers stay the same objects, in Sequential, functional and subclassed models, built or not,
    also inside Bidirectional, TimeDistributed and nested models. Outputs do not change, and a saved
    model is a stock Keras file. `restore` undoes it.

    Args:
        model: a model or layer.

    Returns:
        The model.

    Raises:
        UsageError: it is no Keras layer.

    Warns:
        UserWarning: recurrent layers that Keras still computes, with the reasons, or a model
            without any LSTM.
    """
    left = []
    found = False
    for layer in _layers(model):
        if type(layer) is keras.layers.LSTM:
            layer.__class__ = LSTM
        found = found or isinstance(layer, LSTM)
        if (alone := left_alone(layer)) is not None:
            left.append(f"'{layer.name}' ({alone.runs}: {alone.why})")
    if left:
        warnings.warn(f"accelerate left to Keras: {'; '.join(left)}", stacklevel=2)
    elif not found:
        kind = type(model).__name__
        warnings.warn(f"accelerate found no keras.layers.LSTM in {kind}", stacklevel=2)
    return model


def restore(model: Layer) -> Layer:
    """Turns every `fastlstm.keras.LSTM` of a model into a `keras.layers.LSTM`, in place.

    Args:
        model: a model or layer.

    Returns:
        The model.

    Raises:
        UsageError: it is no Keras layer.
    """
    for layer in _layers(model):
        if type(layer) is LSTM:
            for name in _OWN_FIELDS:
                layer.__dict__.pop(name, None)
            layer.__class__ = keras.layers.LSTM
    return model


def _layers(model: Any) -> Iterator[Any]:
    if not isinstance(model, keras.layers.Layer):
        raise UsageError(f"the model is {kind_of_value(model)}, expected a Keras model or layer")
    yield from model._flatten_layers()
