"""Our own kernels on NVIDIA GPUs: weights stay in the registers of a thread block cluster."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn.functional import pad

from fastlstm.errors import KernelError
from fastlstm.ops.backends.cudnn import pad_arguments
from fastlstm.ops.call import Kernel, LSTMArgs, LSTMCall, LSTMOutput
from fastlstm.ops.cuda.cluster_lstm import (
    SIZES,
    embedded_if_large,
    max_clusters,
    normed_input,
    padded_size,
    rows_per_cluster,
    run_cluster_lstm,
)

_MIN_CAPABILITY = (9, 0)


class ClusterBackend:
    """Forward and backward in bf16 or fp16 (float32 sums and cell state), any option."""

    name = "cluster"
    is_own = True
    device: str | None = "cuda"

    def supports(self, call: LSTMCall) -> str | None:
        if call.device != "cuda":
            return f"these kernels run on NVIDIA GPUs, not on {call.device}"
        if torch.compiler.is_compiling():
            return "torch.compile records torch's operators only"
        if call.dtype not in (torch.bfloat16, torch.float16):
            name = str(call.dtype).removeprefix("torch.")
            return f"these kernels compute in bf16 and fp16, not in {name}"
        if call.max_activation_bytes is not None:
            return "these kernels save all activations, max_activation_bytes limits them"
        if max(SIZES) < call.H:
            return f"H={call.H}, a cluster of blocks holds the weights of {max(SIZES)} units"
        return refusal(torch.cuda.current_device(), padded_size(call.H))

    def describe(self, call: LSTMCall) -> Kernel:
        """Returns the kernel with its clusters, rows and padding."""
        device, H = torch.cuda.current_device(), padded_size(call.H)
        has_norm = call.options.layer_norm
        clusters, groups = rows_per_cluster(call.B, H, device, has_norm=has_norm)
        dtype = "fp16" if call.dtype == torch.float16 else "bf16"
        name = (
            f"persistent LSTM {dtype} ({clusters} of {max_clusters(H, device)} clusters of"
            f" {H // 32} blocks, {8 * groups} rows each)"
        )
        if extras := call.options.active(training=True):
            name += f" + {', '.join(extras)}"
        why = "" if H == call.H else f"H={call.H} is padded to {H}"
        return Kernel(name, is_fast=True, why=why)

    def run(self, call: LSTMCall, args: LSTMArgs) -> LSTMOutput:
        """Runs a supported call; units beyond H have weights of zero and stay zero."""
        with torch.autocast("cuda", enabled=False):
            size, H, args = padded_size(call.H), call.H, embedded_if_large(args)
            norm_size = H if call.options.layer_norm else 0
            gx = normed_input(call, args) if norm_size else None
            if size == H:
                return run_cluster_lstm(call, args, gx, norm_size)
            gx = None if gx is None else pad(gx, (0, 4 * (size - H)))
            to = call._replace(H=size)
            y, h, c = run_cluster_lstm(to, pad_arguments(call, to, args), gx, norm_size)
            return LSTMOutput(y[:, :, :H], h[:, :H], c[:, :H])


@lru_cache
def refusal(device: int, H: int) -> str | None:
    """Returns why this GPU cannot run the kernels for H units, or None; compiles them once."""
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        have = ".".join(map(str, capability))
        return f"they need thread block clusters, compute capability 9.0; this GPU has {have}"
    try:
        fits = max_clusters(H, device) > 0
    except (KernelError, RuntimeError, OSError) as error:  # a driver, or bindings, without a call
        return str(error).partition("\n")[0]
    return None if fits else f"this GPU cannot run a cluster of {H // 32} blocks"
