"""Classes with `fastlstm.LSTM` beneath a subclass of `nn.LSTM`, and the way back.

A class of another library, `class Theirs(nn.LSTM)`, gets a subclass `(Theirs, LSTM)`: Python then
finds our `LSTM` in front of `nn.LSTM`. `ops/subclasses.py` says when that is right.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Any, cast
from weakref import WeakValueDictionary

from torch import nn
from torch.nn.utils import parametrize

from fastlstm.nn.lstm import LSTM

_ACCELERATED = WeakValueDictionary[type, type]([(nn.LSTM, LSTM)])
"""Class -> its accelerated one, which lives as long as its layers."""
_LOCK = RLock()
"""Two threads get one class."""


def accelerated(kind: type) -> type:
    """Returns the one class with `LSTM` beneath a class."""
    with _LOCK:
        found = _ACCELERATED.get(kind)
        if found is not None:
            return found
        names = ("__module__", "__qualname__", "__doc__")
        namespace = {name: getattr(kind, name) for name in names}
        made = type(kind)(kind.__name__, (kind, LSTM), namespace | {"__reduce_ex__": _reduced})
        return _ACCELERATED.setdefault(kind, made)


def original(kind: type) -> type | None:
    """Returns the class that `accelerated` was given, or None for other classes."""
    base = kind.__bases__[0]
    return base if _ACCELERATED.get(base) is kind else None


def change_class(layer: nn.LSTM, change: Callable[[type], Any]) -> None:
    """Changes the class of a layer; below the one that parametrizations made, if there is one.

    `remove_parametrizations` then leaves the changed class.
    """
    kind: Any = type(layer)
    if parametrize.is_parametrized(layer):
        bases = (change(kind.__bases__[0]),)
        layer.__class__ = type(kind)(kind.__name__, bases, dict(vars(kind)))
    else:
        layer.__class__ = change(kind)


def _reduced(layer: LSTM, protocol: int) -> Any:
    """Copies and pickles by the class that can be imported."""
    make, (kind, *args), *state = cast(Any, object.__reduce_ex__(layer, protocol))
    base = original(kind)
    return (make, (kind, *args), *state) if base is None else (_made, (make, base, *args), *state)


def _made(make: Callable[..., Any], base: type, *args: Any) -> Any:
    return make(accelerated(base), *args)
