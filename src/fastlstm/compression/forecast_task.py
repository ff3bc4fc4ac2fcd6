"""Trains a compressed forecaster, with or without a teacher."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastlstm.errors import ConfigError
from fastlstm.forecast.data.window_loader import ChunkBatch, WindowBatch
from fastlstm.forecast.files import StoredForecaster, read_forecaster
from fastlstm.forecast.model.network import ForecastNetwork, RecurrentState
from fastlstm.forecast.model.outputs import NegativeBinomial, Output, Quantiles, StudentT
from fastlstm.forecast.task import (
    BatchPart,
    ForecastTask,
    continued_state,
    joined_state,
    restored_state,
    rows_of_state,
)
from fastlstm.runs.events import Event
from fastlstm.training.precision import autocast
from fastlstm.training.trainer import Trainer

_NUM_SAMPLES = 4
_TEACHER = "teacher."
_SIZES = (
    *("input_size", "horizon", "num_targets", "num_past", "num_future", "categories"),
    *("num_static", "static_categories", "has_missing", "output", "stateful"),
)


class CompressedForecastTask(ForecastTask):
    """A forecaster that learns from its table and from a teacher, and is published at the end only.

    Args:
        *args: the arguments of `ForecastTask`.
        alpha: share of the teacher in the loss.
        finished: makes the forecaster to publish from the one with the best weights.
        about: returns the entries of the `end` event.
        measuring_s: seconds of a budget for `approve`.
    """

    may_be_nan = frozenset({"level", f"{_TEACHER}level"})

    def __init__(
        self, *args: Any, teacher: ForecastNetwork | None, alpha: float,
        finished: Callable[[StoredForecaster], StoredForecaster],
        approved: Callable[
            [StoredForecaster, Trainer], tuple[StoredForecaster, Mapping[str, bytes]] | None
        ],
        about: Callable[[], Event],
        measuring_s: float,
    ) -> None:  # fmt: skip
        super().__init__(*args)
        self._teacher = None if teacher is None else teacher.to(self._device).eval()
        self._alpha, self._finished, self._about = alpha, finished, about
        self._measuring_s, self._approved = measuring_s, approved
        self._teacher_state: RecurrentState | None = None
        self._start_state: RecurrentState | None = None
        self._teacher_states: list[RecurrentState] = []
        self._num_values, self.teacher_s = 0, 0.0

    def graph_inputs(self, batch: WindowBatch | ChunkBatch) -> list[Tensor] | None:
        return None  # a recorded graph has no place to time the teacher

    def losses(
        self, batch: Any, parts: Sequence[slice], count: float | None = None
    ) -> Iterator[Tensor]:
        config = self.model.config
        self._num_values = self.size(batch) * config.horizon * config.num_targets
        self._start_state = continued_state(self._teacher_state, batch, self._device)
        self._teacher_states = []
        yield from super().losses(batch, parts, count)
        if self._teacher_states:
            self._teacher_state = joined_state(self._teacher_states)

    def part_loss(self, part: BatchPart, parameters: Tensor) -> Tensor:
        own = super().part_loss(part, parameters)
        if self._teacher is None:
            return own
        started = time.perf_counter()
        with torch.no_grad(), autocast(self._precision, self._device):
            answers = self._answers(self._teacher, part).float()
        self.teacher_s += time.perf_counter() - started
        learnt = distance(self.model.output, parameters, answers).sum() / self._num_values
        return self._alpha * learnt + (1 - self._alpha) * own

    def _answers(self, teacher: ForecastNetwork, part: BatchPart) -> Tensor:
        """Returns the parameters that the teacher predicts; carries its state."""
        if not self._origins:
            answers: Tensor = teacher(part.values, part.statics)
            return answers
        start = None if self._start_state is None else rows_of_state(self._start_state, part.rows)
        parameters, after = teacher.read_chunk(part.values, part.statics, start)
        self._teacher_states.append(after)
        return parameters

    def reset_state(self) -> None:
        super().reset_state()
        self._teacher_state = None

    def carried(self) -> dict[str, Tensor]:
        state = self._teacher_state
        own = {} if state is None else state._asdict()
        return {**super().carried(), **{f"{_TEACHER}{name}": t for name, t in own.items()}}

    def restore_carried(self, carried: Mapping[str, Tensor]) -> None:
        teachers = {n.removeprefix(_TEACHER): t for n, t in carried.items() if _TEACHER in n}
        super().restore_carried({n: t for n, t in carried.items() if _TEACHER not in n})
        self._teacher_state = None
        if teachers and self._teacher is not None:
            self._teacher_state = restored_state(teachers, self._teacher, self._device)

    def publish(self, weights: Mapping[str, Tensor], trainer: Trainer) -> None:
        """Publishes nothing before `finish`."""

    def finish_s(self, unit_s: float) -> float:
        return super().finish_s(unit_s) + self._measuring_s

    def approve(
        self, stored: StoredForecaster, trainer: Trainer
    ) -> tuple[StoredForecaster, Mapping[str, bytes]] | None:
        return self._approved(stored, trainer)

    def finish(self, trainer: Trainer) -> Event:
        self.model.cpu()
        self.stored = self._finished(self.stored)
        return {**super().finish(trainer), **self._about()}


def distance(output: Output, parameters: Tensor, answers: Tensor) -> Tensor:
    """Returns the distance of forecasts from those of a teacher, one number per value, ``(…)``.

    For a point it is the loss of the output, with the teacher's point as the target. For quantiles
    it is the mean absolute difference per level. For a distribution it is the cross-entropy with
    the teacher's distribution (KL divergence plus a constant), estimated from 4 random values
    because Student's t and the negative binomial have no closed form. `parameters` of the student
    and `answers` of the teacher are ``(…, num_parameters)``.
    """
    if isinstance(output, Quantiles):
        return (parameters - answers).abs().mean(-1)
    if isinstance(output, StudentT | NegativeBinomial):
        values = output.samples(answers, _NUM_SAMPLES)
        return output.loss(parameters[..., None, :], values).mean(-1)
    return output.loss(parameters, answers[..., 0])


def read_teacher(path: str, student: StoredForecaster) -> StoredForecaster:
    """Reads a teacher; ConfigError if it does not read the windows of the student."""
    teacher = read_forecaster(path)
    own, other = student.network.config, teacher.network.config
    names = [*_SIZES, *(("patch",) if own.stateful else ())]
    pairs = [(name, getattr(other, name), getattr(own, name)) for name in names]
    theirs, ours = (str(s.schema.timeline.frequency) for s in (teacher, student))
    pairs += [
        ("columns", teacher.schema.columns, student.schema.columns),
        ("static columns", teacher.config.static, student.config.static),
        ("categories", teacher.schema.categories, student.schema.categories),
        ("frequency", theirs, ours),
    ]
    for name, theirs, ours in pairs:
        if theirs != ours:
            raise _unfit(path, f"has {name} {theirs!s:.60} and the student {ours!s:.60}")
    for which in ("mean", "std"):
        if not np.array_equal(getattr(teacher.scaler, which), getattr(student.scaler, which)):
            raise _unfit(path, "was trained on another table: it scales the columns differently")
    of_teacher, own_series = (s.series and s.series.to_json() for s in (teacher, student))
    if of_teacher != own_series:
        raise _unfit(path, "was trained on other series: it scales them differently")
    return teacher


def _unfit(path: str, why: str) -> ConfigError:
    return ConfigError(
        f"`distil={path!r}`: the teacher {why}; it must read the same windows and forecast the same"
        " steps: leave it out or name another"
    )
