"""When torch's own `nn.LSTM` must run a layer, and how it runs lengths."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from fastlstm.errors import KernelError
from fastlstm.ops.backends.cudnn import lie_apart
from fastlstm.ops.backends.onednn import hidden_from
from fastlstm.ops.call import LSTMCall, compute_dtype, is_autocast
from fastlstm.ops.cell_options import TORCHS_CELL
from fastlstm.ops.left_alone import left_to_torch, options_of

if TYPE_CHECKING:
    from fastlstm.nn.lengths import Lanes
    from fastlstm.nn.lstm import LSTM, State

BEYOND_TORCH = "torch.func.vmap, jvp and forward-mode derivatives have no rule for torch's LSTM"


def is_beyond_torch() -> bool:
    """Whether a transform is active for which torch has no rule of its LSTM."""
    if torch.compiler.is_compiling():
        return False
    kinds = {level.key() for level in torch._C._functorch.get_interpreter_stack() or ()}
    known = torch._C._functorch.TransformType
    is_forward = torch.autograd.forward_ad._current_level >= 0
    return is_forward or known.Vmap in kinds or known.Jvp in kinds


def active_transform() -> str | None:
    """Returns the active transform that takes torch's operators only, or None."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return "torch.jit.trace records torch's operators only"
    if torch.compiler.is_compiling() and torch.onnx.is_in_onnx_export():
        return "torch.onnx.export translates torch's operators only"
    if torch._C._are_functorch_transforms_active():
        return "torch.func transforms torch's operators only"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode derivatives see torch's operators only"
    return None


def is_torchs(lstm: LSTM, x: Tensor) -> bool:
    """Whether torch's own must run this input.

    Raises:
        KernelError: it must, but the layer is strict or names a backend.
    """
    if options_of(lstm) != TORCHS_CELL:
        return False
    call = LSTMCall(
        1, 1, 1, 1, compute_dtype(x), x.device.type, requires_grad=False,
        options=TORCHS_CELL,  # named, as torch 2.11 cannot compile the default
    )  # fmt: skip
    reason = left_to_torch(lstm, call) or active_transform()
    if reason is not None and (lstm.strict or lstm.backend is not None):
        demand = "strict" if lstm.backend is None else f"backend '{lstm.backend}'"
        raise KernelError(
            f"this LSTM would run on torch's own nn.LSTM ({reason}); change that or leave out"
            f" {demand}"
        )
    return reason is not None and not (lstm.proj_size == 0 and is_beyond_torch())


def is_left_to_reference(lstm: LSTM) -> bool:
    """Whether a transform needs a slow loop.

    Raises:
        KernelError: it does, but the layer is strict or names the native kernels.
    """
    names = options_of(lstm).active(training=True)
    reason = active_transform() if names else None
    if reason is not None and (lstm.strict or lstm.backend == "native"):
        demand = "strict" if lstm.strict else "backend 'native'"
        raise KernelError(
            f"this LSTM with {', '.join(names)} would run on the reference, a Python loop over"
            f" time ({reason}); change that or leave out {demand}"
        )
    return reason is not None


class _OnWeights(nn.LSTM):
    """torch's layer on the list of weights that it is given."""

    def _update_flat_weights(self) -> None:
        return

    def _weights_have_changed(self) -> bool:
        return False


def on_one_buffer(layer: LSTM, flat: list[Any]) -> list[Any]:
    """Returns the weights as cuDNN wants them, in one buffer: copies where they lie apart.

    torch makes such copies in every call, too, and warns of it.
    """
    if torch.compiler.is_compiling() or active_transform() is not None:
        return flat
    kinds = {(w.dtype, w.device) if isinstance(w, Tensor) else None for w in flat}
    # Under autocast torch lays them out itself.
    if len(kinds) > 1 or None in kinds or is_autocast("cuda") or not lie_apart(flat):
        return flat
    copies, lstm_mode = [w.clone() for w in flat], 2
    with torch.no_grad():
        torch._cudnn_rnn_flatten_weight(
            copies, len(layer._all_weights[0]), layer.input_size, lstm_mode, layer.hidden_size,
            layer.proj_size, layer.num_layers, layer.batch_first, layer.bidirectional,
        )  # fmt: skip
    return copies


def run_on(layer: LSTM, flat: list[Any], input: Any, hx: State | None) -> tuple[Any, State]:
    """Runs torch's own layer on other weights; the layer itself, which threads share, stays."""
    other = _OnWeights.__new__(_OnWeights)
    other.__dict__ = {**layer.__dict__, "_flat_weights": flat}
    with without_missing_kernel(input):
        return nn.LSTM.forward(other, input, hx)


def without_missing_kernel(input: Any) -> AbstractContextManager[None]:
    """Returns a context in which torch's LSTM of `input` asks for no kernel that oneDNN lacks."""
    x = input.data if isinstance(input, PackedSequence) else input
    if not isinstance(x, Tensor) or torch.compiler.is_compiling():
        return nullcontext()
    return hidden_from(compute_dtype(x), x.device.type)


def run_lengths(
    layer: LSTM, x: Tensor, state: State | None, lanes: Lanes, flat: list[Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs lengths on torch's own: packed; sequences of length 0 are corrected afterwards."""
    T, B = x.shape[:2]
    H, P = layer.hidden_size, layer.proj_size or layer.hidden_size
    steps = torch.arange(T, device=x.device)[:, None]
    lengths = lanes.ends - lanes.begins
    is_real = (steps < lengths)[:, :, None]
    has_steps = (lengths > 0)[None, :, None]
    sources = ((steps + lanes.begins) % T)[:, :, None]  # all sequences start at step 0
    shifted = x.gather(0, sources.expand_as(x))
    if state is None:
        sizes = (len(layer._all_weights), B)
        state = (x.new_zeros((*sizes, P)), x.new_zeros((*sizes, H)))
    packed = pack_padded_sequence(shifted, lengths.clamp(min=1).cpu(), enforce_sorted=False)
    y_packed, (h, c) = layer._torch(packed, state, flat)
    y, _ = pad_packed_sequence(y_packed, total_length=T)
    y = y.where(is_real, y.new_zeros(()))
    back = ((steps - lanes.begins) % T)[:, :, None]
    y = y.gather(0, back.expand_as(y))
    h0, c0 = state
    return y, h.where(has_steps, h0.to(h.dtype)), c.where(has_steps, c0.to(c.dtype))
