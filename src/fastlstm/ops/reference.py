"""The reference: a plain loop that defines correct results; in float64 it checks the kernels."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from fastlstm.ops.call import LSTMArgs, LSTMOutput, LSTMWeights, is_autocast
from fastlstm.ops.cell_call import EPSILON, CellCall, Norm, activate, zoneout_masks
from fastlstm.ops.cell_options import CellOptions

_PLAIN = CellCall()
Keep = Tensor | float
"""Units that keep their old value, `(B, H)` bool, or the probability."""


def lstm_step_reference(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    weights: LSTMWeights,
    cell: CellCall = _PLAIN,
    keep: tuple[Keep, Keep] = (0.0, 0.0),
) -> tuple[Tensor, Tensor]:
    """Runs one step on `x` `(B, I)`, `h` and `c` `(B, H)`; returns the new `h` and `c`.

    `keep` is what zoneout keeps of `h` and of `c`.
    """
    options, norm = cell.options, cell.norm
    recurrent = h if cell.mask is None else h * cell.mask
    gates_x, gates_h = x @ weights.w_ih.t(), recurrent @ weights.w_hh.t()
    if norm is not None:
        gates_x = _normalised(gates_x) * norm.gamma_ih
        gates_h = _normalised(gates_h) * norm.gamma_hh
    gates = gates_x + gates_h
    if weights.b_ih is not None and weights.b_hh is not None:
        gates = gates + weights.b_ih + weights.b_hh
    i, f, g, o = gates.chunk(4, dim=1)
    i, f, o = (activate(options.recurrent_activation, gate) for gate in (i, f, o))
    new_c = f * c + i * activate(options.activation, g)
    shown = new_c if norm is None else _normalised(new_c) * norm.gamma_c + norm.beta_c
    new_h = o * activate(options.activation, shown)
    return _zoned_out(keep[0], h, new_h), _zoned_out(keep[1], c, new_c)


def lstm_reference(
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    weights: LSTMWeights,
    cell: CellCall = _PLAIN,
    begins: Tensor | None = None,
    ends: Tensor | None = None,
) -> LSTMOutput:
    """Runs one layer over `x` `(T, B, I)` from `h0`, `c0` `(B, H)`.

    `begins` and `ends` `(B,)`, both or none, are the first step and one past the last step of each
    lane; outside, a lane keeps its state and its output is zero.

    Source: Hochreiter & Schmidhuber 1997 with the forget gate of Gers et al. 2000; gate order and
        the two biases are torch's. Layer norm as in Ba et al. 2016, recurrent dropout as in Gal &
        Ghahramani 2016, zoneout as in Krueger et al. 2016.
    """
    T, B, H = *x.shape[:2], h0.shape[1]
    h, c, steps = h0, c0, []
    keep: tuple[Keep, Keep] = cell.options.zoneout
    masks = None if cell.seed is None else zoneout_masks(cell.seed, T, B, H, cell)
    for t, x_t in enumerate(x.unbind(0)):
        if masks is not None:
            keep = masks[0][t], masks[1][t]
        if begins is None or ends is None:
            y_t, c_t = h, c = lstm_step_reference(x_t, h, c, weights, cell, keep)
        else:
            is_inside = ((begins <= t) & (t < ends))[:, None]
            x_t = x_t.where(is_inside, 0)  # NaN there would reach the gradient of the weights
            y_t, c_t = lstm_step_reference(x_t, h, c, weights, cell, keep)
            h, c = y_t.where(is_inside, h), c_t.where(is_inside, c)
            y_t = y_t.where(is_inside, 0)
        steps.append(y_t)
    return LSTMOutput(torch.stack(steps), h, c)


def run_reference(args: LSTMArgs, options: CellOptions, dtype: torch.dtype) -> LSTMOutput:
    """Runs any call in `dtype`, whatever autocast says."""
    device = args.rows.device.type
    with torch.autocast(device, enabled=False) if is_autocast(device) else nullcontext():
        args = args.cast(dtype).embedded()
        norm = None if args.gamma_hh is None else Norm(*args.norm())  # type: ignore[arg-type]
        cell = CellCall(options, norm, args.mask, args.seed)
        lanes = args.begins, args.ends
        return lstm_reference(args.rows, args.h0, args.c0, args.weights(), cell, *lanes)


def _normalised(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPSILON)


def _zoned_out(keep: Keep, old: Tensor, new: Tensor) -> Tensor:
    if isinstance(keep, Tensor):
        return old.where(keep, new)
    return new if keep == 0 else keep * old + (1 - keep) * new
