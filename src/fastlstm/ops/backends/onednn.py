"""oneDNN's fused LSTM layer in `torch.lstm`: when torch uses it, and the kernel's name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fastlstm.ops.call import Kernel, LSTMCall
from fastlstm.system import hardware


def refusal(call: LSTMCall) -> str | None:
    """Returns why torch cannot run `call` through oneDNN, or None.

    By `use_mkldnn` in ATen/native/RNN.cpp, oneDNN runs float32, bf16 on a CPU with AVX-512, and
    fp16 without a gradient on a CPU that has fp16. It runs nothing else, and nothing with mkldnn
    switched off. There is no condition on T or B.
    """
    if not torch.backends.mkldnn.is_available():
        return "this torch is built without oneDNN"
    if not hardware.has_onednn():
        return "torch.backends.mkldnn is switched off"
    if call.dtype == torch.float32:
        return None
    if call.dtype == torch.bfloat16:
        is_able = hardware.has_bf16_products()
        return None if is_able else "oneDNN needs AVX-512 for bf16 and this CPU has none"
    if call.dtype == torch.float16:
        if call.requires_grad:
            return "oneDNN trains no LSTM in fp16; use bf16 or fp32"
        is_able = torch.ops.mkldnn._is_mkldnn_fp16_supported()
        return None if is_able else "oneDNN needs AVX512-FP16 for fp16 and this CPU has none"
    return f"oneDNN has no LSTM in {str(call.dtype).removeprefix('torch.')}"


def kernel(call: LSTMCall) -> Kernel:
    """Returns the kernel of a call without `refusal`."""
    if call.dtype == torch.bfloat16:
        unit = hardware.bf16_instructions()
        if unit is None:
            why = "this CPU has no bf16 instructions, they are emulated; fp32 is faster here"
            return Kernel("oneDNN fused LSTM bf16 (emulated)", is_fast=False, why=why)
        return Kernel(f"oneDNN fused LSTM bf16 ({unit})", is_fast=True)
    if call.dtype == torch.float16:
        return Kernel("oneDNN fused LSTM fp16", is_fast=True)
    isa = torch.backends.cpu.get_cpu_capability()
    unit = hardware.bf16_instructions()
    why = f"bf16 would use {unit}" if unit else ""
    return Kernel(f"oneDNN fused LSTM fp32 ({isa})", is_fast=True, why=why)


@contextmanager
def hidden_from(dtype: torch.dtype, device: str) -> Iterator[None]:
    """Hides oneDNN from torch's LSTM in bf16 on a CPU where oneDNN has no bf16.

    Otherwise torch calls oneDNN, which raises "could not create a primitive descriptor". Without
    oneDNN torch runs its loop over the steps.
    """
    is_hidden = dtype is torch.bfloat16 and device == "cpu" and hardware.has_onednn()
    is_hidden = is_hidden and not hardware.has_bf16_products()
    if is_hidden:
        torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        if is_hidden:
            torch._C._set_mkldnn_enabled(True)
