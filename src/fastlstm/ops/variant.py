"""What a layer computes beyond torch's cell: `Variant`, the same for every backend."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastlstm.errors import ConfigError, nearest_hint

ACTIVATIONS = ("sigmoid", "tanh", "hard_sigmoid", "relu", "softsign", "linear")
"""Activations by name, as Keras 3 defines them; the place in this tuple is the kernels' code."""

EPSILON = 1e-5
"""Added to the variance in every layer norm."""

_LOW = 0xFFFFFFFF


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


class Variant(NamedTuple):
    """One call's deviations from torch's cell; the default has none.

    Attributes:
        activation: of the candidate and of the cell on its way out.
        recurrent_activation: of the three gates.
        norm: layer norm where given.
        mask: `(B, H)` factors of the state that enters the recurrence (recurrent dropout, one mask
            per sequence, already divided by the share that is kept), or None.
        zoneout_h: probability that a unit keeps its old output for a step.
        zoneout_c: probability that a unit keeps its old cell.
        seed: `(1,)` int64 that draws what is kept (`zoneout_masks`); None for the expectation, as
            in evaluation.
    """

    activation: str = "tanh"
    recurrent_activation: str = "sigmoid"
    norm: Norm | None = None
    mask: Tensor | None = None
    zoneout_h: float = 0.0
    zoneout_c: float = 0.0
    seed: Tensor | None = None

    @property
    def thresholds(self) -> tuple[int, int]:
        """Of 65 536 draws, how many keep the old output, and the old cell."""
        return round(self.zoneout_h * 65536), round(self.zoneout_c * 65536)


class Extras(NamedTuple):
    """What a layer is built to do beyond torch's; every call makes a `Variant` of it.

    Attributes:
        layer_norm: normalise both products and the cell.
        recurrent_dropout: probability, in training.
        zoneout: probabilities of the output and of the cell.
        activation: as in `Variant`.
        recurrent_activation: as in `Variant`.
    """

    layer_norm: bool = False
    recurrent_dropout: float = 0.0
    zoneout: tuple[float, float] = (0.0, 0.0)
    activation: str = "tanh"
    recurrent_activation: str = "sigmoid"

    def active(self, training: bool) -> list[str]:
        """Returns what a call computes that torch's cell does not, in words."""
        default = Extras()
        found = ["layer norm"] if self.layer_norm else []
        if self.recurrent_dropout > 0 and training:
            found.append("recurrent dropout")
        if self.zoneout != default.zoneout:
            found.append("zoneout")
        if self.activation != default.activation:
            found.append(f"activation {self.activation}")
        if self.recurrent_activation != default.recurrent_activation:
            found.append(f"recurrent activation {self.recurrent_activation}")
        return found


def check_activation(name: str, argument: str) -> None:
    """Raises ConfigError for a name that is none of `ACTIVATIONS`."""
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"{argument} is {name!r}{nearest_hint(str(name), ACTIVATIONS)}, expected one of"
            f" {', '.join(ACTIVATIONS)}"
        )


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
    check_activation(name, "activation")
    return x


def zoneout_masks(seed: Tensor, T: int, B: int, H: int, variant: Variant) -> tuple[Tensor, Tensor]:
    """Returns which outputs and which cells zoneout keeps, `(T, B, H)` bool each.

    A hash of the place instead of a stream of numbers, so that any step is drawn again at will.

    Args:
        seed: `(1,)` int64.
        T: steps, in the direction's own order of time.
        B: lanes.
        H: units.
        variant: holds the probabilities.

    Source:
        The hash is "lowbias32" of C. Wellons' hash-prospector.
    """
    rows = torch.arange(T * B, device=seed.device).view(T, B, 1) & _LOW
    units = torch.arange(H, device=seed.device)
    low, high = seed & _LOW, (seed >> 32) & _LOW
    key = _hash32((_hash32(rows ^ low) + high) & _LOW)
    drawn = _hash32((_times(units, 0x9E3779B9) + key) & _LOW)
    keep_h, keep_c = variant.thresholds
    return (drawn & 0xFFFF) < keep_h, (drawn >> 16) < keep_c


def _hash32(x: Tensor) -> Tensor:
    """A 32-bit hash of 32-bit numbers in int64."""
    x = _times(x ^ (x >> 16), 0x7FEB352D)
    x = _times(x ^ (x >> 15), 0x846CA68B)
    return x ^ (x >> 16)


def _times(x: Tensor, factor: int) -> Tensor:
    """The low half of a 32-bit product; a factor above 2^31 goes in negative, or it overflows."""
    return (x * (factor - (1 << 32) if factor >> 31 else factor)) & _LOW
