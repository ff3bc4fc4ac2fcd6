"""oneDNN's fused LSTM layer as torch ships it (`aten::mkldnn_rnn_layer`).

`nn.LSTM` under autocast hands every operand over in bf16, the cell state and the biases included,
and rounds the gradients of the weights to bf16. The kernel itself takes the cell and the bias in
float32 and forms every gradient in float32; calling it directly keeps them. Relative RMS error
against float64 at T=100 B=8 I=32 H=128: y 0.0053 -> 0.0019, cT 0.0063 -> 0.0008, dw_hh 0.011 ->
0.005.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fastlstm.errors import KernelError
from fastlstm.ops.call import Kernel, LSTMArgs, LSTMCall, LSTMOutput
from fastlstm.system import hardware

_LSTM_MODE = 2
"""torch's number of the LSTM among its RNN kinds."""


def refusal(call: LSTMCall) -> str | None:
    """Returns why torch cannot run `call` through oneDNN, or None.

    Source: `use_mkldnn` in ATen/native/RNN.cpp: float32; bf16 on a CPU with AVX-512; fp16 without a
    gradient on a CPU that has it; never anything else, never with mkldnn switched off. There is no
    condition on T or B.
    """
    if not torch.backends.mkldnn.is_available():
        return "this torch is built without oneDNN"
    if not hardware.has_onednn():
        return "torch.backends.mkldnn is switched off"
    if call.dtype == torch.float32:
        return None
    if call.dtype == torch.bfloat16:
        return (
            None
            if hardware.has_bf16_products()
            else "oneDNN needs AVX-512 for bf16 and this CPU has none"
        )
    if call.dtype == torch.float16:
        if call.requires_grad:
            return "oneDNN trains no LSTM in fp16; use bf16 or fp32"
        return None if _has_fp16() else "oneDNN needs AVX512-FP16 for fp16 and this CPU has none"
    return f"oneDNN has no LSTM in {str(call.dtype).removeprefix('torch.')}"


def kernel(call: LSTMCall) -> Kernel:
    """Returns the printable kernel of a call that `refusal` lets pass."""
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


@cache
def _has_fp16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


@contextmanager
def hidden_from(dtype: torch.dtype, device: str) -> Iterator[None]:
    """Hides oneDNN from torch's LSTM in bf16 on a CPU where oneDNN has none.

    torch asks oneDNN all the same, which raises "could not create a primitive descriptor"; without
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


def run(call: LSTMCall, args: LSTMArgs) -> LSTMOutput:
    """Runs a call that `refusal` lets pass, with dense rows."""
    y, h, c = _OneDNNLayer.apply(call, args.rows, args.h0, args.c0, *args.weights)  # type: ignore[no-untyped-call]
    return LSTMOutput(y, h, c)


class _OneDNNLayer(torch.autograd.Function):
    """Casts inside, so that gradients leave in float32 without a detour over bf16."""

    @staticmethod
    def forward(
        ctx: Any,
        call: LSTMCall,
        x: Tensor,
        h0: Tensor,
        c0: Tensor,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None,
        b_hh: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        args = [_dense(t, call.dtype) for t in (x, w_ih, w_hh)]
        args += _biases(b_ih, b_hh, w_hh)
        args += [_dense(h0, call.dtype).unsqueeze(0), _dense(c0, torch.float32).unsqueeze(0)]
        with torch.set_grad_enabled(call.requires_grad):  # torch's switch for the training kernel
            y, h, c, workspace = torch.ops.aten.mkldnn_rnn_layer(
                *args, False, [], _LSTM_MODE, call.H, 1, True, False, False, call.requires_grad
            )
        if call.requires_grad:
            ctx.save_for_backward(*args, y, h, c, workspace)
            ctx.set_materialize_grads(False)
            ctx.H = call.H
            tensors = (x, h0, c0, w_ih, w_hh, b_ih, b_hh)
            ctx.dtypes = [None if t is None else t.dtype for t in tensors]
        return y, h.squeeze(0), c.squeeze(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise KernelError(
                "oneDNN's LSTM has no second derivative (create_graph=True); leave out backend and"
                " use the native kernels, or float64"
            )
        dy, dh, dc = grads
        if dy is None and dh is None and dc is None:
            return (None,) * 8
        *args, y, h, c, workspace = ctx.saved_tensors
        d_state = (None if d is None else d.unsqueeze(0) for d in (dh, dc))
        dx, dw_ih, dw_hh, db, _, dh0, dc0 = torch.ops.aten.mkldnn_rnn_layer_backward(
            *args, y, h, c, dy, *d_state,
            False, _LSTM_MODE, ctx.H, 1, True, True, False, [], False, workspace,
        )  # fmt: skip
        gradients = (dx, dh0.squeeze(0), dc0.squeeze(0), dw_ih, dw_hh, db, db)
        places = zip(gradients, ctx.dtypes, ctx.needs_input_grad[1:], strict=True)
        return None, *(g.to(dtype) if dtype and needed else None for g, dtype, needed in places)


def _dense(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.detach().to(dtype).contiguous()


def _biases(b_ih: Tensor | None, b_hh: Tensor | None, w_hh: Tensor) -> list[Tensor]:
    """Returns the two float32 biases the kernel adds up; zeros for none."""
    zero = torch.zeros(w_hh.shape[0], device=w_hh.device)
    return [zero if b is None else _dense(b, torch.float32) for b in (b_ih, b_hh)]
