"""The calls of an LSTM: one for each of its layers and directions."""

from __future__ import annotations

import warnings
from itertools import repeat
from typing import TYPE_CHECKING

import torch

from fastlstm.nn.cell_parameters import norms
from fastlstm.nn.dropout import dropped_between_layers
from fastlstm.nn.torch_fallback import BEYOND_TORCH, is_beyond_torch, is_left_to_reference
from fastlstm.ops.call import LSTMArgs, compute_dtype
from fastlstm.ops.cell_call import CellCall, draw_cell_call
from fastlstm.ops.cell_options import TORCHS_CELL
from fastlstm.ops.left_alone import options_of
from fastlstm.ops.lstm import run

if TYPE_CHECKING:
    from torch import Tensor

    from fastlstm.nn.lengths import Lanes
    from fastlstm.nn.lstm import LSTM, State
    from fastlstm.ops.call import LSTMWeights
    from fastlstm.ops.cell_call import Norm

_TORCHS_CALL = CellCall()


def run_layers(
    lstm: LSTM,
    x: Tensor,
    state: State | None,
    lanes: Lanes | None,
    weights: list[LSTMWeights],
    *,
    is_packed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs all layers and directions on `x` `(T, B, I)`.

    Where `x` was a PackedSequence (`is_packed`), dropout draws nothing for padding. Returns
    `(T, B, D * H)` and the last `h` and `c`, `(L * D, B, H)` each, all in the compute dtype.
    """
    directions = 2 if lstm.bidirectional else 1
    dtype = compute_dtype(x)
    if state is None:
        zero = torch.zeros((x.shape[1], lstm.hidden_size), device=x.device)
    is_slow = is_left_to_reference(lstm)
    if not is_slow and (is_slow := is_beyond_torch()):
        warnings.warn(f"this LSTM runs as a Python loop over time: {BEYOND_TORCH}", stacklevel=5)
    options = options_of(lstm)
    layer_norms = norms(lstm, x.device) if options.layer_norm else repeat(None)
    hs, cs = [], []
    for layer in range(lstm.num_layers):
        outputs = []
        for index in range(layer * directions, (layer + 1) * directions):
            h0, c0 = (zero, zero) if state is None else (state[0][index], state[1][index])
            wide = torch.promote_types(h0.dtype, dtype)  # else float16 states would round the last
            h0, c0 = h0.to(wide), c0.to(wide)
            steps, step_lanes = x, lanes
            if is_reverse := index % directions == 1:
                steps = x.flip(0)
                step_lanes = None if lanes is None else lanes.reversed(x.shape[0])
            out = run(
                call_args(lstm, steps, h0, c0, weights[index], step_lanes, next(layer_norms)),
                options,
                backend=lstm.backend or ("reference" if is_slow else None),
                strict=lstm.strict,
                max_activation_bytes=lstm.max_activation_bytes,
            )
            outputs.append(out.y.flip(0) if is_reverse else out.y)
            hs.append(out.hT)
            cs.append(out.cT)
        x = outputs[0] if directions == 1 else torch.cat(outputs, dim=2)
        if lstm.dropout > 0 and lstm.training and layer < lstm.num_layers - 1:
            x = dropped_between_layers(x, lstm.dropout, lanes if is_packed else None)
    if len(hs) == 1:
        return x, hs[0].to(dtype).unsqueeze(0), cs[0].to(dtype).unsqueeze(0)
    return x, torch.stack(hs).to(dtype), torch.stack(cs).to(dtype)


def call_args(
    lstm: LSTM,
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    weights: LSTMWeights,
    lanes: Lanes | None,
    norm: Norm | None,
    embedding: Tensor | None = None,
) -> LSTMArgs:
    """Returns the tensors of one call of one layer and direction; draws what training draws."""
    rows, tokens = (x, None) if embedding is None else (embedding, x)
    cell = _TORCHS_CALL
    if lstm.options is not TORCHS_CELL:
        size, dtype = (x.shape[1], lstm.hidden_size), compute_dtype(rows)
        cell = draw_cell_call(lstm.options, norm, size, x.device, dtype, lstm.training)
    begins, ends = lanes or (None, None)
    args = LSTMArgs(rows, tokens, h0, c0, *weights, cell.mask, begins, ends, seed=cell.seed)
    return args if norm is None else args._replace(**norm._asdict())
