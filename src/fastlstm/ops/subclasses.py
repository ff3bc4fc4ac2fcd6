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

_OF_THE_CLASS = {"__init_subclass__", "__new__", "__reduce__", "__reduce_ex__"}
"""Would act on the new class, or are replaced there."""

_TAKEN = OWN_NAMES | _STEPS | _OF_THE_CLASS


def why_not_beneath(lstm: nn.LSTM) -> str | None:
    """Returns why `fastlstm.LSTM` cannot be put beneath the class of a layer, or None."""
    if "forward" in vars(lstm):
        return "its forward was replaced on this one layer; call accelerate before that"
    stored = {*vars(lstm), *lstm._modules, *lstm._parameters, *lstm._buffers}
    if clash := ", ".join(sorted(stored & OWN_NAMES)):
        return f"its own {clash} would clash with fastlstm.LSTM's; give that another name"
    kind = type(lstm)
    if type(kind) not in (type, ABCMeta):
        return f"the metaclass {type(kind).__name__} of {kind.__name__} decides what a class does"
    for owner in kind.__mro__:
        if owner in nn.LSTM.__mro__:
            continue
        if clash := ", ".join(sorted(vars(owner).keys() & _TAKEN)):
            return f"{owner.__name__} defines {clash}, on which fastlstm.LSTM depends"
    for owner in kind.__mro__[: kind.__mro__.index(nn.LSTM)]:
        if "forward" in vars(owner) and not _calls_super(vars(owner)["forward"]):
            return (
                f"{owner.__name__}.forward does not call super().forward() and may compute anything"
            )
    return None


def _calls_super(forward: Any) -> bool:
    """Whether the code of a forward pass has `super().forward`."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is not None and any(map(_has_super_forward, _codes(code)))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes(const)


def _has_super_forward(code: CodeType) -> bool:
    attributes = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
    names = [
        step.argval
        for step in dis.get_instructions(code)
        if step.opname in attributes or step.argval == "super"
    ]
    return ("super", "forward") in pairwise(names)
