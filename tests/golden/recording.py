"""What a run trains on and with, recorded from outside while it runs.

Torch's own hooks see the optimizers, the losses and the weights, whatever code calls them. What
they cannot see is which data came: `TAPS` names the methods that hand out training batches. These
names follow the code when it moves; nothing else here should have to.
"""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fastlstm.text.data.lanes import Batch

TAPS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "fastlstm.system.prefetch:Prefetcher.next": lambda b, *_: (
        # a table is read through one, too
        (b.x, b.y, b.reset, b.epoch, b.index) if isinstance(b, Batch) else ()
    ),
    "fastlstm.forecast.data.window_loader:WindowLoader.next": lambda b: (
        *(b.values, b.rows, b.segments),
        *(b.epoch, b.number),
    ),
    "fastlstm.forecast.data.window_loader:ChunkLoader.next": lambda b: (
        *(b.values, b.rows, b.segments),
        b.continues,
    ),
    "fastlstm.sequence.data:Sequences.batch": lambda _, numbers, *__: (numbers,),
}
"""Methods that return a training batch; each with what of it (and of its arguments) counts."""

_OF_IMPLEMENTATION = {"params", "lr", "foreach", "fused", "capturable", "differentiable"}


class Recording:
    """A run as it was seen.

    Attributes:
        losses: of every step, all parts of an accumulated batch together.
        rates: learning rates of every step, by optimizer and group.
        settings: of the optimizers' groups, what torch calls them by.
    """

    def __init__(self):
        self.losses: list[float] = []
        self.rates: list[list[float]] = []
        self.settings: list[dict[str, Any]] = []
        self._data = hashlib.sha256()
        self._random = ""
        self._parts: list[float] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._modules: list[torch.nn.Module] = []
        self._parameters: dict[int, torch.Tensor] = {}  # kept, or another would get the id
        self._initial: dict[int, torch.Tensor] = {}
        self._trained: dict[int, torch.Tensor] = {}

    @property
    def data(self):
        """SHA-256 of all batches in order."""
        return self._data.hexdigest()

    @property
    def random(self):
        """SHA-256 of torch's generator after the last step: what was drawn, and how much."""
        return self._random

    @property
    def initial(self):
        """The weights before the first step, by name."""
        return self._named(self._initial)

    @property
    def trained(self):
        """The weights after the last step, by name."""
        return self._named(self._trained)

    def _named(self, tensors):
        names: dict[int, str] = {}
        for module in self._modules:
            names = {id(p): name for name, p in module.named_parameters()}
            if names.keys() >= tensors.keys():
                break
        else:  # a copied network registers nothing
            names = {key: f"parameter {number}" for number, key in enumerate(tensors)}
        return dict(sorted((names[key], tensor) for key, tensor in tensors.items()))

    # what the hooks call ------------------------------------------------------------------------

    def batch(self, content):
        self._parts.clear()  # passes before the first batch were for timing
        for part in content:
            array = np.asarray(part)
            if array.dtype.kind == "f":
                array = np.where(np.isnan(array), np.float32(np.nan), array)
            elif array.dtype != np.bool_:
                array = array.astype(np.int64)
            self._data.update(f"{array.dtype} {array.shape}".encode())
            self._data.update(np.ascontiguousarray(array).tobytes())

    def loss(self, value):
        self._parts.append(value)

    def before_step(self, optimizer, *_):
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)
            for group in optimizer.param_groups:
                plain = {k: v for k, v in group.items() if k not in _OF_IMPLEMENTATION}
                self.settings.append({"optimizer": type(optimizer).__name__, **plain})
                for parameter in group["params"]:
                    self._parameters[id(parameter)] = parameter
                    self._initial[id(parameter)] = parameter.detach().clone()
        if self._parts:
            self.losses.append(math.fsum(self._parts))
            self.rates.append([])
            self._parts.clear()
        self.rates[-1] += [group["lr"] for group in optimizer.param_groups]

    def after_step(self, optimizer, *_):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._trained[id(parameter)] = parameter.detach().clone()
        self._random = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()

    def registered(self, module, *_):
        if not any(module is known for known in self._modules):
            self._modules.append(module)


@contextmanager
def recorded():
    """Records the one training run that happens in the block."""
    recording = Recording()
    with ExitStack() as stack:
        for handle in (
            register_optimizer_step_pre_hook(recording.before_step),
            register_optimizer_step_post_hook(recording.after_step),
            register_module_module_registration_hook(recording.registered),
        ):
            stack.callback(handle.remove)
        backward = torch.Tensor.backward

        def seen(tensor, *args, **kwargs):
            recording.loss(float(tensor.detach()))
            backward(tensor, *args, **kwargs)

        stack.enter_context(mock.patch.object(torch.Tensor, "backward", seen))
        for place, content in TAPS.items():
            stack.enter_context(_tapped(place, content, recording))
        yield recording


def _tapped(place, content, recording):
    module, _, path = place.partition(":")
    owner, _, name = path.partition(".")
    kind = getattr(importlib.import_module(module), owner)
    method = getattr(kind, name)

    def seen(self, *args, **kwargs):
        found = method(self, *args, **kwargs)
        if torch.is_grad_enabled():  # else it is for an evaluation
            recording.batch(content(found, *args))
        return found

    return mock.patch.object(kind, name, seen)
