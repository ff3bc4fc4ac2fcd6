"""Output projection and cross-entropy in row chunks: `(T*B, V)` logits never exist at once.

A native kernel computes it on the CPU, torch's products for other devices and dtypes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastlstm.errors import KernelError, ShapeError
from fastlstm.ops.call import compute_dtype, torchs_dtype
from fastlstm.ops.cuda.training import cross_entropy, cross_entropy_gradient, refusal
from fastlstm.ops.projection import (
    Projection,
    gradients_of,
    is_native,
    logits_gradient,
    nats_and_gradients,
    nats_of,
)

CHUNK_ELEMENTS = 1 << 22
"""Logits per chunk, 16 MB in float32: large enough for efficient GEMMs."""


def projected_cross_entropy(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    chunk_rows: int | None = None,
) -> Tensor:
    """Sum over rows of `-log softmax(features @ weight^T + bias)[target]`, in nats.

    Args:
        features: `(N, H)`.
        weight: `(V, H)`.
        bias: `(V,)` or None.
        targets: `(N,)` int64 in `[0, V)`.
        chunk_rows: rows per chunk; by default about `CHUNK_ELEMENTS` logits.

    Returns:
        A scalar, float32 (float64 for float64 features).

    Raises:
        ShapeError: shapes or dtypes that do not fit together.
        KernelError: in the backward pass, with create_graph=True.

    Numerics:
        Under autocast the GEMMs run in the autocast dtype, softmax and sums in float32. The
        gradient of `weight` is summed over chunks in float32.

    Cost:
        `2 N H V` forward, `6 N H V` with a gradient, as plain cross-entropy. With several chunks
        forward does all of it and backward only scales. Memory: one chunk.
    """
    plan = _Plan.of(features, weight, bias, targets, chunk_rows)
    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (features, weight, bias)
    ):
        loss: Tensor = _ProjectedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            features, weight, bias, targets, plan
        )
        return loss
    return _row_nats(features, weight, bias, targets, plan).sum()


@torch.no_grad()
def projected_nats(
    features: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
) -> Tensor:
    """As `projected_cross_entropy`, but one value per row, `(N,)`, without a gradient."""
    plan = _Plan.of(features, weight, bias, targets, None)
    return _row_nats(features, weight, bias, targets, plan)


@dataclass(frozen=True)
class _Plan:
    """Rows per chunk, dtype of the GEMMs, dtype of softmax and sums, and what computes the loss:
    the native kernel of a CPU, the fused softmax of a GPU, or torch's operators."""

    rows: int
    gemm: torch.dtype
    wide: torch.dtype
    is_native: bool
    is_fused: bool

    @staticmethod
    def of(
        features: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rows: int | None
    ) -> _Plan:
        """Checks the arguments and chooses; `rows` of a chunk, or None."""
        _check(features, weight, bias, targets)
        gemm = compute_dtype(features)
        wide = torch.float64 if gemm == torch.float64 else torch.float32
        native = rows is None and is_native(features, weight, bias, gemm)
        gemm = gemm if native else torchs_dtype(features)
        if rows is None:
            rows = max(64, CHUNK_ELEMENTS // max(1, weight.shape[0]))
        if rows < 1:
            raise ShapeError(f"chunk_rows is {rows}, expected at least 1")
        num_chunks = -(-max(1, targets.numel()) // rows)
        fused = features.is_cuda and gemm in (torch.bfloat16, torch.float16)
        if fused:
            fused = not torch.compiler.is_compiling() and refusal(features.get_device()) is None
        return _Plan(-(-max(1, targets.numel()) // num_chunks), gemm, wide, native, fused)


def _row_nats(
    features: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, plan: _Plan
) -> Tensor:
    """Returns the loss of every row, `(N,)` in `plan.wide`."""
    if plan.is_native:
        return nats_of(Projection.of(features, weight, bias, plan.gemm), targets.contiguous())
    with torch.autocast(features.device.type, enabled=False):
        weight_t = weight.to(plan.gemm).t()
        bias = None if bias is None else bias.to(plan.gemm)
        rows = []
        for start in range(0, targets.numel(), plan.rows):
            stop = start + plan.rows
            f, target = features[start:stop].to(plan.gemm), targets[start:stop]
            rows.append(_chunk_log_probs(f, weight_t, bias, target, plan)[1])
        return torch.cat(rows)


def _chunk_log_probs(
    f: Tensor, weight_t: Tensor, bias: Tensor | None, target: Tensor, plan: _Plan
) -> tuple[Tensor, Tensor]:
    """Returns the log probabilities `(n, V)` of one chunk and the nats `(n,)` of its targets."""
    log_p = torch.log_softmax(_logits(f, weight_t, bias), dim=1, dtype=plan.wide)
    return log_p, log_p.gather(1, target.unsqueeze(1)).squeeze(1).neg()


def _logits(f: Tensor, weight_t: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(f, weight_t) if bias is None else torch.addmm(bias, f, weight_t)


class _ProjectedCrossEntropy(torch.autograd.Function):
    """Saves the gradient of one chunk's logits; with more chunks forward forms all gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        plan: _Plan,
    ) -> Tensor:
        ctx.dtypes = (features.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.is_native, ctx.is_whole = plan.is_native, targets.numel() <= plan.rows
        needs = ctx.needs_input_grad[:3]
        saved: tuple[Tensor | None, ...]
        if plan.is_native:
            p, targets = Projection.of(features, weight, bias, plan.gemm), targets.contiguous()
            if ctx.is_whole:
                d = logits_gradient(p)
                nats, saved = nats_of(p, targets, d), (*p, d)
            else:
                nats, saved = nats_and_gradients(p, targets, needs)
            total = nats.sum()
        else:
            with torch.autocast(features.device.type, enabled=False):
                w = weight.to(plan.gemm)
                b = None if bias is None else bias.to(plan.gemm)
                if ctx.is_whole:
                    f = features.to(plan.gemm)
                    if plan.is_fused:
                        logits = _logits(f, w.t(), b)
                        nats, lse = cross_entropy(logits, targets.contiguous())
                        total, saved = nats.sum(), (f, w, logits, lse)
                    else:
                        d, total = _chunk_gradient(f, w, b, targets, plan)
                        saved = (f, w, d)
                else:
                    total, saved = _chunked_gradients(features, w, b, targets, plan, needs)
        ctx.save_for_backward(targets, *saved)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = grads
        if torch.is_grad_enabled():
            raise KernelError(
                "create_graph=True asks for the derivative of a gradient, which this loss does not"
                " have; leave it out, or take torch.nn.functional.cross_entropy of the logits"
            )
        (targets, *saved), needs = ctx.saved_tensors, ctx.needs_input_grad[:3]
        gradients: tuple[Tensor | None, ...]
        if not ctx.is_whole:
            gradients = tuple(None if g is None else g * scale for g in saved)
        elif ctx.is_native:
            *p, d = saved
            gradients = gradients_of(Projection(*p), d, float(scale), needs)
        else:
            f, w, d, *sums = saved
            if sums:
                d = wide = cross_entropy_gradient(d, targets.contiguous(), sums[0], scale.float())
            else:
                wide = d * scale  # smaller than the resulting gradients if V < H
                d = wide.to(w.dtype)
            df, dw = torch.mm(d, w) if needs[0] else None, torch.mm(d.t(), f) if needs[1] else None
            db = wide.sum(0, dtype=torch.promote_types(wide.dtype, torch.float32))
            gradients = (df, dw, db if needs[2] else None)
        pairs = zip(gradients, ctx.dtypes, strict=True)
        return (*(None if g is None else g.to(dtype) for g, dtype in pairs), None, None)


def _chunked_gradients(
    features: Tensor,
    w: Tensor,
    b: Tensor | None,
    targets: Tensor,
    plan: _Plan,
    needs: tuple[bool, ...],
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Returns the loss, and the gradients of features, weight and bias, chunk by chunk."""
    df = torch.empty_like(features) if needs[0] else None
    dw = torch.zeros_like(w, dtype=plan.wide) if needs[1] else None
    db = torch.zeros_like(b, dtype=plan.wide) if needs[2] and b is not None else None
    total = features.new_zeros((), dtype=plan.wide)
    for start in range(0, targets.numel(), plan.rows):
        rows = slice(start, start + plan.rows)
        f = features[rows].to(plan.gemm)
        d, nats = _chunk_gradient(f, w, b, targets[rows], plan)
        total += nats
        if db is not None:
            db += d.sum(0, dtype=plan.wide)
        d = d.to(plan.gemm)
        if df is not None and df.dtype == d.dtype:
            torch.mm(d, w, out=df[rows])
        elif df is not None:
            df[rows] = torch.mm(d, w)
        if dw is not None and dw.dtype == f.dtype:
            dw.addmm_(d.t(), f)
        elif dw is not None:
            dw += torch.mm(d.t(), f)
    return total, (df, dw, db)


def _chunk_gradient(
    f: Tensor, w: Tensor, b: Tensor | None, target: Tensor, plan: _Plan
) -> tuple[Tensor, Tensor]:
    """Returns the gradient of one chunk's logits `(n, V)`, and its loss."""
    if plan.is_fused:
        logits, target = _logits(f, w.t(), b), target.contiguous()
        row_nats, lse = cross_entropy(logits, target)
        return cross_entropy_gradient(logits, target, lse), row_nats.sum()
    log_p, nats = _chunk_log_probs(f, w.t(), b, target, plan)
    d = log_p.exp_()
    d.scatter_add_(1, target.unsqueeze(1), d.new_full((target.numel(), 1), -1.0))
    return d, nats.sum()


def _check(features: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> None:
    if features.dim() != 2 or weight.dim() != 2 or features.shape[1] != weight.shape[1]:
        raise ShapeError(
            f"features {tuple(features.shape)} and weight {tuple(weight.shape)} do not fit; pass"
            " features (N, H) and weight (V, H)"
        )
    if targets.shape != features.shape[:1] or targets.dtype != torch.int64:
        raise ShapeError(
            f"targets are {targets.dtype} {tuple(targets.shape)}, expected int64"
            f" ({features.shape[0]},), one per row of features"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"bias has shape {tuple(bias.shape)}, expected ({weight.shape[0]},)")
    is_traced = torch.compiler.is_compiling()  # a trace has no values, and torch checks them later
    if targets.device.type == "cpu" and targets.numel() > 0 and not is_traced:
        low, high = (int(t) for t in targets.aminmax())
        if not 0 <= low <= high < weight.shape[0]:
            raise ShapeError(
                f"targets are {low} to {high}, expected 0 to {weight.shape[0] - 1}: rows of weight"
            )
