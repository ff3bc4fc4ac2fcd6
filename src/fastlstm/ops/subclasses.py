"""Which subclasses of `nn.LSTM` compute the same with `fastlstm.LSTM` beneath them.

Python then finds `fastlstm.LSTM.forward` where it found `nn.LSTM.forward`, if the subclass has no
forward pass or one that calls `super().forward()`.
"""

from __future__ import annotations

import dis
import inspect
from abc import ABCMeta
from collections.abc import Iterator
from itertools import pairwise
from types import CodeType
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

OWN_NAMES = {
    "_added", "_call_args", "_fits", "_flat", "_forward_packed", "_fx_node",
    "_is_left_to_reference", "_is_torchs", "_last_shape", "_layer_weights", "_may_prepare",
    "_on_one_buffer", "_options", "_prepared", "_run_layers", "_run_lengths", "_set_options",
    "_torch", "_unfit", "activation", "backend", "flat_weights", "is_drop_in", "layer_norm",
    "max_activation_bytes", "norms", "options", "recurrent_activation", "recurrent_dropout",
    "reset_norms", "run", "strict", "weight_hook", "zoneout", "__prepare_scriptable__",
}  # fmt: skip
"""What `fastlstm.LSTM` defines and `nn.LSTM` lacks, but for names that a subclass may replace."""

_STEPS = {
    "check_forward_args", "check_hidden_size", "check_input", "get_expected_cell_size",
    "get_expected_hidden_size", "permute_hidden", "_init_flat_weights",
    "_update_flat_weights", "_weights_have_changed", "_all_weights", "_flat_weight_refs",
    "_flat_weights", "_flat_weights_names", "__setattr__", "__call__", "_call_impl",
}  # fmt: skip
"""Steps of `nn.LSTM`'s forward pass that `fastlstm.LSTM` takes in another way."""

_OF_THE_CLASS = {"__init_subclass__", "__new__", "__reduce__", "__reduce_ex__", "cls_to_become"}
"""Would act on the new class, or are replaced there; a lazy layer changes its class itself."""

_TAKEN = OWN_NAMES | _STEPS | _OF_THE_CLASS
_CLASHING = OWN_NAMES | {name for name in _STEPS if hasattr(nn.LSTM, name)}
_USED = OWN_NAMES | {"_flat_weights"}
_TYPE = {("type", "self"), ("self", "__class__")}


def why_not_beneath(lstm: nn.LSTM) -> str | None:
    """Returns why `fastlstm.LSTM` cannot be put beneath the class of a layer, or None."""
    if "forward" in vars(lstm):
        return "its forward was replaced on this one layer; call accelerate before that"
    stored = {*vars(lstm), *lstm._modules, *lstm._parameters, *lstm._buffers}
    if clash := ", ".join(sorted(stored & _CLASHING)):
        return f"its own {clash} would clash with fastlstm.LSTM's; give that another name"
    kind = type(lstm)
    if type(kind) not in (type, ABCMeta):
        return f"the metaclass {type(kind).__name__} of {kind.__name__} decides what a class does"
    for owner in kind.__mro__:
        if owner in nn.LSTM.__mro__:
            continue
        if clash := ", ".join(sorted(vars(owner).keys() & _TAKEN)):
            cure = "; call accelerate before fully_shard" if is_of_fsdp(owner) else ""
            return f"{owner.__name__} defines {clash}, on which fastlstm.LSTM depends{cure}"
    for owner in parametrize.type_before_parametrizations(lstm).__mro__:
        if owner not in nn.LSTM.__mro__ and (use := _dependent_method(owner)):
            return f"{owner.__name__}.{use}, which accelerate would change"
    for owner in kind.__mro__[: kind.__mro__.index(nn.LSTM)]:
        if "forward" in vars(owner) and not _calls_super(vars(owner)["forward"]):
            return (
                f"{owner.__name__}.forward does not call super().forward() and may compute anything"
            )
    return None


def is_of_fsdp(kind: type) -> bool:
    """Whether `torch.distributed.fsdp.fully_shard` made a class, or the class is FSDP's own."""
    return any(c.__module__.startswith("torch.distributed.fsdp") for c in kind.__mro__)


def _dependent_method(owner: type) -> str | None:
    """Returns a method whose result depends on the class of the layer, or None."""
    for method, value in vars(owner).items():
        for code in _codes(value.fget if isinstance(value, property) else value):
            names = list(_names(code))
            for a, b, c in zip(names, names[1:], [*names[2:], ""], strict=False):
                if a == "self" and b in _USED:
                    return f"{method} uses self.{b}"
                if (a, b) in _TYPE and c not in ("__name__", "__qualname__"):
                    return f"{method} uses type(self)"
    return None


def _names(code: CodeType) -> Iterator[str]:
    """Yields names and texts in the order of their use."""
    for step in dis.get_instructions(code):
        values = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        yield from (value for value in values if isinstance(value, str))


def _calls_super(forward: Any) -> bool:
    """Whether the code of a forward pass has `super().forward`."""
    return any(map(_has_super_forward, _codes(forward)))


def _codes(function: Any) -> Iterator[CodeType]:
    """Yields the code of a function and of those inside it; none of other values."""
    code = getattr(inspect.unwrap(function), "__code__", function)
    if isinstance(code, CodeType):
        yield code
        for const in code.co_consts:
            yield from _codes(const)


def _has_super_forward(code: CodeType) -> bool:
    attributes = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
    names = [
        step.argval
        for step in dis.get_instructions(code)
        if step.opname in attributes or step.argval == "super"
    ]
    return ("super", "forward") in pairwise(names)
