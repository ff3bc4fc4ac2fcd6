"""Training a text model that is to be compressed: with a teacher, and published at the end only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastlstm.compression.distillation import FeatureMatch, Output, distillation_loss
from fastlstm.runs.events import Event
from fastlstm.text.data.lanes import Batch
from fastlstm.text.model import LanguageModel, State, reset_state
from fastlstm.text.stored_model import MATCHER
from fastlstm.text.task import TextTask

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer

MEASURING_S = 4.0
"""Kept of a budget for measuring speed and loading, beside scoring both models."""


@dataclass(frozen=True)
class Teaching:
    """How a student learns from a teacher.

    Attributes:
        model: the teacher, in evaluation mode on the student's device.
        temperature: divides the logits of both.
        alpha: share of the teacher in the loss.
    """

    model: LanguageModel
    temperature: float
    alpha: float


@dataclass(eq=False)
class CompressedTextTask(TextTask):
    """A language model that learns from a teacher, or only to live with pruning and rounding.

    Attributes:
        teaching: the teacher, or None.
        conclude: measures and publishes the best weights; returns what the `end` event holds.
        num_results: how many models it measures beside the source.
        num_scored: tokens that `conclude` scores with the source and with the result.
        teacher_s: seconds spent in the teacher's LSTM layers.
    """

    publishes_at_once = False

    teaching: Teaching | None = field(kw_only=True)
    conclude: Callable[[Trainer], Event] = field(kw_only=True)
    num_results: int = field(default=1, kw_only=True)
    num_scored: int = field(kw_only=True)
    teacher_s: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._nats: list[Tensor] = []
        self._num_targets = 1
        if self.teaching is not None:
            rows = self._state[0].shape[1]
            self._taught = self.teaching.model.initial_state(rows, device=self.device)

    def losses(self, batch: Batch, num_parts: int) -> Iterator[Tensor]:
        if self.teaching is None:
            yield from super().losses(batch, num_parts)
            return
        self._nats, self._num_targets = [], batch.y.numel()
        self._start, self._ends = reset_state(self._taught, batch.reset), list[State]()
        yield from super().losses(batch, num_parts)
        h, c = (torch.cat([end[k].float() for end in self._ends], dim=1) for k in range(2))
        self._taught = h, c

    def part_loss(self, x: Tensor, y: Tensor, state: State, part: slice) -> tuple[Tensor, State]:
        if self.teaching is None:
            return super().part_loss(x, y, state, part)
        teacher, x = self.teaching.model, x[:, part]
        started = time.perf_counter()
        with torch.no_grad():
            h, c = (s[:, part].contiguous() for s in self._start)
            taught, end = teacher.features(x, (h, c))
        self._ends.append(end)
        self.teacher_s += time.perf_counter() - started
        features, new_state = self.model.features(x, state)
        loss, nats = distillation_loss(
            Output(features.flatten(0, 1), self.model.output_weight, self.model.output.bias),
            Output(taught.flatten(0, 1), teacher.output_weight, teacher.output.bias),
            y[:, part].reshape(-1), self.teaching.temperature, self.teaching.alpha,
        )  # fmt: skip
        self._nats.append(nats)
        match = getattr(self.model, MATCHER, None)
        if isinstance(match, FeatureMatch):
            loss = loss + match(features.flatten(0, 1), taught.flatten(0, 1))
        return loss, new_state

    def step_metrics(self, loss: float) -> Event:
        """Returns bits per character of the text alone, whatever else is in the loss."""
        if self._nats:
            loss = float(torch.stack(self._nats).sum()) / self._num_targets
        return super().step_metrics(loss)

    def reset_state(self) -> None:
        super().reset_state()
        if self.teaching is not None:
            rows = self._state[0].shape[1]
            self._taught = self.teaching.model.initial_state(rows, device=self.device)

    def carried(self) -> dict[str, Tensor]:
        own = super().carried()
        if self.teaching is not None:
            own |= dict(zip(("teacher_h", "teacher_c"), self._taught, strict=True))
        return own

    def publish(self, weights: Mapping[str, Tensor], trainer: Trainer) -> None:
        """Does nothing: what `conclude` has measured is published."""

    def finish_s(self, unit_s: float) -> float:
        return self.report_s + self.num_results * (MEASURING_S + 2 * unit_s * self.num_scored)

    def finish(self, trainer: Trainer) -> Event:
        with trainer.progress.counted("measuring"):
            return self.conclude(trainer)
