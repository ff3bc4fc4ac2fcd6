"""fastlstm's fused kernels (csrc): a whole sequence per call, packed weights, gates in cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fastlstm.errors import KernelError, counted
from fastlstm.ops import kernels, native_call
from fastlstm.ops.autograd import LSTMFunction
from fastlstm.ops.call import Kernel, LSTMArgs, LSTMCall, LSTMOutput
from fastlstm.ops.checkpointing import CheckpointedLSTMFunction, describe_saved, steps_per_part
from fastlstm.ops.custom_op import is_traced, run_custom_op
from fastlstm.system import environment, hardware

_UNITS = {
    "scalar": "portable code",
    "neon": "NEON",
    "neon_bf16": "NEON-BF16",
    "avx2": "AVX2",
    "avx512": "AVX-512",
    "avx512_bf16": "AVX512-BF16",
    "amx_bf16": "AMX",
}


class NativeBackend:
    """Forward and backward in float32 or bf16 (float32 sums and cell state), any options."""

    name = "native"
    is_own = True
    device: str | None = "cpu"

    def supports(self, call: LSTMCall) -> str | None:
        if call.device != "cpu":
            return f"these kernels run on the CPU, not on {call.device}"
        if call.dtype not in (torch.float32, torch.bfloat16):
            name = str(call.dtype).removeprefix("torch.")
            return f"these kernels compute in float32 and bf16, not in {name}"
        return None

    def describe(self, call: LSTMCall) -> Kernel:
        """Returns the kernel with its instruction set, threads, panels, options and memory."""
        is_bf16 = call.dtype == torch.bfloat16
        table = kernels.fastest_kernels(is_bf16)
        threads, whose = kernels.num_threads(call.B, call.I, call.H), ""
        if call.directions == 2 and self._can_run_both(call):
            team, members = kernels.team_of_layer(call.T, call.B, call.I, call.H, 2)
            if 2 * members <= team:
                threads, whose = members, " for each direction"
        split = f"{counted(threads, 'thread')}{whose}"
        if threads > 1:
            has_norm = call.options.layer_norm
            by_lanes = table.splits_lanes(call.B, call.H, threads, has_norm)
            split += f" by {'lanes' if by_lanes else 'units'}"
        name = (
            f"fused LSTM {'bf16' if is_bf16 else 'fp32'} ({_UNITS[table.isa]}, {split}, panels of"
            f" {table.lanes} units)"
        )
        if extras := call.options.active(training=True):
            name += f" + {', '.join(extras)}"
        if call.requires_grad and call.max_activation_bytes is not None:
            name += f", {describe_saved(call)}"
        return Kernel(name, is_fast=table.isa != "scalar", why="; ".join(_slower(table, threads)))

    def run(self, call: LSTMCall, args: LSTMArgs) -> LSTMOutput:
        """Runs a supported call.

        For tokens of a small embedding the kernel multiplies the V rows of the embedding instead
        of the T * B rows of the input, and gathers. Gradients then differ in the last bits.
        Raises ShapeError: a token outside of the embedding.
        """
        if call.has_tokens and args.rows.shape[0] >= call.T * call.B:
            args = args.embedded()
        if is_traced(*args):
            if torch.autograd.forward_ad._current_level >= 0:
                raise KernelError(
                    "forward-mode derivatives (jvp) come to the native LSTM kernels, which have"
                    " gradients only; take a gradient, or backend='reference'"
                )
            return run_custom_op(call, args)
        if not call.requires_grad:
            is_bf16 = call.dtype == torch.bfloat16
            y, (hT, cT), _ = native_call.forward((args,), is_bf16, False, call.options)
            return LSTMOutput(y, hT, cT)
        if call.max_activation_bytes is not None:
            steps, _ = steps_per_part(call)
            if steps < call.T:
                return LSTMOutput(*CheckpointedLSTMFunction.apply(steps, call, *args))  # type: ignore[no-untyped-call]
        return LSTMOutput(*LSTMFunction.apply(call, *args))  # type: ignore[no-untyped-call]

    def run_both(
        self, call: LSTMCall, directions: Sequence[LSTMArgs]
    ) -> tuple[Tensor, list[Tensor]] | None:
        """Runs both directions of a layer side by side, as `run_layer`, or returns None if they
        must run one after the other: with tokens, in a trace, or within a limit of memory."""
        if is_traced(*directions[0], *directions[1]) or not self._can_run_both(call):
            return None
        if call.requires_grad:
            tensors = itertools.chain.from_iterable(directions)
            y, *states = LSTMFunction.apply(call, *tensors)  # type: ignore[no-untyped-call]
        else:
            is_bf16 = call.dtype == torch.bfloat16
            y, states, _ = native_call.forward(directions, is_bf16, False, call.options)
        given = itertools.chain.from_iterable((args.h0, args.c0) for args in directions)
        return y, [t.to(first.dtype) for t, first in zip(states, given, strict=True)]

    @staticmethod
    def _can_run_both(call: LSTMCall) -> bool:
        if call.has_tokens or not (call.T and call.B):
            return False
        is_limited = call.requires_grad and call.max_activation_bytes is not None
        return not is_limited or steps_per_part(call)[0] >= call.T


def _slower(table: Any, threads: int) -> Iterator[str]:
    """Yields the reasons why these kernels are slower than they could be."""
    if (forced := environment.forced_isa()) is not None:
        yield f"FASTLSTM_ISA allows no more than {forced}"
    elif table.isa == "scalar":
        yield "this CPU has none of AVX2, AVX-512, AMX"
    if table.is_bf16 and not table.isa.endswith("_bf16"):
        slow = hardware.cpu().isa == "avx512_bf16"
        which = "with slow" if slow else "without"
        yield f"{which} bf16 instructions it multiplies at the speed of fp32"
    if threads > 1 and not hardware.join_openmp():
        yield (
            "its threads compete with torch's: there is no OpenMP runtime to share (there is none"
            " after a fork)"
        )
