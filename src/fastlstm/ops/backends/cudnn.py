"""cuDNN's LSTM on CUDA, with sizes padded for its persistent kernel.

torch (ATen/native/cudnn/RNN.cpp) asks for a persistent kernel, which keeps the weights on the chip
through all steps, for fp16, one layer, one direction, `H <= 1024`, `H` and `I` multiples of 128,
`B <= 128` a multiple of 8; and, in fp16 and fp32, for few units: `H <= 192` forward, `H <= 128`
backward. Layers run one by one here, so only the sizes and the dtype decide. On an H200 these rules
named the kernel that ran in all of 236 cases (benchmarks/cudnn_steps.py, docs/results.md).

A padded hidden unit has zero weights and biases: its gates are sigmoid(0), its candidate
tanh(0) = 0, so its cell and output stay 0 and the result is exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastlstm.ops.call import Kernel, LSTMArgs, LSTMCall, LSTMOutput

MAX_PERSISTENT_H = 1024
MAX_PERSISTENT_B = 128
MAX_SMALL_H, MAX_SMALL_H_BACKWARD = 192, 128
MAX_PADDING_COSTS = {64: 2.0, MAX_PERSISTENT_B: 1.2}
"""Up to a batch of so many rows, pad if the padded call has at most this many times the FLOP. On an
H200 the persistent kernel is 2.3 to 5 times as fast up to 64 rows, 1.2 to 4.6 with 128."""


def cudnn_kernel(call: LSTMCall) -> Kernel:
    """Returns which of cuDNN's kernels torch's rules choose for `call`, after padding."""
    if not (torch.backends.cudnn.is_available() and torch.backends.cudnn.enabled):
        why = "because cuDNN is missing or switched off"
        return Kernel("ATen per-step loop", is_fast=False, why=why)
    name = str(call.dtype).removeprefix("torch.")
    padded = padded_call(call)
    if persistent_refusal(padded) is None:
        sizes = "" if padded == call else f", padded to B={padded.B} I={padded.I} H={padded.H}"
        return Kernel(f"cuDNN persistent LSTM {name}{sizes} (by torch's rules)", True)
    why = f"not persistent: {persistent_refusal(call)}"
    return Kernel(f"cuDNN standard LSTM {name} (by torch's rules)", True, why)


def persistent_refusal(call: LSTMCall) -> str | None:
    """Returns why torch does not ask cuDNN for the persistent kernel, or None."""
    small = MAX_SMALL_H_BACKWARD if call.requires_grad else MAX_SMALL_H
    if call.dtype in (torch.float16, torch.float32) and small >= call.H:
        return None
    if call.dtype != torch.float16:
        return f"needs fp16, this is {str(call.dtype).removeprefix('torch.')}"
    if call.H > MAX_PERSISTENT_H or call.H % 128:
        return f"H={call.H} is not a multiple of 128 up to {MAX_PERSISTENT_H}"
    if call.I % 128:
        return f"I={call.I} is not a multiple of 128"
    if call.B > MAX_PERSISTENT_B or call.B % 8:
        return f"B={call.B} is not a multiple of 8 up to {MAX_PERSISTENT_B}"
    return None


def padded_call(call: LSTMCall) -> LSTMCall:
    """Returns `call` padded to sizes of the persistent kernel, if that is faster."""
    if persistent_refusal(call) is None:
        return call
    padded = call._replace(B=_up(call.B, 8), I=_up(call.I, 128), H=_up(call.H, 128))
    cost = (padded.B * padded.H * (padded.I + padded.H)) / (call.B * call.H * (call.I + call.H))
    limit = next((cost for B, cost in MAX_PADDING_COSTS.items() if padded.B <= B), 0.0)
    if persistent_refusal(padded) is not None or cost > limit:
        return call
    return padded


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def pad_arguments(call: LSTMCall, to: LSTMCall, args: LSTMArgs) -> LSTMArgs:
    """Returns the arguments of `call` zero-padded to the sizes of `to`, differentiably.

    A cell of zero weights stays 0 because activation(0) is 0; sigmoid and hard_sigmoid are the
    exceptions, but their columns of w_hh are zero too.
    """
    rows, units, inputs = to.B - call.B, to.H - call.H, to.I - call.I

    def per_gate(w: Tensor | None, columns: int = 0) -> Any:
        if w is None:
            return None
        padded = pad(w.reshape(4, call.H, -1), (0, columns, 0, units))
        return padded.reshape(4 * to.H, *((-1,) if w.dim() == 2 else ()))

    def per_unit(t: Tensor | None) -> Any:
        return None if t is None else pad(t, (0, units, 0, rows)[: 2 * t.dim()])

    return args._replace(
        rows=pad(args.rows, (0, inputs, 0, rows)) if rows or inputs else args.rows,
        w_ih=per_gate(args.w_ih, inputs),
        w_hh=per_gate(args.w_hh, units),
        **{name: per_gate(getattr(args, name)) for name in ("b_ih", "b_hh", "gamma_hh")},
        **{
            name: per_unit(getattr(args, name))
            for name in ("h0", "c0", "mask", "gamma_c", "beta_c")
        },
    )


def cudnn_lstm(call: LSTMCall, args: LSTMArgs) -> LSTMOutput:
    """Runs one layer through `torch.lstm` in `call.dtype`, padded if that is faster."""
    to, given = padded_call(call), args
    args = args.cast(call.dtype)
    if to != call:
        args = pad_arguments(call, to, args)
    args = LSTMArgs(*(None if t is None else t.contiguous() for t in args))  # type: ignore[arg-type]
    if call.device == "cuda" and torch.backends.cudnn.enabled and lie_apart(args.weights()):
        args = own_weights(args, given)
        weights, lstm_mode = [w for w in args.weights() if w is not None], 2
        with torch.no_grad():  # moves them into one buffer, as cuDNN wants them
            torch._cudnn_rnn_flatten_weight(
                weights, len(weights), to.I, lstm_mode, to.H, 0, 1, False, False
            )
    y, h, c = torch_lstm(call, args)
    B, H = call.B, call.H
    return LSTMOutput(y[:, :B, :H], h[:B, :H], c[:B, :H])


def torch_lstm(call: LSTMCall, args: LSTMArgs) -> LSTMOutput:
    """Runs one layer through `torch.lstm`, which chooses the kernel."""
    weights = [w for w in args.weights() if w is not None]
    state = args.h0.unsqueeze(0), args.c0.unsqueeze(0)
    is_training = call.requires_grad
    y, h, c = torch.lstm(
        args.rows, state, weights, call.has_bias, 1, 0.0, is_training, False, False
    )
    return LSTMOutput(y, h.squeeze(0), c.squeeze(0))


def lie_apart(weights: Iterable[Tensor | None]) -> bool:
    """Whether weights are in several buffers; nn.LSTM lays its own parameters out in one."""
    return len({w.untyped_storage().data_ptr() for w in weights if w is not None}) > 1


def own_weights(args: LSTMArgs, given: LSTMArgs) -> LSTMArgs:
    """Returns `args` with differentiable copies of the caller's weights.

    The caller's tensors keep their memory: others may share them or need them for backward.
    """
    theirs = [id(w) for w in given.weights() if w is not None]
    copies = {
        name: w.clone()
        for name in ("w_ih", "w_hh", "b_ih", "b_hh")
        if (w := getattr(args, name)) is not None and id(w) in theirs
    }
    return args._replace(**copies)
