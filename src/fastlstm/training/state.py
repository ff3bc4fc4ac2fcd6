"""All that a run needs to continue exactly where it stopped, as tensors and plain values."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

import torch
from torch import nn

from fastlstm.training.optimizer import OptimizerSet
from fastlstm.training.precision import LossScaler

SKIPS_BEFORE_ROLLBACK = 5
ROLLBACKS_BEFORE_STOP = 3
Tensors = dict[str, dict[str, torch.Tensor]]
BuiltT = TypeVar("BuiltT")
_NUMBER = (int, float)
_TYPES: dict[str, tuple[Any, ...]] = {
    "int": (int,),
    "float": (_NUMBER,),
    "list[str]": (list, str),
    "dict[str, float]": (dict, _NUMBER),
}
"""Types of a counter, and of what it holds, by how its field is annotated."""


@dataclass
class Progress:
    """Counters of a run.

    Attributes:
        step: optimizer steps done.
        tokens: training tokens seen; of a forecaster, windows.
        elapsed_s: wall clock of the run over all its starts.
        train_s: the part of it spent in steps.
        spent: seconds of the other parts: setup (before the first step of each start),
            evaluations, saving.
        best_step: step of the best evaluation, -1 before the first.
        best_loss: its loss, of a language model nats per token.
        best_bits_per_char: the same in bits per character; of a forecaster nothing.
        evaluated_step: step of the newest evaluation, -1 before the first.
        evaluations: number of evaluations.
        without_gain: evaluations since the best one.
        lr_scale: lowered by roll-backs.
        scored: validation units that each evaluation scores; 0 before the first.
        slot: of evaluations spread evenly over a run, how many were due at the last one.
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

    @property
    def setup_s(self) -> float:
        """Returns the seconds before the first step, of all starts together."""
        return self.spent.get("setup", 0.0)

    def count(self, units: int) -> None:
        """Counts a step of so many units; negative takes one back."""
        self.step += 1 if units > 0 else -1
        self.tokens += units

    @contextmanager
    def counted(self, part: str) -> Iterator[None]:
        """Adds the seconds that the block takes to a part of `spent`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(part, time.perf_counter() - started)

    def add(self, part: str, seconds: float) -> None:
        """Adds seconds to a part of `spent`."""
        self.spent[part] = self.spent.get(part, 0.0) + seconds

    def to_meta(self) -> dict[str, Any]:
        """Returns the counters that have a value; JSON knows no infinity."""
        return {name: value for name, value in asdict(self).items() if value != float("inf")}


@dataclass
class NonFiniteGuard:
    """Counts trouble: five skipped steps in a row ask for a roll-back, three roll-backs for a stop.

    Attributes:
        skipped: steps skipped in all.
        in_a_row: steps skipped since the last good one.
        rollbacks: roll-backs so far.
        culprits: name of each bad tensor with its step, oldest first.
    """

    skipped: int = 0
    in_a_row: int = 0
    rollbacks: int = 0
    culprits: list[str] = field(default_factory=list)

    def good_step(self) -> None:
        self.in_a_row = 0

    def bad_step(self, step: int, culprit: str) -> bool:
        """Records a skipped step; True when it is time to roll back."""
        self.skipped += 1
        self.in_a_row += 1
        self.culprits.append(f"step {step}: {culprit}")
        return self.in_a_row >= SKIPS_BEFORE_ROLLBACK

    def roll_back(self) -> bool:
        """Records a roll-back; True when there were too many and the run must stop."""
        self.rollbacks += 1
        self.in_a_row = 0
        return self.rollbacks > ROLLBACKS_BEFORE_STOP


class WeightAverage:
    """Exponential moving average of the weights (EMA): `decay * average + (1 - decay) * weight`.

    The effective decay is `min(decay, (1 + n) / (10 + n))` after n updates, so that early averages
    do not remember the initialisation.
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
        """Returns the weight of the new values in an update, counted from 1."""
        return 1 - min(self.decay, (1 + update) / (10 + update))

    @torch.no_grad()
    def update_recorded(self, weight: torch.Tensor) -> None:
        """As `update`, with the weight of the new values as a scalar on the GPU."""
        averages = list(self._average.values())
        moves = torch._foreach_sub([p.detach() for p in self._weights.values()], averages)
        torch._foreach_mul_(moves, weight)
        torch._foreach_add_(averages, moves)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Puts the averaged weights into the model for the length of the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        # In place: cuDNN wants the weights of a layer to stay in one buffer, a CUDA graph both.
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
    """Checks the shapes of stored tensors by name; torch would broadcast some.

    Raises:
        ValueError: one is missing, or of another shape or kind of number.
    """
    for name, tensor in own.items():
        value, expected = stored.get(name), f"expected {tuple(tensor.shape)} {tensor.dtype}"
        if value is None:
            raise ValueError(f"'{name}' of {stem}.safetensors is missing, {expected}")
        is_float = tensor.is_floating_point()
        if value.shape != tensor.shape or value.is_floating_point() != is_float:
            came = f"{tuple(value.shape)} {value.dtype}"
            raise ValueError(f"'{name}' of {stem}.safetensors is {came}, {expected}")


def _built(kind: type[BuiltT], values: dict[str, Any]) -> BuiltT:
    """Returns counters from a checkpoint's values; raises TypeError where one is of another type"""
    built = kind(**values)
    for each in fields(built):  # type: ignore[arg-type]
        value, allowed = getattr(built, each.name), _TYPES[str(each.type)]
        if not isinstance(value, allowed[0]) or isinstance(value, bool):
            raise TypeError(f"{each.name} is {value!r:.80}")
        parts = value.values() if isinstance(value, dict) else value if len(allowed) > 1 else ()
        for part in parts:
            if not isinstance(part, allowed[1]):
                raise TypeError(f"{each.name} holds {part!r:.80}")
    return built


@dataclass
class TrainingState:
    """The mutable parts of a run.

    Attributes:
        model: the model.
        optimizers: its optimizers.
        average: its averaged weights, or None.
        scaler: fp16 loss scaler, or None.
    """

    model: torch.nn.Module
    optimizers: OptimizerSet
    average: WeightAverage | None
    scaler: LossScaler | None = None
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
        """Puts what `capture` returned back and returns the loader's position.

        A roll-back keeps the counters of `guard`, or it would be repeated for ever.
        """
        require_like(dict(self.model.named_parameters()), tensors["model"], "model")
        # Not strict: of tied weights one is stored.
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
        self.progress = _built(Progress, meta["progress"])
        if not keep_guard:
            self.guard = _built(NonFiniteGuard, meta["guard"])
        loader: dict[str, int] = meta["loader"]
        return loader


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns parameters and buffers by name; of tied weights one."""
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
