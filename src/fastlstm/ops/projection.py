"""Output projection and cross-entropy in the native kernels, on tensors (csrc/projection.h)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastlstm.ops.kernels import address_of, empty, fastest_kernels, padded_columns

_MIN_FLOP = 1 << 20
"""Less work runs on one thread: synchronization would cost more."""


class Projection(NamedTuple):
    """The arguments of a projection in the kernels' dtypes.

    Attributes:
        features: `(N, H)`, float32 or bfloat16, contiguous.
        weight: `(V, H)`, float32, contiguous.
        bias: `(V,)`, float32, or None.
    """

    features: Tensor
    weight: Tensor
    bias: Tensor | None

    @staticmethod
    def of(features: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Projection:
        """Converts tensors for products in `dtype`."""
        return Projection(
            features.detach().to(dtype).contiguous(),
            weight.detach().contiguous(),
            None if bias is None else bias.detach().contiguous(),
        )


def is_native(features: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether the kernels run it: float32 weights on the CPU, float32 or bfloat16 products."""
    if torch.compiler.is_compiling() or features.device.type != "cpu" or 0 in features.shape:
        return False
    if torch.autograd.forward_ad._current_level >= 0:  # the kernels would lose the tangent
        return False
    if weight.dtype != torch.float32 or (bias is not None and bias.dtype != torch.float32):
        return False
    H = features.shape[1]
    is_whole = padded_columns(H, dtype == torch.bfloat16) == H
    return dtype in (torch.float32, torch.bfloat16) and is_whole


def logits_gradient(p: Projection) -> Tensor:
    """Returns memory for the gradient of all logits, `(N, V padded)`."""
    stride = fastest_kernels(_is_bf16(p)).logit_stride(p.weight.shape[0])
    return empty((p.features.shape[0], stride), p.features.dtype)


def nats_of(p: Projection, targets: Tensor, d: Tensor | None = None) -> Tensor:
    """Returns the cross-entropy of every row, `(N,)`; writes the logits' gradient to `d`."""
    nats = empty((p.features.shape[0],))
    _call(p, targets, nats, d, 1.0, (None, None, None))
    return nats


def gradients_of(
    p: Projection, d: Tensor, scale: float, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, ...]:
    """Returns the needed gradients of features, weight and bias, times `scale`.

    `nats_of` filled `d`.
    """
    gradients = _gradients(p, needs)
    _call(p, None, None, d, scale, gradients)
    return gradients


def nats_and_gradients(
    p: Projection, targets: Tensor, needs: tuple[bool, bool, bool]
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Returns losses and gradients at once, in the memory of one chunk of rows."""
    nats, gradients = empty((p.features.shape[0],)), _gradients(p, needs)
    _call(p, targets, nats, None, 1.0, gradients)
    return nats, gradients


def _gradients(p: Projection, needs: tuple[bool, bool, bool]) -> tuple[Tensor | None, ...]:
    df = empty(p.features.shape, p.features.dtype) if needs[0] else None
    dw = empty(p.weight.shape) if needs[1] else None
    db = empty(p.weight.shape[:1]) if needs[2] else None
    return df, dw, db


def _call(
    p: Projection,
    targets: Tensor | None,
    nats: Tensor | None,
    d: Tensor | None,
    scale: float,
    gradients: tuple[Tensor | None, ...],
) -> None:
    (N, H), V = p.features.shape, p.weight.shape[0]
    threads = 1 if 2 * N * H * V < _MIN_FLOP else torch.get_num_threads()
    fastest_kernels(_is_bf16(p)).project(
        threads, N, H, V, *map(address_of, (*p, targets, nats, d)), scale,
        *map(address_of, gradients),
    )  # fmt: skip


def _is_bf16(p: Projection) -> bool:
    return p.features.dtype == torch.bfloat16
