"""`CellCall`: what a call computes beyond torch's cell, the same in every backend."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastlstm.ops.cell_options import TORCHS_CELL, CellOptions

EPSILON = 1e-5
"""Added to the variance in every layer norm."""

_LOW = 0xFFFFFFFF
_MAX_SEED = (1 << 63) - 1


class Norm(NamedTuple):
    """Parameters of the layer norms, with the biased variance over the features of a row.

    Attributes:
        gamma_ih: `(4H,)` of `x @ w_ih^T`, all four gates as one row.
        gamma_hh: `(4H,)` of `h @ w_hh^T`.
        gamma_c: `(H,)` of the new cell, normalised on the way to the output only.
        beta_c: `(H,)` added to the normalised cell.
    """

    gamma_ih: Tensor
    gamma_hh: Tensor
    gamma_c: Tensor
    beta_c: Tensor


class CellCall(NamedTuple):
    """The options of a layer with the tensors that one call needs.

    Attributes:
        options: options of the layer.
        norm: parameters for `layer_norm`.
        mask: `(B, H)` recurrent dropout: factors of the state that enters the recurrence, one mask
            per sequence, divided by the share of kept units; or None.
        seed: `(1,)` int64 for `zoneout_masks`; None for zoneout's expectation, as in evaluation.
    """

    options: CellOptions = TORCHS_CELL
    norm: Norm | None = None
    mask: Tensor | None = None
    seed: Tensor | None = None

    def thresholds(self) -> tuple[int, int]:
        """How many of 65,536 draws keep the old output, and the old cell."""
        keep_h, keep_c = self.options.zoneout
        return round(keep_h * 65536), round(keep_c * 65536)


def random_draws(
    options: CellOptions, size: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Returns mask and seed of a `CellCall` in training; `size` is (B, H).

    The draws do not depend on the compute dtype.
    """
    p, mask, seed = options.recurrent_dropout, None, None
    if p > 0:
        survivors = torch.full(size, 1 - p, device=device, dtype=torch.float32).bernoulli()
        mask = survivors.to(torch.promote_types(dtype, torch.float32)) / (1 - p)
    if max(options.zoneout) > 0:
        seed = torch.randint(_MAX_SEED, (1,), device=device, dtype=torch.int64)
    return mask, seed


def activate(name: str, x: Tensor) -> Tensor:
    """Applies the activation `name`."""
    if name == "sigmoid":
        return torch.sigmoid(x)
    if name == "tanh":
        return torch.tanh(x)
    if name == "hard_sigmoid":
        return (x / 6 + 0.5).clamp(0, 1)
    if name == "relu":
        return torch.relu(x)
    if name == "softsign":
        return F.softsign(x)
    return x  # linear


def zoneout_masks(seed: Tensor, T: int, B: int, H: int, cell: CellCall) -> tuple[Tensor, Tensor]:
    """Returns which outputs and which cells zoneout keeps, `(T, B, H)` bool each.

    The draws hash the position, in the direction's order of time, and `seed` `(1,)` int64, so that
    every step can be drawn again: "lowbias32" of C. Wellons' hash-prospector.
    """
    rows = torch.arange(T * B, device=seed.device).view(T, B, 1) & _LOW
    units = torch.arange(H, device=seed.device)
    low, high = seed & _LOW, (seed >> 32) & _LOW
    key = _hash32((_hash32(rows ^ low) + high) & _LOW)
    drawn = _hash32((_times(units, 0x9E3779B9) + key) & _LOW)
    keep_h, keep_c = cell.thresholds()
    return (drawn & 0xFFFF) < keep_h, (drawn >> 16) < keep_c


def _hash32(x: Tensor) -> Tensor:
    x = _times(x ^ (x >> 16), 0x7FEB352D)
    x = _times(x ^ (x >> 15), 0x846CA68B)
    return x ^ (x >> 16)


def _times(x: Tensor, factor: int) -> Tensor:
    """Returns the low half of a 32-bit product; a factor above 2^31 is negated against overflow."""
    return (x * (factor - (1 << 32) if factor >> 31 else factor)) & _LOW
