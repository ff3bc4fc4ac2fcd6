"""Recurrent modules that no kernel runs, with the reasons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from fastlstm.errors import UsageError, kind_of_value
from fastlstm.ops.call import LSTMCall
from fastlstm.ops.cell_options import TORCHS_CELL, CellOptions
from fastlstm.ops.registry import own_refusal
from fastlstm.ops.subclasses import why_not_beneath

_WORDS = ("LSTM", "GRU", "RNN")


class LeftAlone(NamedTuple):
    """Why `accelerate` leaves a module unchanged.

    Attributes:
        runs: what computes it, such as `"nn.GRU"`.
        why: the reason, and the remedy if there is one.
        backend: name for `explain`.
    """

    runs: str
    why: str
    backend: str = "torch"


def check_module(model: object) -> None:
    """Raises UsageError unless the model is an `nn.Module`."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is {kind_of_value(model)}, expected an nn.Module")


def recurrent_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, LeftAlone | None]]:
    """Yields every recurrent module with its path and the reason why it is left alone, or None.

    None stands for what `accelerate` changes and for fastlstm's layers. Modules inside a quantized
    or TorchScript layer are skipped.
    """
    check_module(model)
    inside: str | None = None
    for path, module in _named_modules(model):
        if inside is not None and path.startswith(inside):
            continue
        inside = None
        left = left_alone(module)
        if left is not None and not isinstance(module, nn.LSTM):
            inside = f"{path}." if path else ""
        if left is not None or isinstance(module, nn.LSTM) or hasattr(module, "kernel_report"):
            yield path, module, left


def _named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As torch's `named_modules`, with all layers of Keras models."""
    seen = set()
    for path, module in model.named_modules():
        for name, each in ((path, module), *_layers_of_keras(path, module)):
            if id(each) not in seen:
                seen.add(id(each))
                yield name, each


def _layers_of_keras(path: str, module: Any) -> Iterator[tuple[str, nn.Module]]:
    for layer in getattr(module, "_layers", ()) if hasattr(module, "_flatten_layers") else ():
        name = f"{path}.{layer.name}" if path else layer.name
        yield name, layer
        yield from _layers_of_keras(name, layer)


def left_alone(module: nn.Module) -> LeftAlone | None:
    """Returns why a recurrent module is left alone; None for other modules."""
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        name = str(module.original_name)
        if any(word in name for word in _WORDS):
            why = "TorchScript holds torch's operators only; accelerate the model it was made from"
            return LeftAlone(f"TorchScript {name}", why)
    elif isinstance(module, nn.LSTM):
        return _left_lstm(module)
    elif kind.__module__.startswith("torch.ao.nn"):
        if any(word in kind.__name__ for word in _WORDS):
            why = "no kernel here takes quantized weights; accelerate the float model instead"
            return LeftAlone(f"{kind.__module__}.{kind.__name__}", why)
    elif isinstance(module, nn.LSTMCell):
        why = "a cell computes one step per call; the kernels run whole sequences of an nn.LSTM"
        return LeftAlone(_name(kind), why)
    elif isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return LeftAlone(_name(kind), "the kernels compute LSTMs only")
    elif "keras.src.layers.rnn.rnn.RNN" in map(_full_name, kind.__mro__):
        return _left_to_keras(kind)
    return None


def _left_to_keras(kind: type) -> LeftAlone | None:
    """Compares names: Keras may not be installed."""
    if hasattr(kind, "kernel_report"):
        return None
    if _full_name(kind) == "keras.src.layers.rnn.lstm.LSTM":
        why = "fastlstm.keras.accelerate(model) makes it fastlstm.keras.LSTM"
    elif "keras.src.layers.rnn.lstm.LSTM" in map(_full_name, kind.__mro__):
        why = f"{kind.__name__} is a subclass of keras.layers.LSTM, what it computes may be its own"
    else:
        why = "the kernels run keras.layers.LSTM only"
    prefix = "keras.layers." if kind.__module__.startswith("keras.") else ""
    return LeftAlone(f"{prefix}{kind.__name__}", why, backend="keras")


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


def _left_lstm(lstm: nn.LSTM) -> LeftAlone | None:
    if hasattr(type(lstm), "is_drop_in") or (why := why_not_beneath(lstm)) is None:
        return None
    kind = type(lstm)
    return LeftAlone("nn.LSTM" if kind is nn.LSTM else f"forward pass of {kind.__name__}", why)


def _name(kind: type) -> str:
    return f"nn.{kind.__name__}" if kind.__module__.startswith("torch.nn") else kind.__name__


def left_to_torch(lstm: nn.LSTM, call: LSTMCall) -> str | None:
    """Returns why `fastlstm.LSTM` leaves a call to torch's own forward pass, or None."""
    if lstm.proj_size > 0:
        return f"no kernel here projects its output, proj_size={lstm.proj_size}"
    if call.options != TORCHS_CELL or getattr(lstm, "backend", None) is not None:
        return None
    return own_refusal(call)


def options_of(lstm: nn.LSTM) -> CellOptions:
    """Returns the options of a layer in its mode; recurrent dropout acts in training only."""
    options: CellOptions = getattr(lstm, "options", TORCHS_CELL)
    return options if lstm.training else options.in_evaluation()


def active_transform() -> str | None:
    """Returns why an active transform needs torch's operators, or None."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return "torch.jit.trace records torch's operators only"
    if torch.compiler.is_compiling() and torch.onnx.is_in_onnx_export():
        return "torch.onnx.export translates torch's operators only"
    if torch._C._are_functorch_transforms_active():
        return "torch.func transforms torch's operators only"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode derivatives see torch's operators only"
    return None
