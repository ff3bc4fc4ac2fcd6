"""The parameters that options of the cell add to a layer, named as torch names its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fastlstm.errors import ShapeError
from fastlstm.ops.cell_call import Norm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastlstm.nn.lstm import LSTM


def add_parameters(layer: LSTM) -> None:
    """Gives a layer the parameters of its options, at their first values."""
    for name, length, _ in _added(layer):
        empty = layer.weight_ih_l0.new_empty(length * layer.hidden_size)
        layer.register_parameter(name, nn.Parameter(empty))
    reset_parameters(layer)


def reset_parameters(layer: LSTM) -> None:
    """Sets what `add_parameters` added to its first values."""
    for name, _, first in _added(layer):
        nn.init.constant_(getattr(layer, name), first)


def _added(layer: LSTM) -> Iterator[tuple[str, int, float]]:
    """Yields name, length in units of H and first value of every parameter."""
    for names in parameter_names(layer):
        for name, (length, first) in zip(names, layer.options.parameters.values(), strict=True):
            yield name, length, first


def parameter_names(layer: LSTM) -> Iterator[list[str]]:
    """Yields the names of what is added, for every layer and direction."""
    for w_ih, *_ in layer._all_weights:
        place = w_ih.removeprefix("weight_ih")
        yield [f"{name}{place}" for name in layer.options.parameters]


def norms(layer: LSTM, device: torch.device) -> Iterator[Norm]:
    """Yields the parameters of layer norm of every layer and direction.

    Raises:
        ShapeError: a parameter that does not fit the layer.
    """
    for names in parameter_names(layer):
        values: list[Tensor] = [getattr(layer, name) for name in names]
        lengths = (length for length, _ in layer.options.parameters.values())
        for name, value, length in zip(names, values, lengths, strict=True):
            shape = (length * layer.hidden_size,)
            if value.shape != shape or value.device != device:
                raise ShapeError(
                    f"{name} has shape {tuple(value.shape)} on {value.device}, expected {shape} on"
                    f" {device}"
                )
        yield Norm(*values)
