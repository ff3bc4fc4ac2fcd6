"""When torch's own `nn.LSTM` must run a layer, and lengths on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

if TYPE_CHECKING:
    from torch import Tensor

    from fastlstm.nn.lengths import Lanes
    from fastlstm.nn.lstm import LSTM, State

BEYOND_TORCH = "torch.func.vmap, jvp and forward-mode derivatives know no LSTM, only its operators"


def is_beyond_torch() -> bool:
    """Whether a transform is at work that torch has no rule of its LSTM for."""
    if torch.compiler.is_compiling():
        return False
    kinds = {level.key() for level in torch._C._functorch.get_interpreter_stack() or ()}
    known = torch._C._functorch.TransformType
    is_forward = torch.autograd.forward_ad._current_level >= 0
    return is_forward or known.Vmap in kinds or known.Jvp in kinds


def active_transform() -> str | None:
    """Returns which of torch's older transforms is at work: they see through no kernel here."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return "torch.jit.trace records torch's operators only"
    if torch.compiler.is_compiling() and torch.onnx.is_in_onnx_export():
        return "torch.onnx.export translates torch's operators only"
    if torch._C._are_functorch_transforms_active():
        return "torch.func transforms torch's operators only"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode derivatives see torch's operators only"
    return None


def run_lengths(
    layer: LSTM, x: Tensor, state: State | None, lanes: Lanes
) -> tuple[Tensor, Tensor, Tensor]:
    """Lengths on torch's own: packed, and sequences of no step mended afterwards."""
    T, B = x.shape[:2]
    H, P = layer.hidden_size, layer.proj_size or layer.hidden_size
    steps = torch.arange(T, device=x.device)[:, None]
    lengths = lanes.ends - lanes.begins
    is_real = (steps < lengths)[:, :, None]
    is_some = (lengths > 0)[None, :, None]
    sources = ((steps + lanes.begins) % T)[:, :, None]  # all sequences begin together
    shifted = x.gather(0, sources.expand_as(x))
    if state is None:
        sizes = (len(layer._all_weights), B)
        state = (x.new_zeros((*sizes, P)), x.new_zeros((*sizes, H)))
    packed = pack_padded_sequence(shifted, lengths.clamp(min=1).cpu(), enforce_sorted=False)
    y_packed, (h, c) = layer._torch(packed, state)
    y, _ = pad_packed_sequence(y_packed, total_length=T)
    y = y.where(is_real, y.new_zeros(()))
    back = ((steps - lanes.begins) % T)[:, :, None]
    y = y.gather(0, back.expand_as(y))
    return y, h.where(is_some, state[0].to(h.dtype)), c.where(is_some, state[1].to(c.dtype))
