"""Which kernels a model runs on, and why not faster ones: `explain`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastlstm.errors import ShapeError, kind_of_value
from fastlstm.ops.call import LSTMCall, compute_dtype
from fastlstm.ops.left_alone import left_to_torch, options_of, recurrent_modules
from fastlstm.ops.registry import select
from fastlstm.system.fields import is_whole


@dataclass(frozen=True)
class LayerReport:
    """One line of the kernel report.

    Attributes:
        layer: the layer's number in the model, such as `"layer 0"`.
        call: description of the call; None for a module that is no LSTM over a sequence.
        backend: name of the backend.
        kernel: name of the kernel.
        is_fast: False for a path that `--strict-kernels` refuses.
        why: why no faster kernel runs; empty if there is none.
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
    module: nn.Module, input: Tensor | None = None, *, T: int = 128, B: int = 32
) -> KernelReport:
    """Reports for each LSTM layer and direction which kernel runs, and why no faster one.

    Modules that `accelerate` has not changed have the backend `"torch"`: an `nn.LSTM` that can be
    accelerated, subclasses, `nn.GRU`, `nn.RNN`, cells, quantized and TorchScript layers. Recurrent
    layers that Keras computes have the backend `"keras"`.

    Args:
        module: any module.
        input: an input of the model: `(T, B)` tokens, `(T, B, I)`, with `batch_first` in the first
            LSTM `(B, T)` or `(B, T, I)`, of an LSTM itself also `(T, I)`. Only T and B are used.
        T: steps, without an input.
        B: batch, without an input.

    Returns:
        One report per layer and direction, for the current autocast and gradient mode; the list
        prints as a table.

    Raises:
        ShapeError: an input without T and B, or sizes that are no whole numbers from 1.
    """
    if input is not None:
        if not isinstance(input, torch.Tensor) or input.dim() < 2:
            raise ShapeError(
                f"the input is {kind_of_value(input)}, expected a tensor (T, B) or (T, B, I)"
            )
        T, B = _steps_and_batch(module, input)
    for name, size in (("T", T), ("B", B)):
        if not is_whole(size) or size < 1:
            raise ShapeError(f"{name} is {size!r}, expected a whole number, 1 or more")
    reports = KernelReport()
    layers = 0
    for path, child, left in recurrent_modules(module):
        calls: list[LSTMCall | None] = [None]
        directions = 1
        if isinstance(child, nn.LSTM):
            calls = list(layer_calls(child, T, B, training=module.training))
            directions = 2 if child.bidirectional else 1
        for index, call in enumerate(calls):
            name = f"layer {layers + index // directions}{' reverse' * (index % directions)}"
            report_of_keras: Any = getattr(child, "kernel_report", None)
            if report_of_keras is not None:
                reports.append(report_of_keras(name, T, B, path))
            elif left is not None:
                who = left.backend, left.runs
                reports.append(LayerReport(name, call, *who, False, left.why, path))
            elif isinstance(child, nn.LSTM) and call is not None:
                reports.append(_report(name, child, call, path))
        layers += len(calls) // directions
    return reports


def _steps_and_batch(module: nn.Module, input: Tensor) -> tuple[int, int]:
    """Returns T and B of an input of a model, with the layout of its first LSTM."""
    lstm = next((m for m in module.modules() if isinstance(m, nn.LSTM)), None)
    if lstm is module and input.dim() == 2:
        return input.shape[0], 1
    T, B = input.shape[:2]
    return (B, T) if lstm is not None and lstm.batch_first else (T, B)


def _report(name: str, lstm: nn.LSTM, call: LSTMCall, path: str) -> LayerReport:
    is_torchs = not hasattr(lstm, "is_drop_in")
    reason = left_to_torch(lstm, call)
    if reason is not None and getattr(lstm, "is_drop_in", True):
        return LayerReport(name, call, "torch", "torch.nn.LSTM", False, reason, path)
    selection = select(call, backend=getattr(lstm, "backend", None))
    backend, kernel, why = selection.backend.name, selection.kernel, selection.why
    if is_torchs:
        why = f"accelerate makes it {backend}, {kernel.name}"
        kernel = select(call, backend="aten").kernel
        backend, kernel = "torch", kernel._replace(name=f"nn.LSTM, {kernel.name}")
    return LayerReport(name, call, backend, kernel.name, kernel.is_fast, why, path)


def layer_calls(layer: nn.LSTM, T: int, B: int, *, training: bool = True) -> Iterator[LSTMCall]:
    """Yields the call of every layer and direction on `(T, B, I)`."""
    weight = layer.weight_ih_l0
    assert isinstance(weight, torch.Tensor)
    directions = 2 if layer.bidirectional else 1
    for index in range(layer.num_layers * directions):
        above = directions * (layer.proj_size or layer.hidden_size)
        yield LSTMCall(
            T=T,
            B=B,
            I=layer.input_size if index < directions else above,
            H=layer.hidden_size,
            dtype=compute_dtype(weight),
            device=weight.device.type,
            requires_grad=training and torch.is_grad_enabled(),
            has_bias=layer.bias,
            options=options_of(layer),
            max_activation_bytes=getattr(layer, "max_activation_bytes", None),
            directions=directions,
        )
