"""What a call computes beyond torch's cell: `CellCall`, the same for every backend."""

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
    """Factors of the layer norms, biased variance over the features of a row.

    Attributes:
        gamma_ih: `(4H,)` of `x @ w_ih^T`, all four gates as one row.
        gamma_hh: `(4H,)` of `h @ w_hh^T`.
        gamma_c: `(H,)` of the new cell, normalised where the output is formed from it.
        beta_c: `(H,)` added there.
    """

    gamma_ih: Tensor
    gamma_hh: Tensor
    gamma_c: Tensor
    beta_c: Tensor


class CellCall(NamedTuple):
    """What one call computes: the options of its layer, with the tensors they need.

    Attributes:
        options: of the layer.
        norm: with `layer_norm`.
        mask: `(B, H)` factors of the state that enters the recurrence (recurrent dropout, one mask
            per sequence, already divided by the share that is kept), or None.
        seed: `(1,)` int64 that draws which units zoneout keeps (`zoneout_masks`); None for the
            expectation, as in evaluation.
    """

    options: CellOptions = TORCHS_CELL
    norm: Norm | None = None
    mask: Tensor | None = None
    seed: Tensor | None = None

    @property
    def thresholds(self) -> tuple[int, int]:
        """Of 65 536 draws, how many keep the old output, and the old cell."""
        keep_h, keep_c = self.options.zoneout
        return round(keep_h * 65536), round(keep_c * 65536)


def draw_cell_call(
    options: CellOptions,
    norm: Norm | None,
    size: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
    training: bool,
) -> CellCall:
    """Returns what one call of one layer and direction computes; draws what training draws.

    `size` is (B, H). What is drawn does not depend on the compute dtype.
    """
    p, mask, seed = options.recurrent_dropout, None, None
    if training and p > 0:
        survivors = torch.full(size, 1 - p, device=device, dtype=torch.float32).bernoulli()
        mask = survivors.to(torch.promote_types(dtype, torch.float32)) / (1 - p)
    if training and max(options.zoneout) > 0:
        seed = torch.randint(_MAX_SEED, (1,), device=device, dtype=torch.int64)
    return CellCall(options, norm, mask, seed)


def activate(name: str, x: Tensor) -> Tensor:
    """Returns the activation called `name` of `x`."""
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

    A hash of the place (T in the direction's own order of time) and of `seed`, `(1,)` int64, so
    that any step is drawn again at will: "lowbias32" of C. Wellons' hash-prospector.
    """
    rows = torch.arange(T * B, device=seed.device).view(T, B, 1) & _LOW
    units = torch.arange(H, device=seed.device)
    low, high = seed & _LOW, (seed >> 32) & _LOW
    key = _hash32((_hash32(rows ^ low) + high) & _LOW)
    drawn = _hash32((_times(units, 0x9E3779B9) + key) & _LOW)
    keep_h, keep_c = cell.thresholds
    return (drawn & 0xFFFF) < keep_h, (drawn >> 16) < keep_c


def _hash32(x: Tensor) -> Tensor:
    """A 32-bit hash of 32-bit numbers in int64."""
    x = _times(x ^ (x >> 16), 0x7FEB352D)
    x = _times(x ^ (x >> 15), 0x846CA68B)
    return x ^ (x >> 16)


def _times(x: Tensor, factor: int) -> Tensor:
    """The low half of a 32-bit product; a factor above 2^31 goes in negative, or it overflows."""
    return (x * (factor - (1 << 32) if factor >> 31 else factor)) & _LOW
