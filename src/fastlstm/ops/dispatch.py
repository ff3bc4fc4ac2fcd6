"""Which backend runs a call, and why not a faster one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from fastlstm.errors import KernelError, Setting, ShapeError, kind_of_value, nearest_hint
from fastlstm.ops.autograd import describe_kept
from fastlstm.ops.backends.aten import AtenBackend
from fastlstm.ops.backends.native import NativeBackend
from fastlstm.ops.backends.reference import ReferenceBackend
from fastlstm.ops.call import Backend, Kernel, LSTMCall, is_autocast
from fastlstm.ops.cell_options import CellOptions
from fastlstm.ops.left_alone import recurrent_modules
from fastlstm.system.fields import is_whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from fastlstm.ops.left_alone import LeftAlone

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
    if not isinstance(call, LSTMCall):
        raise KernelError(f"the call is {kind_of_value(call)}, expected an LSTMCall")
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
                f" ({chosen.why}); change that or leave out ",
                Setting("strict_kernels"),
            )
        return chosen
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals)
    raise KernelError(f"no backend can run LSTM {call}: {reasons}")


def _named(name: str) -> Backend:
    known = {backend.name: backend for backend in BACKENDS}
    if str(name) not in known:
        raise KernelError(
            f"no backend is called '{name}'{nearest_hint(name, known)}; there are"
            f" {', '.join(known)}"
        )
    return known[name]


@dataclass(frozen=True)
class LayerReport:
    """One line of the kernel report.

    Attributes:
        layer: the layer's number in the model, such as `"layer 0"`.
        call: what was asked; None for what is no LSTM over a sequence.
        backend: who runs it.
        kernel: what runs.
        is_fast: False for a path that `--strict-kernels` refuses.
        why: why not a faster one; empty when there is none.
        module: path of the module in the model; empty for the model itself.
    """

    layer: str
    call: LSTMCall | None
    backend: str
    kernel: str
    is_fast: bool
    why: str
    module: str = ""

    def __str__(self) -> str:
        line = f"{self.layer}: {self.backend}, {self.kernel}"
        return f"{line} ({self.why})" if self.why else line


class KernelReport(list[LayerReport]):
    """A list of reports that prints as a table."""

    def __str__(self) -> str:
        rows = [("layer", "module", "backend", "kernel", "why not faster")]
        rows += [(r.layer, r.module, r.backend, r.kernel, r.why) for r in self]
        columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
        widths = [max(map(len, column)) for column in columns]
        lines = (
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in zip(*columns, strict=True)
        )
        return "\n".join(lines) if self else "no recurrent layer"

    __repr__ = __str__


def explain(
    module: nn.Module,
    input: Tensor | None = None,
    *,
    T: int = 128,
    B: int = 32,
) -> KernelReport:
    """Says, per LSTM layer and direction of `module`, which kernel runs and why not a faster one.

    What `accelerate` has not touched is named too, with backend `"torch"`: an `nn.LSTM` that can be
    accelerated, subclasses of it, `nn.GRU`, `nn.RNN`, cells, quantized and TorchScript layers.

    Args:
        module: any module.
        input: its input, `(T, B)` tokens or `(T, B, I)`; only the first two sizes are used.
        T: steps, without an input.
        B: batch, without an input.

    Returns:
        One report per layer and direction, for the autocast and gradient mode in force here; a list
        that prints as a table.
    """
    if input is not None:
        if not isinstance(input, torch.Tensor) or input.dim() < 2:
            raise ShapeError(
                f"the input is {kind_of_value(input)}, expected a tensor (T, B) or (T, B, I)"
            )
        T, B = input.shape[0], input.shape[1]
    for name, size in (("T", T), ("B", B)):
        if not is_whole(size):
            raise ShapeError(f"{name} is {size!r}, expected a whole number")
    reports = KernelReport()
    layers = 0
    for path, child, left in recurrent_modules(module):
        if not isinstance(child, nn.LSTM):
            assert left is not None
            reports.append(_report_left(f"layer {layers}", path, None, left))
            layers += 1
            continue
        for index, call in enumerate(layer_calls(child, T, B, training=module.training)):
            layer, is_reverse = divmod(index, 2) if child.bidirectional else (index, 0)
            name = f"layer {layers + layer}" + (" reverse" if is_reverse else "")
            if left is None:
                reports.append(replace(_report(name, child, call), module=path))
            else:
                reports.append(_report_left(name, path, call, left))
        layers += child.num_layers
    return reports


def _report_left(name: str, path: str, call: LSTMCall | None, left: LeftAlone) -> LayerReport:
    return LayerReport(name, call, "torch", left.runs, is_fast=False, why=left.why, module=path)


def _report(name: str, lstm: nn.LSTM, call: LSTMCall) -> LayerReport:
    names = active_options(lstm)
    if names:
        return _report_options(name, lstm, call, names)
    is_torchs = type(lstm) is nn.LSTM
    reason = left_to_torch(lstm, call.dtype, call.device)
    if reason is not None and (is_torchs or getattr(lstm, "is_drop_in", False)):
        return LayerReport(name, call, "torch", "its own nn.LSTM", is_fast=False, why=reason)
    chosen = select(call, backend=getattr(lstm, "backend", None))
    if is_torchs:
        runs = AtenBackend().kernel(call)
        why = f"accelerate makes it {chosen.backend.name}, {chosen.kernel.name}"
        return LayerReport(name, call, "torch", f"nn.LSTM, {runs.name}", runs.is_fast, why)
    kernel = f"{chosen.kernel.name}{_kept(lstm, call, chosen)}"
    is_fast = chosen.kernel.is_fast
    return LayerReport(name, call, chosen.backend.name, kernel, is_fast, chosen.why)


def _report_options(name: str, lstm: nn.LSTM, call: LSTMCall, extras: list[str]) -> LayerReport:
    reason = left_to_reference(lstm, call.dtype, call.device)
    chosen = select(call, backend=BACKENDS[0].name if reason is None else BACKENDS[-1].name)
    kernel = f"{chosen.kernel.name} + {', '.join(extras)}"
    if lstm.layer_norm:
        kernel = kernel.replace("by lanes", "by units")  # its sums over lanes keep one order
    kernel += _kept(lstm, call, chosen)
    is_fast = chosen.kernel.is_fast
    return LayerReport(name, call, chosen.backend.name, kernel, is_fast, reason or chosen.why)


def _kept(lstm: nn.LSTM, call: LSTMCall, chosen: Selection) -> str:
    """What a layer with a stated budget keeps for backward, in words; empty without one."""
    max_activation_bytes: int | None = getattr(lstm, "max_activation_bytes", None)
    if max_activation_bytes is None or not call.requires_grad or chosen.backend is not BACKENDS[0]:
        return ""
    is_bf16, has_norm = call.dtype == torch.bfloat16, bool(getattr(lstm, "layer_norm", False))
    return f", {describe_kept(call.T, call.B, call.H, is_bf16, has_norm, max_activation_bytes)}"


def active_options(lstm: nn.LSTM) -> list[str]:
    """Returns what a layer computes in its present mode that torch's cell does not, in words."""
    options: CellOptions | None = getattr(lstm, "options", None)
    return [] if options is None else options.active(lstm.training)


def left_to_reference(lstm: nn.LSTM, dtype: torch.dtype, device: str) -> str | None:
    """Returns why the reference runs a layer with extras and not the native kernels, or None.

    Raises:
        KernelError: the layer forces a backend that can run neither.
    """
    native, reference = BACKENDS[0], BACKENDS[-1]
    reason = _native_refusal(dtype, device)
    forced = getattr(lstm, "backend", None)
    if forced is None:
        return reason
    if _named(forced) is reference:
        return f"backend '{reference.name}' is forced"
    if _named(forced) is not native:
        reason = "it knows torch's cell only"
    if reason is not None:
        raise KernelError(
            f"backend '{forced}' cannot run an LSTM with {', '.join(active_options(lstm))}"
            f" ({reason}); leave backend at None"
        )
    return None


def left_to_torch(lstm: nn.LSTM, dtype: torch.dtype, device: str) -> str | None:
    """Returns why `fastlstm.LSTM` leaves a call to torch's own forward pass, or None."""
    if lstm.proj_size > 0:
        return f"no kernel here projects its output, proj_size={lstm.proj_size}"
    if getattr(lstm, "backend", None) is not None:
        return None
    return _native_refusal(dtype, device)


def _native_refusal(dtype: torch.dtype, device: str) -> str | None:
    """Returns why the native kernels cannot compute in `dtype` on `device`, or None."""
    native = BACKENDS[0]
    reason = native.supports(LSTMCall(1, 1, 1, 1, dtype, device, requires_grad=False))
    return None if reason is None else f"{native.name}: {reason}"


def layer_calls(layer: nn.LSTM, T: int, B: int, *, training: bool = True) -> Iterator[LSTMCall]:
    """Yields the description of every layer's and direction's call on `(T, B, I)` here."""
    weight = layer.weight_ih_l0
    assert isinstance(weight, torch.Tensor)
    device, dtype = weight.device.type, weight.dtype
    if dtype != torch.float64 and is_autocast(device):
        dtype = torch.get_autocast_dtype(device)
    directions = 2 if layer.bidirectional else 1
    for index in range(layer.num_layers * directions):
        above = directions * (layer.proj_size or layer.hidden_size)
        yield LSTMCall(
            T=T,
            B=B,
            I=layer.input_size if index < directions else above,
            H=layer.hidden_size,
            dtype=dtype,
            device=device,
            requires_grad=training and torch.is_grad_enabled(),
            has_bias=layer.bias,
        )
