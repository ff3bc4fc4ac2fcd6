"""The small kernels of `training.cu`: dropout, cross-entropy, and the end of a training step."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fastlstm.errors import KernelError
from fastlstm.ops.autograd import is_batched
from fastlstm.ops.cuda.module import CudaKernel, KernelArguments, pointers
from fastlstm.ops.custom_op import is_traced

_ROWS = 8
"""Rows of a block, one for each warp."""
_THREADS = 256
_PACK = 8
"""Values that a thread reads at once."""
_MASKED_BLOCKS = 1024
"""Enough for every multiprocessor of a large GPU."""


class _Masked(KernelArguments):
    _fields_ = (*pointers("x mask out"), *((n, ctypes.c_int) for n in ("T", "num", "blocks")))


class _CrossEntropy(KernelArguments):
    _fields_ = (
        *pointers("logits targets nats lse scale dlogits"),
        ("N", ctypes.c_longlong),
        ("V", ctypes.c_int),
    )


class _StepEnd(KernelArguments):
    _fields_ = (
        *pointers("loss norms scalars scale base found rates state inverse is_bad average resets"),
        ("max_norm", ctypes.c_float),
        ("num", ctypes.c_int),
        ("num_rates", ctypes.c_int),
    )


@lru_cache
def refusal(device: int) -> str | None:
    """Returns why these kernels cannot run on a GPU, or None; compiles them once."""
    try:
        _kernel("end_step", torch.bfloat16, device)
    except KernelError as error:
        return str(error)
    return None


def can_mask(x: Tensor, mask: Tensor) -> bool:
    """Returns whether `masked` takes `(T, …)` values and a mask `(1, …)`."""
    return (
        x.is_cuda
        and not is_traced(x, mask)
        and not is_batched(x)
        and x.dtype == mask.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and mask.shape == (1, *x.shape[1:])
        and mask.numel() > 0
        and mask.numel() % _PACK == 0
        and all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (x, mask))
        and refusal(x.get_device()) is None
    )


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """Returns `x * mask` of tensors that `can_mask`, differentiable with respect to `x`."""
    product: Tensor = _MaskedValues.apply(x, mask)  # type: ignore[no-untyped-call]
    return product


class _MaskedValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        out, num = torch.empty_like(x), mask.numel() // _PACK
        blocks = -(-num // _THREADS)
        arguments = _Masked(x=x, mask=mask, out=out, T=len(x), num=num, blocks=blocks)
        kernel = _kernel("masked", x.dtype, x.get_device())
        kernel.launch(blocks * min(len(x), -(-_MASKED_BLOCKS // blocks)), arguments)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (mask,), dy = ctx.saved_tensors, dy.contiguous()
        is_simple = not torch.is_grad_enabled() and can_mask(dy, mask)
        return masked(dy, mask) if is_simple else dy * mask, None


def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `-log softmax(logits)[target]` of every row, in nats, and the log of its sum.

    Args:
        logits: `(N, V)`, bf16 or fp16.
        targets: `(N,)` int64; a target outside of `[0, V)` gives NaN.

    Returns:
        `(N,)` float32 each.
    """
    nats, lse = torch.empty((2, len(logits)), dtype=torch.float32, device=logits.device)
    _run_cross_entropy("forward", logits, targets, nats=nats, lse=lse)
    return nats, lse


def cross_entropy_gradient(
    logits: Tensor, targets: Tensor, lse: Tensor, scale: Tensor | None = None
) -> Tensor:
    """Returns the gradient of the sum of `cross_entropy` times a float32 scalar, `(N, V)`."""
    dlogits = torch.empty_like(logits)
    _run_cross_entropy("backward", logits, targets, lse=lse, scale=scale, dlogits=dlogits)
    return dlogits


def _run_cross_entropy(name: str, logits: Tensor, targets: Tensor, **others: Tensor | None) -> None:
    N, V = logits.shape
    arguments = _CrossEntropy(logits=logits, targets=targets, N=N, V=V, **others)
    kernel = _kernel(f"cross_entropy_{name}", logits.dtype, logits.device.index)
    kernel.launch(-(-N // _ROWS), arguments)


class StepEnd:
    """What a step with `num` gradients decides from its loss and their norms, by one kernel; `base`
    are the learning rates at factor 1.

    Attributes:
        found: `(2 + num,)`: loss, norm of the gradient, norm of each.
        rates: `(len(base),)` learning rates of this step.
        is_good: 1 after a step that was finite, and before the first.
        inverse: what gradients are divided by: clipping and the loss scale.
        is_bad: 1 where nothing may change.
        average: weight of the new values in an average.
        resets: bool, whether the carried state is to be zero.
    """

    def __init__(self, num: int, base: list[float], device: torch.device) -> None:
        self.found = torch.zeros(2 + num, device=device)
        self.rates = torch.zeros(len(base), device=device)
        self.is_good = torch.ones((), device=device)
        self.inverse, self.is_bad, self.average = torch.zeros(3, device=device).unbind()
        self.resets = torch.zeros((), dtype=torch.bool, device=device)
        self._base, self._num = torch.tensor(base, device=device), num
        self._kernel = None
        number = self.found.get_device()
        if device.type == "cuda" and refusal(number) is None:
            self._kernel = _kernel("end_step", torch.bfloat16, number)

    def decide(
        self, loss: Tensor, norms: Tensor, scalars: Tensor, scale: Tensor | None, max_norm: float
    ) -> None:
        """Sets the attributes.

        Args:
            loss: float32 scalar.
            norms: `(num,)` of the gradients, times the loss scale.
            scalars: factor of the learning rates, and that factor after a bad step; weight of an
                average, and that weight after a bad step.
            scale: loss scale, or None.
            max_norm: norm to which the gradient is clipped.
        """
        if self._kernel is not None:
            arguments = _StepEnd(
                loss=loss, norms=norms, scalars=scalars, scale=scale, base=self._base,
                found=self.found, rates=self.rates, state=self.is_good, inverse=self.inverse,
                is_bad=self.is_bad, average=self.average, resets=self.resets, max_norm=max_norm,
                num=self._num, num_rates=len(self._base),
            )  # fmt: skip
            self._kernel.launch(1, arguments)
            return
        norms = norms if scale is None else norms / scale
        norm = torch.linalg.vector_norm(norms)
        is_good = loss.isfinite() & norm.isfinite()
        clip = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        self.inverse.copy_(1.0 / (clip if scale is None else clip / scale))
        factor, weight = torch.where(self.is_good > 0, scalars[::2], scalars[1::2])
        torch.mul(self._base, factor, out=self.rates)
        self.is_good.copy_(is_good)
        self.is_bad.copy_(is_good.logical_not())
        self.average.copy_(weight * is_good)
        self.resets.copy_((loss if scale is not None else loss + norm).isfinite().logical_not())
        self.found.copy_(torch.cat([loss[None], norm[None], norms]))


class _Muon(KernelArguments):
    _fields_ = (
        *pointers("weight gradient momentum running update direction partial inverse is_bad rate"),
        *((n, ctypes.c_float) for n in ("decay_momentum", "scale", "weight_decay", "safety")),
        *((n, ctypes.c_longlong) for n in ("num", "row_stride", "column_stride")),
        ("K", ctypes.c_int),
    )


class MuonStep:
    """The elementwise parts of one update by Muon, of a float32 weight `(4H, K)`.

    `begin` fills `update` `(4, H, K)` bf16, which is orthogonalised; the momentum changes when the
    update ends. The gradient is divided by the scalar `inverse`, each block by its norm times
    `safety`. Nothing changes if `is_bad` is 1. `decay_momentum` is the decay of the running
    gradient; weight decay is decoupled.
    """

    def __init__(
        self, weight: Tensor, update: Tensor, gradient: Tensor, momentum: Tensor, inverse: Tensor,
        is_bad: Tensor, rate: Tensor, decay_momentum: float, weight_decay: float, safety: float,
    ) -> None:  # fmt: skip
        self._running, H = torch.empty_like(weight), weight.shape[0] // 4
        num, K = H * weight.shape[1], weight.shape[1]
        self._blocks = 4 * min(64, -(-num // 1024))
        self._partial = torch.empty(self._blocks, device=weight.device)
        self._fields = {
            "weight": weight, "gradient": gradient, "momentum": momentum, "running": self._running,
            "update": update, "partial": self._partial, "inverse": inverse, "is_bad": is_bad,
            "rate": rate, "decay_momentum": decay_momentum, "weight_decay": weight_decay,
            "safety": safety, "num": num, "K": K,
        }  # fmt: skip

    def begin(self) -> None:
        """Forms the update, each block divided by its norm."""
        self._launch("muon_begin")
        self._launch("muon_normalise")

    def end(self, direction: Tensor, scale: float) -> None:
        """Takes the step in a direction `(4, H, K)` bf16, `scale` times as long."""
        gate, *strides = direction.stride()
        assert gate == direction[0].numel()
        self._launch(
            "muon_end", direction=direction, scale=scale, row_stride=strides[0],
            column_stride=strides[1],
        )  # fmt: skip

    def _launch(self, entry: str, **more: object) -> None:
        device = self._running.get_device()
        _kernel(entry, torch.bfloat16, device).launch(self._blocks, _Muon(**self._fields, **more))


@lru_cache
def _kernel(entry: str, dtype: torch.dtype, device: int) -> CudaKernel:
    macros = {"DTYPE": int(dtype == torch.float16)}
    threads = 32 if entry == "end_step" else _THREADS
    return CudaKernel("training", entry, macros, device, threads)
