"""Optimizers, and their state as named tensors."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fastlstm.errors import FormatError
from fastlstm.training.muon import Branches, Muon
from fastlstm.training.options import TrainingOptions

BETAS = (0.9, 0.99)
MUON_RATIO = 2.5
"""Ratio of Muon's learning rate to Adam's."""
DEFAULT_LEARNING_RATE = {"muon": 0.01, "adam": 8e-3, "adamw": 8e-3, "nadam": 4e-3, "sgd": 1.0}
"""Peak learning rates for texts. Muon's was measured with 512 units and 4096 tokens a step; Adam's
and AdamW's were measured with 128 to 512 units and 2048 or 4096 tokens (benchmarks/log)."""
_COUNTERS = frozenset({"step", "mu_product"})
_STATES = {
    Muon: {"momentum"},
    torch.optim.Adam: {"step", "exp_avg", "exp_avg_sq"},
    torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"},
    torch.optim.NAdam: {"step", "exp_avg", "exp_avg_sq", "mu_product"},
    torch.optim.SGD: {"momentum_buffer"},
}
"""State of each optimizer for a parameter; a counter is one float32."""


class OptimizerSet:
    """One or two torch optimizers with one `step` and a state by parameter names."""

    def __init__(self, model: nn.Module, options: TrainingOptions) -> None:
        assert options.learning_rate is not None
        self.learning_rate = options.learning_rate
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._names = {id(p): name for name, p in named}
        with _compiler_left_out():
            self.members = _build(named, options, self.learning_rate)
        self._rates: tuple[torch.Tensor, ...] = ()

    def step(self, factor: float, scaler: torch.amp.GradScaler | None = None) -> None:
        """Applies one update at `factor` times the peak learning rate."""
        for optimizer in self.members:
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate * factor * group.get("lr_ratio", 1.0)
            if scaler is not None:
                scaler.step(optimizer)
            else:
                _update(optimizer)

    def prepare(self, rates: torch.Tensor) -> None:
        """Allocates the state and has every group read its rate from a tensor, for CUDA graphs."""
        self._rates = rates.unbind()
        for optimizer, group in self._groups_at_rates():
            group["capturable"] = True
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                for key in _STATES[type(optimizer)] - state.keys():
                    state[key] = (
                        torch.zeros((), device=parameter.device)
                        if key in _COUNTERS
                        else torch.zeros_like(parameter)
                    )

    def _groups_at_rates(self) -> list[tuple[torch.optim.Optimizer, dict[str, Any]]]:
        """Returns all groups, with their rates in tensors again after an eager step."""
        groups = [(o, group) for o in self.members for group in o.param_groups]
        for rate, (_, group) in zip(self._rates, groups, strict=True):
            group["lr"] = rate
        return groups

    def step_recorded(self, inverse: torch.Tensor, is_bad: torch.Tensor) -> None:
        """`step` within a CUDA graph, at the rates of `prepare`, for Muon and torch's fused Adam.

        `inverse` divides the gradients; `is_bad` is 1.0 if nothing may change, else 0.0.
        """
        self._groups_at_rates()
        for optimizer in self.members:
            optimizer.found_inf, optimizer.grad_scale = is_bad, inverse  # type: ignore[attr-defined]
        try:
            with Branches(inverse.device) as branches:
                for optimizer in self.members:
                    with branches.next():
                        _update(optimizer)
        finally:
            for optimizer in self.members:
                del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]

    def zero_grad(self) -> None:
        for optimizer in self.members:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the state as ``{"<parameter>:<key>": tensor}``."""
        return {
            f"{self._names[id(parameter)]}:{key}": torch.as_tensor(value)
            for optimizer in self.members
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
        }

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restores a state of `tensors`; raises FormatError for another model or optimizer."""
        parameters = {
            self._names[id(p)]: (optimizer, p)
            for optimizer in self.members
            for group in optimizer.param_groups
            for p in group["params"]
        }
        for optimizer in self.members:
            optimizer.state.clear()
        for full_name, value in tensors.items():
            name, _, key = full_name.rpartition(":")
            if name not in parameters:
                raise FormatError(
                    f"the optimizer state has '{full_name}', which this model or optimizer has not;"
                    " resume with the options of the first start"
                )
            optimizer, parameter = parameters[name]
            # Fused updates read and write as many numbers as the parameter has.
            is_counter = key in _COUNTERS
            shape = torch.Size() if is_counter else parameter.shape
            dtype = torch.float32 if is_counter else parameter.dtype
            if value.shape != shape or value.dtype != dtype:
                raise FormatError(
                    f"the optimizer state has '{full_name}' of {tuple(value.shape)} {value.dtype},"
                    f" expected {tuple(shape)} {dtype}; use another checkpoint"
                )
            # Fused updates need counters on the device of the parameter, others on the CPU.
            is_beside = not is_counter or optimizer.defaults.get("fused")
            device = parameter.device if is_beside else torch.device("cpu")
            optimizer.state[parameter][key] = value.to(device, copy=True)
        for name, (optimizer, parameter) in parameters.items():
            known = optimizer.state.get(parameter, {})
            if known and known.keys() != _STATES[type(optimizer)]:
                raise FormatError(
                    f"the optimizer state of '{name}' holds {', '.join(known)}, expected"
                    f" {', '.join(sorted(_STATES[type(optimizer)]))}; use another checkpoint"
                )


@contextmanager
def _compiler_left_out() -> Iterator[None]:
    """Keeps torch from loading its compiler, which takes seconds, for a new optimizer.

    torch loads it to exclude `add_param_group` from compilation, unless the function has the
    attribute of an excluded function.
    """
    function, name = inspect.unwrap(torch.optim.Optimizer.add_param_group), "__dynamo_disable"
    is_open = "torch._dynamo" not in sys.modules and not hasattr(function, name)
    if is_open:
        setattr(function, name, function)
    try:
        yield
    finally:
        if is_open:
            delattr(function, name)


def _update(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()` with its hooks, without torch's wrapper, which loads the compiler."""
    of_all = sys.modules[torch.optim.Optimizer.__module__]
    if optimizer._optimizer_step_pre_hooks or of_all._global_optimizer_pre_hooks:
        optimizer.step()  # these hooks may change the arguments
        return
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(optimizer)
    for hooks in (optimizer._optimizer_step_post_hooks, of_all._global_optimizer_post_hooks):
        for hook in tuple(hooks.values()):
            hook(optimizer, (), {})


def _build(
    named: list[tuple[str, nn.Parameter]], options: TrainingOptions, learning_rate: float
) -> list[torch.optim.Optimizer]:
    params = [p for _, p in named]
    shared: dict[str, Any] = {"lr": learning_rate, "weight_decay": options.weight_decay}
    adam = {**shared, "betas": BETAS, "fused": True}
    match options.optimizer:
        case "muon":
            recurrent = [p for name, p in named if is_recurrent_matrix(name)]
            others = [p for name, p in named if not is_recurrent_matrix(name)]
            group = {"params": recurrent, "lr_ratio": MUON_RATIO}
            rates = {**shared, "lr": learning_rate * MUON_RATIO}
            return [Muon([group], **rates), torch.optim.AdamW(others, **adam)]
        case "adam":
            return [torch.optim.Adam(params, **adam)]
        case "adamw":
            return [torch.optim.AdamW(params, **adam)]
        case "nadam":
            return [torch.optim.NAdam(params, betas=BETAS, decoupled_weight_decay=True, **shared)]
        case "sgd":
            return [torch.optim.SGD(params, momentum=0.9, nesterov=True, **shared)]


def is_recurrent_matrix(name: str) -> bool:
    """Returns whether a parameter is a `(4H, …)` matrix of an LSTM layer."""
    return ".weight_hh" in name or ".weight_ih" in name
