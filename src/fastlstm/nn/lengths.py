"""`Lanes`: begin and end of each sequence of a batch, from lengths and the padded side."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fastlstm.errors import ShapeError, counted, kind_of_value

Padding = Literal["right", "left"]


class Lanes(NamedTuple):
    """First step and one past the last step of every lane, `(B,)` int64 each."""

    begins: Tensor
    ends: Tensor

    def reversed(self, T: int) -> Lanes:
        """Returns the lanes with reversed time."""
        return Lanes(T - self.ends, T - self.begins)


def lanes_of(lengths: Tensor | list[int] | tuple[int, ...], padding: Padding, x: Tensor) -> Lanes:
    """Returns the lanes of `x` `(T, B, I)`; raises ShapeError for lengths that do not fit it."""
    T, B = x.shape[:2]
    if padding not in ("right", "left"):
        raise ShapeError(f"padding is {padding!r}, expected 'right' or 'left'")
    if not (hasattr(lengths, "__array__") or isinstance(lengths, list | tuple)):
        raise ShapeError(f"lengths is {kind_of_value(lengths)}, expected {B} whole numbers")
    steps = torch.as_tensor(lengths, device=x.device)
    if steps.shape != (B,) or steps.dtype.is_floating_point or steps.dtype == torch.bool:
        raise ShapeError(
            f"lengths are {steps.dtype} {tuple(steps.shape)}, expected"
            f" {counted(B, 'whole number')}, one per sequence"
        )
    steps = steps.to(torch.int64)
    if torch.compiler.is_compiling():
        steps = steps.clamp(0, T)  # a graph cannot raise; the kernels must not leave the sequence
    else:
        low, high = (int(v) for v in steps.aminmax())
        if low < 0 or high > T:
            raise ShapeError(f"lengths run from {low} to {high}, expected 0 to T = {T}")
    if padding == "right":
        return Lanes(torch.zeros_like(steps), steps)
    return Lanes(T - steps, torch.full_like(steps, T))


def is_inside(x: Tensor, lanes: Lanes) -> Tensor:
    """Returns the mask of steps of `x` `(T, B, ·)` that are no padding, `(T, B)` bool."""
    steps = torch.arange(x.shape[0], device=x.device)[:, None]
    return (lanes.begins <= steps) & (steps < lanes.ends)
