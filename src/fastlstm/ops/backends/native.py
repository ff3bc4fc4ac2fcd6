"""Our own fused kernels (csrc): the whole sequence in one call, weights packed, gates in cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fastlstm.errors import counted
from fastlstm.ops import native_call
from fastlstm.ops.call import Kernel, LSTMCall, LSTMOutput, LSTMWeights
from fastlstm.ops.native_call import LSTMArgs
from fastlstm.ops.sequence import run_sequence
from fastlstm.system import environment, hardware

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_UNITS = {
    "scalar": "portable code",
    "avx2": "AVX2",
    "avx512": "AVX-512",
    "avx512_bf16": "AVX512-BF16",
    "amx_bf16": "AMX",
}


class NativeBackend:
    """Sequence forward and backward in float32 or bf16 (float32 sums and cell state)."""

    name = "native"

    def supports(self, call: LSTMCall) -> str | None:
        """Returns None for a CPU call in float32 or bf16."""
        if call.device != "cpu":
            return f"these kernels run on the CPU, not on {call.device}"
        if call.dtype not in _DTYPES:
            name = str(call.dtype).removeprefix("torch.")
            return f"these kernels compute in float32 and bf16, not in {name}"
        return None

    def kernel(self, call: LSTMCall) -> Kernel:
        """Returns the kernel with its instruction set, threads and panels."""
        table = native_call.fastest_kernels(call.dtype == torch.bfloat16)
        threads = native_call.num_threads(call.B, call.I, call.H)
        split = "1 thread"
        if threads > 1:
            owned = "lanes" if table.splits_lanes(call.B, call.H, threads) else "units"
            split = f"{counted(threads, 'thread')} by {owned}"
        panel = f"panels of {table.lanes} units"
        name = f"fused LSTM {_DTYPES[call.dtype]} ({_UNITS[table.isa]}, {split}, {panel})"
        return Kernel(name, is_fast=table.isa != "scalar", why="; ".join(_slower(table, threads)))

    def run(
        self, call: LSTMCall, x: Tensor, h0: Tensor, c0: Tensor, weights: LSTMWeights
    ) -> LSTMOutput:
        """Runs a supported call."""
        sequence = LSTMArgs(x, None, h0, c0, *weights)
        return run_sequence(sequence, call.dtype, keep=call.requires_grad, strict=call.strict)

    def run_tokens(
        self,
        call: LSTMCall,
        tokens: Tensor,
        embedding: Tensor,
        h0: Tensor,
        c0: Tensor,
        weights: LSTMWeights,
    ) -> LSTMOutput:
        """Runs a supported call whose input is `embedding[tokens]`.

        Raises:
            ShapeError: a token that is no row of the embedding.
        """
        sequence = LSTMArgs(embedding, tokens, h0, c0, *weights)
        return run_sequence(sequence, call.dtype, keep=call.requires_grad, strict=call.strict)


def _slower(table: Any, threads: int) -> Iterator[str]:
    """Yields every reason why these kernels could be faster than they are here."""
    if (forced := environment.forced_isa()) is not None:
        yield f"FASTLSTM_ISA allows no more than {forced}"
    elif table.isa == "scalar":
        yield "this CPU has none of AVX2, AVX-512, AMX"
    if table.is_bf16 and table.isa not in ("avx512_bf16", "amx_bf16"):
        slow = hardware.cpu().isa == "avx512_bf16"
        which = "with slow" if slow else "without"
        yield f"{which} bf16 instructions it multiplies at the speed of fp32"
    if threads > 1 and not hardware.join_openmp():
        yield (
            "its threads stand beside torch's: there is no OpenMP runtime to share (after a fork"
            " none can be shared)"
        )
