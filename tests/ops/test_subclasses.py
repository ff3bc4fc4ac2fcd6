"""Which subclasses of `nn.LSTM` may have `fastlstm.LSTM` beneath them, and why others may not."""

import functools
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import pytest
import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrizations

import fastlstm
from fastlstm.ops.left_alone import left_alone
from fastlstm.ops.subclasses import OWN_NAMES, why_not_beneath

Value = TypeVar("Value")


class Plain(nn.LSTM):
    """Has no forward pass."""


class Calls(nn.LSTM):
    def forward(self, x, hx=None):
        return super().forward(-x, hx)


class OldStyle(nn.LSTM):
    def forward(self, x, hx=None):
        parent = super(OldStyle, self)  # noqa: UP008
        return parent.forward(-x, hx)


class Nested(nn.LSTM):
    def forward(self, x):
        def run():
            return super(Nested, self).forward(x)

        return run()


def logged(forward):
    @functools.wraps(forward)
    def wrapper(*args, **kwargs):
        return forward(*args, **kwargs)

    return wrapper


class Decorated(nn.LSTM):
    @torch.no_grad()
    @logged
    def forward(self, x, hx=None):
        return super().forward(x, hx)


class Base(ABC, nn.RNNBase):
    @abstractmethod
    def first(self): ...

    def forward(self, x, hx=None):
        return super().forward(x, hx)


class FromBase(Base, nn.LSTM):
    def first(self):
        return 0


class Explicit(nn.LSTM):
    def forward(self, x, hx=None):
        return nn.LSTM.forward(self, x, hx)


class Other(nn.LSTM):
    def forward(self, x, hx=None):
        super().check_input(x, None)
        return self.inner.forward(x)


class Above(Explicit):
    def forward(self, x, hx=None):
        return super().forward(x, hx)


class Partial(nn.LSTM):
    forward = functools.partialmethod(nn.LSTM.forward, hx=None)


class Meta(type):
    pass


class OfMeta(nn.LSTM, metaclass=Meta):
    pass


class Options:
    options = 3


class Behind(nn.LSTM, Options):
    pass


class Listed(nn.LSTM):
    def __init_subclass__(cls):
        raise AssertionError("a class was made")


class OfType(nn.LSTM):
    def forward(self, x, hx=None):
        return super(type(self), self).forward(-x, hx)


class OfClass(nn.LSTM):
    def reset_parameters(self):
        super(self.__class__, self).reset_parameters()


class Sets(nn.LSTM):
    def forward(self, x, hx=None):
        self.activation = "relu"
        return super().forward(x, hx)


class Asks(nn.LSTM):
    @property
    def is_normed(self):
        return hasattr(self, "norms")


class Reads(nn.LSTM):
    def penalty(self):
        return sum(w.abs().sum() for w in self._flat_weights)


class Lazy(LazyModuleMixin, nn.LSTM):
    cls_to_become = nn.LSTM


class Named(nn.LSTM):
    def extra_repr(self):
        return f"{type(self).__name__}, {self.__class__.__qualname__}, {super().extra_repr()}"


class Delegates(Explicit):
    """Finds names that it lacks in another layer."""

    def __getattr__(self, name):
        return getattr(self._modules["other"], name)


def given(**attributes):
    layer = Plain(3, 4)
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


TAKEN = (nn.LSTM, Plain, Calls, OldStyle, Nested, Decorated, FromBase, Named)

LEFT = {
    "nn.LSTM by name": (lambda: Explicit(3, 4), "Explicit.forward does not call super().forward()"),
    "other super": (lambda: Other(3, 4), "Other.forward does not call super().forward()"),
    "a base": (lambda: Above(3, 4), "Explicit.forward does not call super().forward()"),
    "no function": (lambda: Partial(3, 4), "Partial.forward does not call super().forward()"),
    "metaclass": (lambda: OfMeta(3, 4), "the metaclass Meta of OfMeta"),
    "class made": (lambda: Listed(3, 4), "Listed defines __init_subclass__"),
    "type": (lambda: OfType(3, 4), "OfType.forward uses type(self), which accelerate would change"),
    "its class": (lambda: OfClass(3, 4), "OfClass.reset_parameters uses type(self)"),
    "sets": (lambda: Sets(3, 4), "Sets.forward uses self.activation"),
    "asks": (lambda: Asks(3, 4), "Asks.is_normed uses self.norms"),
    "reads": (lambda: Reads(3, 4), "Reads.penalty uses self._flat_weights"),
    "lazy": (lambda: Lazy(3, 4), "Lazy defines cls_to_become"),
    "behind": (lambda: Behind(3, 4), "Options defines options"),
    "attribute": (lambda: given(strict=True, run=3), "its own run, strict would clash"),
    "step": (lambda: given(permute_hidden=abs), "its own permute_hidden would clash"),
    "submodule": (lambda: given(layer_norm=nn.LayerNorm(4)), "its own layer_norm would clash"),
    "parameter": (lambda: given(zoneout=nn.Parameter(torch.ones(1))), "its own zoneout would"),
    "forward": (lambda: given(forward=abs), "its forward was replaced"),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_classes_that_compute_the_same(kind):
    layer = kind(3, 4)
    assert why_not_beneath(layer) is None
    assert why_not_beneath(parametrizations.weight_norm(layer, "weight_hh_l0")) is None


def test_the_names_of_a_layer_inside_are_not_its_own():
    layer = Calls(3, 4)
    layer.other = fastlstm.LSTM(3, 4)
    layer.__class__ = Delegates
    assert "Explicit.forward does not call super().forward()" in left_alone(layer).why


def test_a_generic_class_is_left_alone_by_name():
    class Typed(nn.LSTM, Generic[Value]):
        pass

    assert "Generic defines __init_subclass__" in why_not_beneath(Typed(3, 4))


@pytest.mark.parametrize("case", LEFT)
def test_classes_that_may_not(case):
    make, why = LEFT[case]
    assert why in why_not_beneath(make())


@pytest.mark.parametrize("name", ["permute_hidden", "_flat_weights", "run", "__setattr__"])
def test_a_class_with_a_step_of_its_own_is_named(name):
    layer = nn.LSTM(3, 4)
    layer.__class__ = type("Mine", (nn.LSTM,), {name: getattr(nn.LSTM, name, None)})
    assert f"Mine defines {name}, on which" in why_not_beneath(layer)


def test_the_names_are_those_of_the_class():
    assert set(vars(fastlstm.LSTM)) - set(dir(nn.LSTM)) == OWN_NAMES
