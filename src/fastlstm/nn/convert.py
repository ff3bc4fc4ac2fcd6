"""`accelerate` turns the `nn.LSTM`s of a model into `fastlstm.LSTM`s, `restore` turns them back.

`freeze` makes them trust torch's count of weight changes, `thaw` undoes it.
"""

from __future__ import annotations

import warnings
from typing import TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize

from fastlstm.errors import UsageError
from fastlstm.nn.lstm import LSTM, check_max_activation_bytes
from fastlstm.nn.subclasses import accelerated, change_class, original
from fastlstm.ops import packed_weights
from fastlstm.ops.cell_options import TORCHS_CELL
from fastlstm.ops.explain import layer_calls
from fastlstm.ops.left_alone import check_module, left_to_torch, recurrent_modules
from fastlstm.ops.subclasses import is_of_fsdp

Module = TypeVar("Module", bound=nn.Module)

_OWN_FIELDS = (
    *("strict", "backend", "_options", "_prepared", "_last_shape", "max_activation_bytes"),
    "weight_hook",
)
"""Attributes of an `LSTM` instance that an `nn.LSTM` lacks."""


def accelerate(model: Module, *, max_activation_bytes: int | None = None) -> Module:
    """Turns every `nn.LSTM` of a model into a `fastlstm.LSTM`, in place.

    The layers stay the same objects: parameters, hooks, references and training state are kept.
    `restore` undoes it.

    A subclass of `nn.LSTM`, parametrized or not, stays an instance of its class; the kernels run
    its calls of `super().forward()`. It is left alone if its forward pass has no such call, if it
    defines a name of `LSTM` or a step of `nn.LSTM`'s forward pass, or if a method uses such a name
    or `type(self)`.

    Other recurrent modules stay: `nn.GRU`, `nn.RNN`, cells, quantized and TorchScript layers. One
    UserWarning names all that is left alone, and layers that torch computes all the same (float64,
    `proj_size`), with the reasons; `explain(model)` reports them with the backend `"torch"`.

    Args:
        model: any module.
        max_activation_bytes: as in `LSTM`, for every layer that this call changes.

    Returns:
        The model.

    Raises:
        UsageError: the model is no `nn.Module`.
        ConfigError: `max_activation_bytes` is no number of bytes.

    Warns:
        UserWarning: layers that torch computes, or a model without any LSTM.
    """
    check_max_activation_bytes(max_activation_bytes)
    modules = list(recurrent_modules(model))
    for _, module, left_alone in modules:
        if left_alone is None and isinstance(module, nn.LSTM) and not isinstance(module, LSTM):
            change_class(module, accelerated)
            if max_activation_bytes is not None:
                module.max_activation_bytes = max_activation_bytes
    left = [_named(path, f"{left.runs}: {left.why}") for path, _, left in modules if left]
    replaced = [
        _named(path, why) for path, module, _ in modules if (why := _torchs(module)) is not None
    ]
    texts = ["left to torch: " + "; ".join(left)] if left else []
    if replaced:
        texts.append("replaced, but torch computes: " + "; ".join(replaced))
    if texts:
        warnings.warn(f"accelerate {'; '.join(texts)}", stacklevel=2)
    elif not modules:
        warnings.warn(f"accelerate found no nn.LSTM in {type(model).__name__}", stacklevel=2)
    return model


def _torchs(module: nn.Module) -> str | None:
    """Returns why torch computes an accelerated layer, or None; on a GPU autocast decides it."""
    if not (isinstance(module, LSTM) and module.is_drop_in):
        return None
    call = next(layer_calls(module, T=1, B=1))
    return left_to_torch(module, call) if call.device == "cpu" else None


def _named(path: str, why: str) -> str:
    return f"{repr(path) if path else 'the model'} ({why})"


def restore(model: Module) -> Module:
    """Turns every `fastlstm.LSTM` of a model back into torch's `nn.LSTM`, in place.

    Subclasses of `nn.LSTM` that `accelerate` changed get their class back. The layers stay the same
    objects: parameters, hooks, training state, dtype and device are kept. `strict`, `backend` and
    `max_activation_bytes` are dropped. Restore a model before you quantize or script it, or pickle
    it for a machine without fastlstm.

    Args:
        model: any module.

    Returns:
        The model.

    Raises:
        UsageError: the model is no `nn.Module`, or it has a layer that torch cannot compute (layer
            norm, zoneout, …) or of a subclass of `fastlstm.LSTM`; names the layer, changes nothing.
    """
    check_module(model)
    layers = {path: m for path, m in model.named_modules() if isinstance(m, LSTM)}
    reasons = {path: why for path, m in layers.items() if (why := _why_not(m)) is not None}
    if reasons:
        names = "; ".join(f"{path or 'the model'} ({why})" for path, why in reasons.items())
        raise UsageError(f"restore cannot make an nn.LSTM of {names}")
    thaw(model)
    for layer in layers.values():
        for name in _OWN_FIELDS:
            layer.__dict__.pop(name, None)
        change_class(layer, original)
        with torch.no_grad():  # a parametrized weight with a graph could not be copied
            layer._update_flat_weights()  # as torch does: keeps weights written to the list
    return model


def freeze(model: Module) -> Module:
    """Makes short inference calls of a model's `fastlstm.LSTM`s faster: they do not reread weights.

    Every call of a `fastlstm.LSTM` reads all weights to detect changes. A frozen layer trusts
    torch's count of changes instead. torch counts steps of its optimizers, `load_state_dict`,
    in-place operations, replaced parameters and memory. It does not count a write through `.data`,
    NumPy, DLPack, an address or another process: call `thaw` before such a write, or `freeze` again
    after it.

    Parameters and their `requires_grad` stay unchanged. A call that needs gradients thaws its
    layer, since some optimizers write through `.data`. Copies and pickles are not frozen. Weights
    made in `torch.inference_mode`, without a count of changes, are read by every call.

    Args:
        model: any module.

    Returns:
        The model.

    Raises:
        UsageError: the model is no `nn.Module`, or has no `fastlstm.LSTM`.
    """
    layers = _own_layers(model)
    if not layers:
        kind = type(model).__name__
        raise UsageError(
            f"freeze found no fastlstm.LSTM in {kind}; call fastlstm.accelerate(model) first"
        )
    for layer in layers:
        for w_hh in _recurrent_weights(layer):
            packed_weights.freeze(w_hh)
        layer.__dict__.pop("_prepared", None)
    return model


def thaw(model: Module) -> Module:
    """Undoes `freeze`: every call detects every change of the weights again.

    Args:
        model: any module, frozen or not.

    Returns:
        The model.

    Raises:
        UsageError: the model is no `nn.Module`.
    """
    for layer in _own_layers(model):
        for w_hh in _recurrent_weights(layer):
            packed_weights.thaw(w_hh)
    return model


def _own_layers(model: nn.Module) -> list[LSTM]:
    check_module(model)
    return [m for m in model.modules() if isinstance(m, LSTM)]


def _recurrent_weights(layer: LSTM) -> list[nn.Parameter]:
    return [p for name, p in layer.named_parameters() if name.startswith("weight_hh")]


def _why_not(layer: LSTM) -> str | None:
    if layer.options != TORCHS_CELL:
        return f"torch's LSTM has no {layer.options}"
    if layer.weight_hook is not None:
        return "torch's LSTM has no weight_hook"
    if not layer.is_drop_in:
        return "its model calls run(), which torch's LSTM lacks"
    kind = parametrize.type_before_parametrizations(layer)
    cure = "; call restore before fully_shard" if is_of_fsdp(kind) else ""
    return None if original(kind) else f"{kind.__name__} is a subclass of fastlstm.LSTM{cure}"
