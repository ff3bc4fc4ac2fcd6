"""Rows of small tables on a GPU: gathered in the compute dtype; their gradient is one product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastlstm.ops.autograd import is_batched
from fastlstm.ops.call import compute_dtype
from fastlstm.ops.custom_op import is_traced

MAX_TABLE_ROWS = 1024
"""The gradient of a larger table would be a product over too many zeros."""


def embedding(tokens: Tensor, table: Tensor) -> Tensor:
    """Returns the rows of a table that tokens name, as torch's embedding.

    On a GPU that computes in bf16 or fp16 the rows have that dtype, and the gradient of a table of
    up to `MAX_TABLE_ROWS` rows is a product: torch would sort the tokens.
    """
    dtype = compute_dtype(table)
    if (
        not table.is_cuda
        or dtype not in (torch.bfloat16, torch.float16)
        or len(table) > MAX_TABLE_ROWS
        or is_traced(tokens, table)
    ):
        return torch.nn.functional.embedding(tokens, table)
    rows: Tensor = _Embedding.apply(tokens, table, dtype)  # type: ignore[no-untyped-call]
    return rows


def table_gradient(tokens: Tensor, num_rows: int, d: Tensor) -> Tensor:
    """Returns the gradient of the rows of a table that tokens name, `(num_rows, …)` float32: a
    product with ones and zeros, which adds in one order."""
    chosen = d.new_zeros((len(d), num_rows)).scatter_(1, tokens.reshape(-1, 1), 1)
    return wide_product(chosen.t(), d)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Returns `a @ b`, summed and returned in float32."""
    wide: Tensor = torch.mm(a, b, out_dtype=torch.float32)
    return wide


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(tokens, table)
        return torch.nn.functional.embedding(tokens, table.to(dtype))

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[None, Tensor, None]:
        tokens, table = ctx.saved_tensors
        d = d.reshape(-1, d.shape[-1])
        if torch.is_grad_enabled() or is_batched(d):  # create_graph, is_grads_batched
            zeros = torch.zeros_like(table)
            return None, zeros.index_add(0, tokens.reshape(-1), d.to(table.dtype)), None
        return None, table_gradient(tokens, len(table), d).to(table.dtype), None
