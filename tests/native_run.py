"""Calls of the kernels with tensors one by one, on any backend or on the native one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastlstm.ops.backends.native import NativeBackend
from fastlstm.ops.call import LSTMArgs, describe_call
from fastlstm.ops.lstm import check_args, run

ALL_OPTIONS: dict[str, Any] = {
    "layer_norm": True,
    "recurrent_dropout": 0.3,
    "zoneout": (0.2, 0.4),
    "activation": "softsign",
    "recurrent_activation": "hard_sigmoid",
}
"""Every option that the kernels have, away from its default."""


def lstm(
    x, h0, c0, w_ih, w_hh, b_ih = None, b_hh = None,
    *, tokens = None, **call,
):  # fmt: skip
    """Checks the tensors of a call and runs it."""
    args = LSTMArgs(x, tokens, h0, c0, w_ih, w_hh, b_ih, b_hh)
    check_args(args)
    return run(args, **call)


def run_native(args, dtype, *, keep=True, **call):
    """Runs `args` with products in `dtype`; `keep` is for a backward pass."""
    described = describe_call(args, **call)._replace(dtype=dtype, requires_grad=keep)
    return NativeBackend().run(described, args)


def with_cell(args, cell):
    """Returns the arguments with a cell's tensors, and its options."""
    norm = (None,) * 4 if cell.norm is None else cell.norm
    tensors = dict(zip(("gamma_ih", "gamma_hh", "gamma_c", "beta_c"), norm, strict=True))
    args = args._replace(mask=cell.mask, seed=cell.seed, **tensors)
    return args, replace(cell.options, layer_norm=cell.norm is not None)


def lstm_tokens(tokens, embedding, *args, **call):
    """`lstm` on tokens, in the order in which a model has them."""
    return lstm(embedding, *args, tokens=tokens, **call)
