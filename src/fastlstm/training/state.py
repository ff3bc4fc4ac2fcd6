"""The state of a run, with which it continues exactly where it stopped."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from fastlstm.errors import ConfigError
from fastlstm.system.fields import check_values, is_number
from fastlstm.training.optimizer import OptimizerSet
from fastlstm.training.precision import LossScaler

SKIPS_BEFORE_ROLLBACK = 5
ROLLBACKS_BEFORE_STOP = 3
Tensors = dict[str, dict[str, torch.Tensor]]


@dataclass
class Progress:
    """Counters of a run. Raises ConfigError: a stored counter has another type.

    Attributes:
        tokens: training units seen: tokens, windows or sequences.
        elapsed_s: wall-clock seconds over all starts.
        train_s: seconds spent in steps.
        spent: other seconds: setup (before the first step of each start), evaluations, saving.
        best_step: step of the best evaluation, -1 before the first.
        best_bits_per_char: the loss of that evaluation in bits per character, for texts.
        evaluated_step: step of the newest evaluation, -1 before the first.
        without_gain: evaluations since the best one.
        lr_scale: factor of the learning rate, which roll-backs halve.
        scored: validation units per evaluation, 0 before the first.
        slot: evaluations that were due at the newest one, if they are spread evenly over the run.
    """

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    train_s: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)
    best_step: int = -1
    best_loss: float = float("inf")
    best_bits_per_char: float = float("inf")
    evaluated_step: int = -1
    evaluations: int = 0
    without_gain: int = 0
    lr_scale: float = 1.0
    scored: int = 0
    slot: int = 0

    def __post_init__(self) -> None:
        check_values(self, {})
        if not isinstance(self.spent, dict) or not all(map(is_number, self.spent.values())):
            raise ConfigError(f"`spent` is {self.spent!r:.60}, expected seconds by part")

    @property
    def setup_s(self) -> float:
        """Seconds before the first step, over all starts."""
        return self.spent.get("setup", 0.0)

    def count(self, units: int) -> None:
        """Counts a step; negative units take one back."""
        self.step += 1 if units > 0 else -1
        self.tokens += units

    @contextmanager
    def counted(self, part: str) -> Iterator[None]:
        """Adds the seconds of the block to a part of `spent`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(part, time.perf_counter() - started)

    def add(self, part: str, seconds: float) -> None:
        self.spent[part] = self.spent.get(part, 0.0) + seconds

    def to_meta(self) -> dict[str, Any]:
        """Returns the counters for JSON, which has no infinity: infinite ones are left out."""
        return {name: value for name, value in asdict(self).items() if value != float("inf")}


@dataclass
class NonFiniteGuard:
    """Counts skipped steps: five in a row mean a roll-back, and a fourth roll-back means a stop.

    Raises ConfigError: a stored counter has another type.
    """

    in_a_row: int = 0
    rollbacks: int = 0

    def __post_init__(self) -> None:
        check_values(self, {})

    def bad_step(self) -> bool:
        """Records a skipped step; returns whether to roll back."""
        self.in_a_row += 1
        return self.in_a_row >= SKIPS_BEFORE_ROLLBACK

    def roll_back(self) -> bool:
        """Records a roll-back; returns whether the run must stop instead."""
        self.rollbacks += 1
        self.in_a_row = 0
        return self.rollbacks > ROLLBACKS_BEFORE_STOP


class WeightAverage:
    """Exponential moving average of the weights (EMA): `decay * average + (1 - decay) * weight`.

    The decay is at most (1 + n) / (10 + n) in update n, so that early averages forget the initial
    weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self._weights = dict(model.named_parameters())
        self._average = {name: p.detach().clone() for name, p in self._weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        averages, weight = list(self._average.values()), self.weight_of(self.updates)
        torch._foreach_lerp_(averages, [p.detach() for p in self._weights.values()], weight)

    def weight_of(self, update: int) -> float:
        """Returns the weight of the new values in update 1, 2, …."""
        return 1 - min(self.decay, (1 + update) / (10 + update))

    @torch.no_grad()
    def update_recorded(self, weight: torch.Tensor) -> None:
        """`update` with the weight of the new values in a scalar on the GPU."""
        averages = list(self._average.values())
        moves = torch._foreach_sub([p.detach() for p in self._weights.values()], averages)
        torch._foreach_mul_(moves, weight)
        torch._foreach_add_(averages, moves)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Has the model use the averaged weights within the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        # In place: cuDNN and CUDA graphs need the addresses.
        for name, parameter in self._weights.items():
            kept = parameter.detach().clone()
            parameter.copy_(self._average[name])
            self._average[name].copy_(kept)

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self._average)

    def load(self, tensors: dict[str, torch.Tensor], updates: int) -> None:
        self.updates = updates
        for name, value in tensors.items():
            self._average[name].copy_(value)


def require_like(
    own: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor], stem: str
) -> None:
    """Raises ValueError if a stored tensor is missing or has another shape or kind of number: torch
    would broadcast some."""
    for name, tensor in own.items():
        value, expected = stored.get(name), f"expected {tuple(tensor.shape)} {tensor.dtype}"
        if value is None:
            raise ValueError(f"'{name}' of {stem}.safetensors is missing, {expected}")
        is_float = tensor.is_floating_point()
        if value.shape != tensor.shape or value.is_floating_point() != is_float:
            came = f"{tuple(value.shape)} {value.dtype}"
            raise ValueError(f"'{name}' of {stem}.safetensors is {came}, {expected}")


@dataclass
class TrainingState:
    """The parts of a run that training changes."""

    model: torch.nn.Module
    optimizers: OptimizerSet
    average: WeightAverage | None
    scaler: LossScaler | None = None  # for fp16
    progress: Progress = field(default_factory=Progress)
    guard: NonFiniteGuard = field(default_factory=NonFiniteGuard)

    def capture(self, loader: dict[str, int]) -> tuple[Tensors, dict[str, Any]]:
        """Returns (tensors by file stem, plain values) for a checkpoint."""
        rng = {"rng_cpu": torch.get_rng_state()}
        device = next(self.model.parameters()).device
        if device.type == "cuda":
            rng["rng_cuda"] = torch.cuda.get_rng_state(device)
        tensors: Tensors = {
            "model": weights_of(self.model),
            "optimizer": self.optimizers.tensors(),
            "state": rng,
        }
        meta: dict[str, Any] = {
            "progress": self.progress.to_meta(),
            "loader": loader,
            "guard": asdict(self.guard),
        }
        if self.average is not None:
            tensors["average"] = self.average.tensors()
            meta["average_updates"] = self.average.updates
        if self.scaler is not None:
            meta["scaler"] = self.scaler.state_dict()
        return tensors, meta

    def restore(
        self, tensors: Tensors, meta: dict[str, Any], keep_guard: bool = False
    ) -> dict[str, int]:
        """Restores what `capture` returned; returns the loader's position.

        A roll-back keeps the guard, because it could be repeated for ever otherwise.
        """
        require_like(dict(self.model.named_parameters()), tensors["model"], "model")
        # Not strict: tied weights are stored once.
        self.model.load_state_dict(tensors["model"], strict=False)
        self.optimizers.load(tensors["optimizer"])
        torch.set_rng_state(tensors["state"]["rng_cpu"].clone())
        if "rng_cuda" in tensors["state"]:
            device = next(self.model.parameters()).device
            torch.cuda.set_rng_state(tensors["state"]["rng_cuda"].clone(), device)
        if self.average is not None:
            require_like(self.average.tensors(), tensors["average"], "average")
            self.average.load(tensors["average"], int(meta["average_updates"]))
        if self.scaler is not None:
            self.scaler.load_state_dict(meta["scaler"])
        self.progress = Progress(**meta["progress"])
        if not keep_guard:
            self.guard = NonFiniteGuard(**meta["guard"])
        loader: dict[str, int] = meta["loader"]
        return loader


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns parameters and buffers by name; tied weights once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def first_non_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """Returns the name of the first tensor that holds NaN or Inf, or None."""
    for name, tensor in tensors:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return name
    return None


def bad_weight(model: nn.Module) -> str | None:
    """Returns the name of the first weight that holds NaN or Inf, or None."""
    return first_non_finite((name, p.detach()) for name, p in model.named_parameters())


def bad_gradient(model: nn.Module) -> str | None:
    """Returns the name of the first gradient that holds NaN or Inf, or None."""
    return first_non_finite(
        (name, p.grad) for name, p in model.named_parameters() if p.grad is not None
    )
