"""`accelerate` makes the `nn.LSTM`s of a model `fastlstm.LSTM`s, `restore` makes them torch's.

`freeze` has them trust torch's count of changes of their weights, `thaw` undoes it.
"""

from __future__ import annotations

import warnings
from typing import TypeVar

from torch import nn
from torch.nn.utils import parametrize

from fastlstm.errors import UsageError
from fastlstm.nn.lstm import LSTM, check_max_activation_bytes
from fastlstm.ops import packed_weights
from fastlstm.ops.cell_options import TORCHS_CELL
from fastlstm.ops.left_alone import check_module, recurrent_modules

Module = TypeVar("Module", bound=nn.Module)

_OWN_FIELDS = (
    *("strict", "backend", "_options", "_prepared", "_last_shape", "max_activation_bytes"),
    "weight_hook",
)
"""What an instance of `LSTM` may hold beside what an `nn.LSTM` holds."""


def accelerate(model: Module, *, max_activation_bytes: int | None = None) -> Module:
    """Makes every `nn.LSTM` of a model a `fastlstm.LSTM`, in place.

    The layers stay the same objects: parameters, hooks, references and training state are kept.
    `restore` undoes it.

    Recurrent modules of other kinds are left alone: subclasses of `nn.LSTM`, whose forward pass may
    be their own, `nn.GRU`, `nn.RNN`, cells, quantized and TorchScript layers. One UserWarning names
    them with the reasons; so does `explain(model)`, as reports of backend `"torch"`.

    Args:
        model: any module.
        max_activation_bytes: of every layer that is accelerated now, as in `LSTM`.

    Returns:
        The model.

    Raises:
        UsageError: the model is no `nn.Module`.
        ConfigError: `max_activation_bytes` is no number of bytes.

    Warns:
        UserWarning: recurrent modules that are left alone, or a model without any LSTM.
    """
    check_max_activation_bytes(max_activation_bytes)
    modules = list(recurrent_modules(model))
    for _, module, _ in modules:
        if type(module) is nn.LSTM:
            module.__class__ = LSTM
            if max_activation_bytes is not None:
                module.max_activation_bytes = max_activation_bytes
    names = [
        f"{repr(path) if path else 'the model'} ({left.runs}: {left.why})"
        for path, _, left in modules
        if left
    ]
    if names:
        warnings.warn(f"accelerate left to torch: {'; '.join(names)}", stacklevel=2)
    elif not modules:
        warnings.warn(f"accelerate found no nn.LSTM in {type(model).__name__}", stacklevel=2)
    return model


def restore(model: Module) -> Module:
    """Makes every `fastlstm.LSTM` of a model torch's own `nn.LSTM` again, in place.

    The layers stay the same objects: parameters, hooks, training state, dtype and device are kept.
    `strict`, `backend` and `max_activation_bytes` are dropped, they mean nothing to an `nn.LSTM`.
    A model that is to be quantized, scripted, or pickled for a machine without fastlstm is restored
    first.

    Args:
        model: any module.

    Returns:
        The model.

    Raises:
        UsageError: the model is no `nn.Module`; or it has a layer that torch cannot compute (layer
            norm, zoneout and so on) or a subclass of `fastlstm.LSTM`: it is named and nothing is
            changed.
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
        layer.__class__ = nn.LSTM  # type: ignore[assignment]
        layer._update_flat_weights()  # as torch does: what was written to the list stays
    return model


def freeze(model: Module) -> Module:
    """Makes short inference calls faster: the weights of its `fastlstm.LSTM`s are not read anew.

    Every call of a `fastlstm.LSTM` reads its weights whole to find out whether anything was written
    to them. A frozen layer trusts torch's count of changes instead. It sees what torch counts:
    steps of torch's optimizers, `load_state_dict`, in-place operations, replaced parameters and
    memory. It does not see a write through `.data`, NumPy, DLPack, an address or another process:
    call `thaw` before one, or `freeze` again after it.

    Parameters stay as they are, `requires_grad` too. A call that needs gradients thaws its layer:
    some optimizers write through `.data`. Copies and pickles are not frozen. Weights made in
    `torch.inference_mode`, of which torch counts no changes, are read by every call.

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
    """Undoes `freeze`: every call sees every write to the weights again.

    Args:
        model: any module; one that is not frozen stays as it is.

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
    """Returns why a layer cannot be torch's own, or None."""
    if layer.options != TORCHS_CELL:
        return f"torch's LSTM has no {layer.options}"
    if layer.weight_hook is not None:
        return "torch's LSTM has no weight_hook"
    if not layer.is_drop_in:
        return "its model calls run(), which torch's LSTM has not got"
    if type(layer) is LSTM:
        return None
    if parametrize.is_parametrized(layer):
        names = ", ".join(layer.parametrizations)  # type: ignore[arg-type]
        return f"{names} is parametrized; remove_parametrizations first"
    return f"{type(layer).__name__} is a subclass of fastlstm.LSTM"
