"""The parameters that options of the cell add to a layer: the factors of layer norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fastlstm.errors import ShapeError
from fastlstm.ops.cell_call import Norm

if TYPE_CHECKING:
    from collections.abc import Iterator


def add_norms(layer: nn.LSTM) -> None:
    """Gives a layer the parameters of layer norm, named as torch names its own."""
    like = layer.weight_ih_l0
    assert isinstance(like, Tensor)
    for names in norm_names(layer):
        for name, size in zip(names, _norm_sizes(layer), strict=True):
            empty = torch.empty(size, dtype=like.dtype, device=like.device)
            layer.register_parameter(name, nn.Parameter(empty))
    reset_norms(layer)


def reset_norms(layer: nn.LSTM) -> None:
    """Makes every layer norm the plain one: factors 1, nothing added."""
    for names in norm_names(layer):
        *gammas, beta = (getattr(layer, name) for name in names)
        for gamma in gammas:
            nn.init.ones_(gamma)
        nn.init.zeros_(beta)


def norm_names(layer: nn.LSTM) -> Iterator[list[str]]:
    """Yields the names of the `Norm` of every layer and direction."""
    for w_ih, *_ in layer._all_weights:
        place = w_ih.removeprefix("weight_ih")
        yield [f"{field}{place}" for field in Norm._fields]


def norms(layer: nn.LSTM, device: torch.device) -> Iterator[Norm]:
    """Yields the `Norm` of every layer and direction.

    Raises:
        ShapeError: a parameter that does not fit the layer.
    """
    for names in norm_names(layer):
        norm = Norm(*(getattr(layer, name) for name in names))
        for name, value, size in zip(names, norm, _norm_sizes(layer), strict=True):
            if value.shape != (size,) or value.device != device:
                raise ShapeError(
                    f"{name} has shape {tuple(value.shape)} on {value.device}, expected ({size},)"
                    f" on {device}"
                )
        yield norm


def _norm_sizes(layer: nn.LSTM) -> tuple[int, int, int, int]:
    """Returns the lengths of the fields of a `Norm`."""
    H = layer.hidden_size
    return 4 * H, 4 * H, H, H
