"""torch's own LSTM: oneDNN's fused layer on a CPU, cuDNN on CUDA, a per-step loop for the rest.

torch chooses among these by itself and silently. Here the same conditions are asked first, so that
the choice is known before the call, printed, and refused with `--strict-kernels`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fastlstm.ops.backends import onednn
from fastlstm.ops.backends.cudnn import cudnn_kernel, cudnn_lstm
from fastlstm.ops.call import Kernel, LSTMCall, LSTMOutput, LSTMWeights

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class AtenBackend:
    """What `nn.LSTM` would run, called one layer at a time."""

    name = "aten"

    def supports(self, call: LSTMCall) -> str | None:
        """Returns None for a CPU or CUDA call in a floating-point dtype torch's LSTM knows."""
        if call.device not in ("cpu", "cuda"):
            return f"torch has no LSTM kernel for device {call.device}"
        if call.dtype not in DTYPES:
            return f"torch has no LSTM kernel for {call.dtype}"
        return None

    def kernel(self, call: LSTMCall) -> Kernel:
        """Returns what torch runs: fused where its conditions hold, else the loop and why."""
        if call.device == "cuda":
            return cudnn_kernel(call)
        reason = onednn.refusal(call)
        if reason is not None:
            return Kernel("ATen per-step loop", is_fast=False, why=f"because {reason}")
        return onednn.kernel(call)

    def run(
        self, call: LSTMCall, x: Tensor, h0: Tensor, c0: Tensor, weights: LSTMWeights
    ) -> LSTMOutput:
        """Runs the kernel that `kernel` names."""
        with torch.autocast(call.device, enabled=False):
            if call.device == "cuda":
                return cudnn_lstm(call, x, h0, c0, weights)
            if onednn.refusal(call) is None:
                return onednn.run(call, x, h0, c0, weights)
            return _per_step_lstm(call, x, h0, c0, weights)


def _per_step_lstm(
    call: LSTMCall, x: Tensor, h0: Tensor, c0: Tensor, weights: LSTMWeights
) -> LSTMOutput:
    """torch's decomposed LSTM: one small GEMM and several passes over the gates per step."""
    cast = [w.to(call.dtype) for w in weights if w is not None]
    state = (h0.to(call.dtype).unsqueeze(0), c0.to(call.dtype).unsqueeze(0))
    y, h, c = torch.lstm(
        x.to(call.dtype), state, cast, call.has_bias, 1, 0.0, call.requires_grad, False, False
    )
    return LSTMOutput(y, h.squeeze(0), c.squeeze(0))
