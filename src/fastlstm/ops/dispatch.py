"""Which backend runs a call, and why not a faster one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from fastlstm.errors import KernelError, nearest_hint
from fastlstm.ops.backends.aten import AtenBackend
from fastlstm.ops.backends.native import NativeBackend
from fastlstm.ops.backends.reference import ReferenceBackend
from fastlstm.ops.call import Backend, Kernel, LSTMCall

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

BACKENDS: tuple[Backend, ...] = (NativeBackend(), AtenBackend(), ReferenceBackend())
"""Fastest first; the reference, last, runs everything."""


@dataclass(frozen=True)
class Selection:
    """What `select` chose.

    Attributes:
        backend: the one that runs the call.
        kernel: what it will run.
        refusals: `(backend name, reason)` of every faster backend that could not.
    """

    backend: Backend
    kernel: Kernel
    refusals: tuple[tuple[str, str], ...] = ()

    @property
    def why(self) -> str:
        """Why not something faster; empty when nothing is."""
        reasons = [f"{name}: {reason}" for name, reason in self.refusals]
        return "; ".join([*reasons, self.kernel.why] if self.kernel.why else reasons)


def select(call: LSTMCall, *, backend: str | None = None, strict: bool = False) -> Selection:
    """Chooses the first backend, fastest first, that supports `call`.

    Args:
        call: the description.
        backend: only this one may run.
        strict: a slow path is an error.

    Raises:
        KernelError: an unknown backend, one that cannot run the call, or a slow path with `strict`.
    """
    candidates = BACKENDS if backend is None else (_named(backend),)
    refusals = []
    for candidate in candidates:
        reason = candidate.supports(call)
        if reason is not None:
            refusals.append((candidate.name, reason))
            continue
        chosen = Selection(candidate, candidate.kernel(call), tuple(refusals))
        if strict and not chosen.kernel.is_fast:
            raise KernelError(
                f"LSTM {call} would run on a slow path, {candidate.name}: {chosen.kernel.name}"
                f" ({chosen.why}); change that or leave out --strict-kernels"
            )
        return chosen
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals)
    raise KernelError(f"no backend can run LSTM {call}: {reasons}")


def _named(name: str) -> Backend:
    known = {backend.name: backend for backend in BACKENDS}
    if name not in known:
        raise KernelError(
            f"no backend is called '{name}'{nearest_hint(name, known)}; there are"
            f" {', '.join(known)}"
        )
    return known[name]


@dataclass(frozen=True)
class LayerReport:
    """One line of the kernel report.

    Attributes:
        layer: the module's name, such as `"layer 0"`.
        call: what was asked.
        backend: who runs it.
        kernel: what runs.
        is_fast: False for a path that `--strict-kernels` refuses.
        why: why not a faster one; empty when there is none.
    """

    layer: str
    call: LSTMCall
    backend: str
    kernel: str
    is_fast: bool
    why: str

    def __str__(self) -> str:
        line = f"{self.layer}: {self.backend}, {self.kernel}"
        return f"{line} ({self.why})" if self.why else line


def explain(
    module: nn.Module,
    input: Tensor | None = None,
    *,
    T: int = 128,
    B: int = 32,
) -> list[LayerReport]:
    """Says, per LSTM layer of `module`, which kernel runs and why not a faster one.

    Args:
        module: any module holding `nn.LSTM`s of one layer and one direction.
        input: its input, `(T, B)` tokens or `(T, B, I)`; only the first two sizes are used.
        T: steps, without an input.
        B: batch, without an input.

    Returns:
        One report per layer, for the autocast and gradient mode in force here.
    """
    if input is not None:
        T, B = input.shape[0], input.shape[1]
    reports = []
    for index, layer in enumerate(_layers(module)):
        call = layer_call(layer, T, B, training=module.training)
        chosen = select(call, backend=getattr(layer, "backend", None))
        reports.append(
            LayerReport(
                layer=f"layer {index}",
                call=call,
                backend=chosen.backend.name,
                kernel=chosen.kernel.name,
                is_fast=chosen.kernel.is_fast,
                why=chosen.why,
            )
        )
    return reports


def layer_call(layer: nn.LSTM, T: int, B: int, *, training: bool = True) -> LSTMCall:
    """Returns the description of the call that `layer` makes on `(T, B, I)` here."""
    weight = layer.weight_ih_l0
    assert isinstance(weight, torch.Tensor)
    device, dtype = weight.device.type, weight.dtype
    if dtype != torch.float64 and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    return LSTMCall(
        T=T,
        B=B,
        I=layer.input_size,
        H=layer.hidden_size,
        dtype=dtype,
        device=device,
        requires_grad=training and torch.is_grad_enabled(),
        has_bias=layer.bias,
    )


def _layers(module: nn.Module) -> Iterator[nn.LSTM]:
    for child in module.modules():
        if isinstance(child, nn.LSTM):
            yield child
