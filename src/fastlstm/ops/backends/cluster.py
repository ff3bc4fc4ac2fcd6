"""Our own kernels on NVIDIA GPUs: weights stay in the registers of blocks that work together."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn.functional import pad

from fastlstm.errors import KernelError
from fastlstm.ops.backends.cudnn import pad_arguments
from fastlstm.ops.call import Kernel, LSTMArgs, LSTMCall, LSTMOutput, describe_call
from fastlstm.ops.cuda.cluster_lstm import (
    GRID_SIZES,
    SIZES,
    blocks_of,
    max_clusters,
    max_rows,
    normed_input,
    padded_size,
    rows_per_cluster,
    run_cluster_lstm,
)
from fastlstm.ops.cuda.embedding import MAX_TABLE_ROWS
from fastlstm.ops.reference import run_reference

_MAX_ERROR = 3e-2


class ClusterBackend:
    """Forward and backward in bf16 or fp16 (float32 sums and cell state), any option.

    The blocks of a thread block cluster exchange h through their shared memories.
    """

    name = "cluster"
    is_own = True
    device: str | None = "cuda"
    is_grid = False
    sizes: tuple[int, ...] = SIZES

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
        if max(self.sizes) < call.H:
            kind = "a launch" if self.is_grid else "a cluster of blocks"
            return f"H={call.H}, {kind} holds the weights of {max(self.sizes)} units"
        H = padded_size(call.H, is_grid=self.is_grid)
        try:
            return refusal(torch.cuda.current_device(), H, is_grid=self.is_grid)
        except (_NotNowError, torch.OutOfMemoryError) as reason:
            return str(reason).partition("\n")[0]

    def describe(self, call: LSTMCall) -> Kernel:
        """Returns the kernel with its clusters, rows and padding."""
        device, is_grid = torch.cuda.current_device(), self.is_grid
        H, has_norm = padded_size(call.H, is_grid=is_grid), call.options.layer_norm
        clusters, groups = rows_per_cluster(call.B, H, device, has_norm=has_norm, is_grid=is_grid)
        dtype = "fp16" if call.dtype == torch.float16 else "bf16"
        at_a_time = max_clusters(H, device, is_grid=is_grid)
        kind = "groups" if is_grid else "clusters"
        name = (
            f"persistent LSTM {dtype} ({clusters} of {at_a_time} {kind} of"
            f" {blocks_of(H)} blocks, {8 * groups} rows each)"
        )
        if extras := call.options.active(training=True):
            name += f" + {', '.join(extras)}"
        why = "" if H == call.H else f"H={call.H} is padded to {H}"
        return Kernel(name, is_fast=True, why=why)

    def run(self, call: LSTMCall, args: LSTMArgs) -> LSTMOutput:
        """Runs a supported call; units beyond H have weights of zero and stay zero."""
        with torch.autocast("cuda", enabled=False):
            is_grid, H = self.is_grid, call.H
            if args.tokens is not None and len(args.rows) > MAX_TABLE_ROWS:
                args = args.embedded()
            size, norm_size = padded_size(H, is_grid=is_grid), H if call.options.layer_norm else 0
            gx = normed_input(call, args) if norm_size else None
            if size == H:
                return run_cluster_lstm(call, args, gx, norm_size, is_grid=is_grid)
            gx = None if gx is None else pad(gx, (0, 4 * (size - H)))
            to = call._replace(H=size)
            args = pad_arguments(call, to, args)
            y, h, c = run_cluster_lstm(to, args, gx, norm_size, is_grid=is_grid)
            return LSTMOutput(y[:, :, :H], h[:, :H], c[:, :H])


class GridBackend(ClusterBackend):
    """The same kernels where blocks exchange h through global memory: older GPUs, more units."""

    name = "grid"
    is_grid = True
    sizes = GRID_SIZES

    def supports(self, call: LSTMCall) -> str | None:
        if (reason := super().supports(call)) is not None:
            return reason
        device, H = torch.cuda.current_device(), padded_size(call.H, is_grid=True)
        rows = max_rows(H, device, has_norm=call.options.layer_norm)
        if call.requires_grad and rows < call.B:
            return f"B={call.B}, the gradients of more than {rows} rows do not fit the L2 cache"
        return None


class _NotNowError(Exception):
    """The kernels cannot be compiled and tried during this call; a later call tries again."""


@lru_cache
def refusal(device: int, H: int, *, is_grid: bool = False) -> str | None:
    """Returns why this GPU cannot run the kernels for H units, or None; compiles them once."""
    capability = torch.cuda.get_device_capability(device)
    have = ".".join(map(str, capability))
    if is_grid and capability < (8, 0):
        return f"they need compute capability 8.0; this GPU has {have}"
    if not is_grid and capability < (9, 0):
        return f"they need thread block clusters, compute capability 9.0; this GPU has {have}"
    if torch.cuda.is_current_stream_capturing() or torch._C._are_functorch_transforms_active():
        raise _NotNowError("their first call is within a recording of a CUDA graph or torch.func")
    try:
        if max_clusters(H, device, is_grid=is_grid) == 0:
            kind = "at a time" if is_grid else "in a cluster"
            return f"this GPU cannot run {blocks_of(H)} blocks {kind}"
        if is_grid:
            error = trial_error(torch.device("cuda", device), H)
            if not error <= _MAX_ERROR:  # may be NaN
                return f"on this GPU their results are wrong (relative error {error:.1g})"
    except torch.OutOfMemoryError:
        raise
    except (KernelError, RuntimeError, OSError) as failure:  # a driver, or bindings, without a call
        return str(failure).partition("\n")[0]
    return None


def trial_error(device: torch.device, H: int) -> float:
    """Returns the largest relative error of outputs and gradients of a small call with H units.

    The kernels without clusters run on GPUs that they were never tried on. A place of a message is
    written again from the third step on.
    """
    found, draws = [], torch.Generator().manual_seed(0)
    shapes = (8, 20, 8), (20, H), (20, H), (4 * H, 8), (4 * H, H), (4 * H,), (4 * H,)
    given = [
        torch.randn(shape, generator=draws, device="cpu", dtype=torch.float32) * shape[-1] ** -0.5
        for shape in shapes
    ]
    with (
        torch.autocast(device.type, enabled=False),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),  # not the caller's
    ):
        for is_own in (False, True):
            tensors = [t.to(device).requires_grad_() for t in given]
            args = LSTMArgs(tensors[0], None, *tensors[1:])
            call = describe_call(args)._replace(dtype=torch.bfloat16)
            out = (
                run_cluster_lstm(call, args, is_grid=True)
                if is_own
                else run_reference(args, call.options, torch.float64)
            )
            loss = torch.stack([t.double().square().sum() for t in out]).sum()
            found.append([*out, *torch.autograd.grad(loss, tensors)])
    errors = [
        (own.detach().double() - want.detach()).norm() / want.detach().norm()
        for want, own in zip(*found, strict=True)
    ]
    return float(torch.stack(errors).max())
