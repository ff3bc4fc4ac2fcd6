"""Training a text model that is to be compressed: with a teacher, and published at the end only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastlstm.compression.distillation import FeatureMatch, Output, distillation_loss
from fastlstm.compression.text_teacher import ReadingTeacher, Teaching, open_teacher
from fastlstm.runs.events import Event
from fastlstm.text.data.lanes import Batch
from fastlstm.text.model import State
from fastlstm.text.stored_model import MATCHER
from fastlstm.text.task import TextTask
from fastlstm.training.task import Watch

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer

MEASURING_S = 4.0
"""Kept of a budget for measuring speed and loading, beside scoring both models."""


@dataclass(eq=False)
class CompressedTextTask(TextTask):
    """A language model that learns from a teacher, or only to live with pruning and rounding.

    Attributes:
        teaching: the teacher, or None.
        watch: of a resumed training, called while the teacher reads again what it had read.
        conclude: measures and publishes the best weights; returns what the `end` event holds.
        num_results: how many models it measures beside the source.
        num_scored: tokens that `conclude` scores with the source and with the result.
    """

    publishes_at_once = False

    teaching: Teaching | None = field(kw_only=True)
    watch: Watch | None = field(default=None, kw_only=True)
    conclude: Callable[[Trainer], Event] = field(kw_only=True)
    num_results: int = field(default=1, kw_only=True)
    num_scored: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._nats: list[Tensor] = []
        self._num_nats = 1
        self.teacher: ReadingTeacher | None = None
        if self.teaching is not None:
            self.teacher = open_teacher(self.teaching, self.config.precision, self.loader)

    def losses(
        self, batch: Batch, parts: Sequence[slice], count: float | None = None
    ) -> Iterator[Tensor]:
        if self.teacher is None:
            yield from super().losses(batch, parts, count)
            return
        self._nats, self._num_nats = [], batch.y.numel()
        self.teacher.read(batch, parts)
        yield from super().losses(batch, parts, count)
        self.teacher.advance()

    def graph_inputs(self, batch: Batch) -> list[Tensor] | None:
        return None if self.teacher is not None else super().graph_inputs(batch)

    def part_loss(self, x: Tensor, y: Tensor, state: State, part: slice) -> tuple[Tensor, State]:
        if self.teaching is None or self.teacher is None:
            return super().part_loss(x, y, state, part)
        taught = self.teacher.output(part)
        features, new_state = self.model.features(x[:, part], state)
        loss, nats = distillation_loss(
            Output(features.flatten(0, 1), self.model.output_weight, self.model.output.bias),
            taught, y[:, part].reshape(-1), self.teaching.temperature, self.teaching.alpha,
        )  # fmt: skip
        self._nats.append(nats)
        match = getattr(self.model, MATCHER, None)
        if isinstance(match, FeatureMatch):
            assert isinstance(taught, Output)
            loss = loss + match(features.flatten(0, 1), taught.features)
        return loss, new_state

    @property
    def teacher_s(self) -> float:
        """Seconds spent in the teacher, in all starts of the run."""
        return 0.0 if self.teacher is None else self.teacher.seconds

    @teacher_s.setter
    def teacher_s(self, seconds: float) -> None:
        assert self.teacher is not None
        self.teacher.seconds = seconds

    def step_metrics(self, loss: float) -> Event:
        """Returns bits per character of the text alone, whatever else is in the loss."""
        if self._nats:
            loss = float(torch.stack(self._nats).sum()) / self._num_nats
        return super().step_metrics(loss)

    def reset_state(self) -> None:
        super().reset_state()
        if self.teacher is not None:
            self.teacher.reset_state()

    def carried(self) -> dict[str, Tensor]:
        return super().carried() | ({} if self.teacher is None else self.teacher.carried())

    def restore_carried(self, carried: Mapping[str, Tensor]) -> None:
        super().restore_carried(carried)
        if self.teacher is not None:
            self.teacher.catch_up(self.loader, self.config.accumulate, self.watch)

    def publish(self, weights: Mapping[str, Tensor], trainer: Trainer) -> None:
        """Does nothing: what `conclude` has measured is published."""

    def finish_s(self, unit_s: float) -> float:
        return self.report_s + self.num_results * (MEASURING_S + 2 * unit_s * self.num_scored)

    def finish(self, trainer: Trainer) -> Event:
        return self.conclude(trainer)
