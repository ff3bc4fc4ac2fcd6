"""torch's own LSTM: oneDNN's fused layer on a CPU, cuDNN on CUDA, a per-step loop for the rest.

torch chooses among these silently. This backend checks the same conditions before the call, so that
reports show the choice and `--strict-kernels` can refuse it.
"""

from __future__ import annotations

import torch
from torch.autograd.grad_mode import set_grad_enabled

from fastlstm.ops.backends import onednn
from fastlstm.ops.backends.cudnn import cudnn_kernel, cudnn_lstm, torch_lstm
from fastlstm.ops.call import Kernel, LSTMArgs, LSTMCall, LSTMOutput
from fastlstm.ops.cell_options import TORCHS_CELL

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class AtenBackend:
    """What `nn.LSTM` would run, called one layer at a time."""

    name = "aten"
    is_own = False
    device: str | None = None

    def supports(self, call: LSTMCall) -> str | None:
        if call.options != TORCHS_CELL:
            return "it knows torch's cell only"
        if call.has_lengths:
            return "it takes no lengths and no PackedSequence"
        if call.device not in ("cpu", "cuda"):
            return f"torch has no LSTM kernel for device {call.device}"
        if call.dtype not in DTYPES:
            return f"torch has no LSTM kernel for {call.dtype}"
        return None

    def describe(self, call: LSTMCall) -> Kernel:
        """Returns torch's kernel: fused if the conditions hold, else the loop and the reason."""
        if call.device == "cuda":
            return cudnn_kernel(call)
        reason = onednn.refusal(call)
        if reason is not None:
            return Kernel("ATen per-step loop", is_fast=False, why=f"because {reason}")
        return onednn.kernel(call)

    def run(self, call: LSTMCall, args: LSTMArgs) -> LSTMOutput:
        args = args.embedded()
        with torch.autocast(call.device, enabled=False):
            if call.device == "cuda":
                return cudnn_lstm(call, args)
            # With gradients on, torch never takes oneDNN's fp16 kernel.
            with onednn.hidden_from(call.dtype, call.device), set_grad_enabled(call.requires_grad):
                return torch_lstm(call, args.cast(call.dtype))
