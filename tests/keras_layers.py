"""Pairs of a stock Keras LSTM and ours with the same weights, and what both compute."""

import keras
import numpy as np
import torch
from torch import Tensor

from fastlstm.keras import LSTM

IGNORED = "ignore:__array__ implementation:DeprecationWarning"
"""Of Keras 3 itself, with NumPy 2, wherever a variable becomes an array."""


def pair(features, units, **options):
    """Returns Keras' layer and ours, `strict`, with the same random weights."""
    layers = keras.layers.LSTM(units, **options), LSTM(units, **options)
    for layer in layers:
        layer.build((None, None, features))
    rng = np.random.default_rng(0)
    weights = [rng.normal(0, 0.4, tuple(w.shape)).astype("float32") for w in layers[0].weights]
    for layer in layers:
        layer.set_weights(weights)
    layers[1].strict = True
    return layers


def results(layer, x, **call):
    """Returns outputs and states, then the gradients of x and of all weights that are trained."""
    x = torch.as_tensor(x).clone().requires_grad_()
    outputs = layer(x, **call)
    outputs = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
    loss = sum((each.float().cos() * (k + 1)).sum() for k, each in enumerate(outputs))
    weights = [v.value for v in layer.trainable_variables]
    assert isinstance(loss, Tensor)
    return [*outputs, *torch.autograd.grad(loss, [x, *weights])]


def assert_same(ours, keras_own, tolerance=1e-5):
    """Compares the results of two layers."""
    assert len(ours) == len(keras_own)
    for a, b in zip(ours, keras_own, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)
