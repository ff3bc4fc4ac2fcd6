"""All that a run needs to continue exactly where it stopped, as tensors and plain values."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

import torch

from fastlstm.training.averaging import WeightAverage
from fastlstm.training.guard import NonFiniteGuard
from fastlstm.training.optimizer import OptimizerSet
from fastlstm.training.precision import LossScaler

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
