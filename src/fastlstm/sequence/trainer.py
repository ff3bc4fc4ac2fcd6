"""Trains a network that answers once per sequence; it keeps the weights best on held-out ones."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fastlstm.errors import NonFiniteError
from fastlstm.runs.events import Observer
from fastlstm.sequence.data import SequenceBatch
from fastlstm.system.fields import check_values
from fastlstm.training.averaging import WeightAverage
from fastlstm.training.guard import bad_gradient
from fastlstm.training.schedule import learning_rate_factor

Loss = Callable[[Tensor, NDArray[np.int64]], Tensor]
"""The mean loss of answers ``(B, K)`` to the sequences of such numbers."""
_WARMUP, _COOLDOWN, _GRAD_CLIP, _BAD_STEPS = 0.02, 0.7, 1.0, 10
_EVALUATION_BATCH = 256


_BOUNDS: dict[str, tuple[float, float]] = {
    "epochs": (1, 10**9),
    "batch_size": (1, 10**9),
    "learning_rate": (0.0, 1e38),
    "weight_decay": (0.0, 10.0),
    "ema": (0.0, 0.999999),
    "patience": (0, 10**9),
    "seed": (0, 2**63 - 1),
    "held_out": (1e-9, 1 - 1e-9),
}


@dataclass(frozen=True)
class SequencePlan:
    """How to train.

    Attributes:
        epochs: passes over the training sequences, at most.
        batch_size: sequences per step.
        learning_rate: peak, of AdamW.
        weight_decay: decoupled.
        ema: decay of the averaged weights that are judged and kept; 0 keeps the last ones.
        patience: epochs without gain after which it ends; 0 never does.
        seed: of order and dropout.
        held_out: share of the sequences that decide when to end.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    ema: float
    patience: int
    seed: int
    held_out: float

    def __post_init__(self) -> None:
        check_values(self, _BOUNDS, {})


@dataclass(frozen=True)
class TrainingResult:
    """What came of it.

    Attributes:
        epochs: passes made.
        best_epoch: after which the kept weights were, from 1.
        best_loss: their mean loss on held-out sequences.
        seconds: wall clock.
    """

    epochs: int
    best_epoch: int
    best_loss: float
    seconds: float


class SequenceTrainer:
    """Trains a network by early stopping (Prechelt 1998).

    Args:
        model: on the CPU.
        read: gives the batch of such numbers.
        loss: of its answers.
        plan: how.
        emit: receives an "eval" event per epoch, a plain dict.
    """

    def __init__(
        self,
        model: nn.Module,
        read: Callable[[NDArray[np.int64]], SequenceBatch],
        loss: Loss,
        plan: SequencePlan,
        emit: Observer,
    ) -> None:
        self.model, self.plan, self.emit = model, plan, emit
        self._read, self._loss_of = read, loss
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=plan.learning_rate, weight_decay=plan.weight_decay
        )
        self._average = WeightAverage(model, plan.ema)
        self._bad = 0

    def train(self, train: NDArray[np.int64], held_out: NDArray[np.int64]) -> TrainingResult:
        """Runs to the end.

        Args:
            train: numbers of the sequences to learn from.
            held_out: of those that decide when to end.

        Raises:
            NonFiniteError: losses stayed NaN or infinite.
        """
        plan, started = self.plan, time.perf_counter()
        rng = np.random.default_rng(plan.seed)
        best, best_loss, best_epoch, epoch = self._copy(), math.inf, 0, 0
        while epoch < plan.epochs and not 0 < plan.patience <= epoch - best_epoch:
            order = rng.permutation(train)
            self.model.train()
            for first in range(0, len(order), plan.batch_size):
                done = (epoch + first / len(order)) / plan.epochs
                self._take_step(order[first : first + plan.batch_size], done)
            epoch += 1
            with self._average.applied():
                loss, kept = self._mean_loss(held_out), self._copy()
            if is_best := loss < best_loss:
                best, best_loss, best_epoch = kept, loss, epoch
            about = {"step": epoch, "split": "valid", "loss": loss, "is_best": is_best}
            self.emit({"event": "eval", **about, "elapsed_s": time.perf_counter() - started})
        if best_epoch == 0:
            raise NonFiniteError(
                "the held-out loss was never finite; lower the learning rate, or look at the values"
            )
        self.model.load_state_dict(best)
        self.model.eval()
        return TrainingResult(epoch, best_epoch, best_loss, time.perf_counter() - started)

    def _take_step(self, numbers: NDArray[np.int64], done: float) -> None:
        self._optimizer.zero_grad()
        loss = self._loss_of(self.model(*self._read(numbers)), numbers)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), _GRAD_CLIP)
        if not math.isfinite(float(loss.detach()) + float(norm)):
            self._bad += 1
            if self._bad >= _BAD_STEPS:
                culprit = bad_gradient(self.model) or "loss"
                raise NonFiniteError(
                    f"{culprit} was NaN or infinite {_BAD_STEPS} times in a row; lower the learning"
                    " rate"
                )
            return
        self._bad = 0
        for group in self._optimizer.param_groups:
            factor = learning_rate_factor(done, _WARMUP, _COOLDOWN)
            group["lr"] = self.plan.learning_rate * factor
        self._optimizer.step()
        self._average.update()

    @torch.no_grad()
    def _mean_loss(self, numbers: NDArray[np.int64]) -> float:
        self.model.eval()
        total = 0.0
        for first in range(0, len(numbers), _EVALUATION_BATCH):
            part = numbers[first : first + _EVALUATION_BATCH]
            total += float(self._loss_of(self.model(*self._read(part)), part)) * len(part)
        return total / len(numbers)

    def _copy(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
