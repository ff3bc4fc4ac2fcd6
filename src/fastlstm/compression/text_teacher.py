"""A teacher of a text model: it reads the batches that the student learns from."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastlstm.compression.distillation import Logits, Output
from fastlstm.text.data.lanes import Batch
from fastlstm.text.data.loader import TextLoader
from fastlstm.text.model import LanguageModel, reset_state
from fastlstm.training.precision import autocast

MAX_KEPT_BYTES = 2**30
"""Of logits that are kept: those of 5 million characters, where 100 differ."""
_CHUNK = 1024
"""Tokens that are read at once where no batch holds them."""


class Teaching(NamedTuple):
    """How a student learns from a teacher.

    Attributes:
        model: the teacher, in evaluation mode on the student's device.
        temperature: divides the logits of both.
        alpha: share of the teacher in the loss.
        needs_features: whether the student's features are compared with the teacher's.
    """

    model: LanguageModel
    temperature: float
    alpha: float
    needs_features: bool = False


class TextTeacher(ABC):
    """What a teacher predicts for the batches of a training, without gradients.

    Attributes:
        seconds: spent in it.
    """

    def __init__(self, teaching: Teaching, precision: str) -> None:
        self._model, self._precision, self.seconds = teaching.model, precision, 0.0
        self._device = teaching.model.output.bias.device

    @abstractmethod
    def read(self, batch: Batch) -> None:
        """Makes `output` that of a batch; may be called again with the same batch."""

    @abstractmethod
    def output(self, part: slice) -> Logits | Output:
        """Returns the predictions of some lanes, N = T B rows in the order `(T, B)`."""

    def advance(self) -> None:  # noqa: B027
        """Ends the batch: the next one is read from the state after it."""

    def reset_state(self) -> None:  # noqa: B027
        """Reads the next batch from zero state."""

    def carried(self) -> dict[str, Tensor]:
        """Returns the tensors that a checkpoint holds."""
        return {}

    @contextmanager
    def _reading(self) -> Iterator[None]:
        started = time.perf_counter()
        with torch.no_grad(), autocast(self._precision, self._device):
            yield
        self.seconds += time.perf_counter() - started


class ReadingTeacher(TextTeacher):
    """Reads every batch, with its state carried as the student's is."""

    def __init__(self, teaching: Teaching, precision: str, num_lanes: int) -> None:
        super().__init__(teaching, precision)
        self._state = self._end = self._model.initial_state(num_lanes, device=self._device)
        self._features = torch.empty(0)

    def read(self, batch: Batch) -> None:
        with self._reading():
            start = reset_state(self._state, batch.reset)
            self._features, self._end = self._model.features(batch.x.to(self._device), start)

    def output(self, part: slice) -> Logits | Output:
        features = self._features[:, part].flatten(0, 1)
        return Output(features, self._model.output_weight, self._model.output.bias)

    def advance(self) -> None:
        self._state = self._end[0].float(), self._end[1].float()

    def reset_state(self) -> None:
        for tensor in self._state:
            tensor.zero_()

    def carried(self) -> dict[str, Tensor]:
        return dict(zip(("teacher_h", "teacher_c"), self._state, strict=True))


class RememberingTeacher(TextTeacher):
    """Reads the batches of the first epoch, and keeps the logits of the text for the epochs after.

    A resumed training reads that epoch again, as far as it came: checkpoints hold nothing of it.
    """

    def __init__(self, teaching: Teaching, precision: str, loader: TextLoader) -> None:
        super().__init__(teaching, precision)
        self._ids, self._batches = loader.ids, loader.first_epoch()
        self._num_batches, self._num_read = loader.steps_per_epoch, 0
        self._state = self._model.initial_state(1, device=self._device)
        size = len(self._ids), self._model.config.vocab_size
        self._logits = torch.empty(size, dtype=torch.float16, device=self._device)
        self._positions = torch.empty(0, dtype=torch.int64)

    def read(self, batch: Batch) -> None:
        with self._reading():
            needed = batch.index + 1 if batch.epoch == 0 else self._num_batches
            while self._num_read < needed:
                self._read_next()
        self._positions = batch.positions().to(self._device)

    def output(self, part: slice) -> Logits | Output:
        return Logits(self._logits[self._positions[:, part].flatten()])

    def _read_next(self) -> None:
        """Reads the next batch of the first epoch; with the last one what no batch holds, too."""
        batch = next(self._batches)
        positions = batch.positions()
        if self._num_read == 0:
            self._read_tokens(torch.arange(int(positions[0, 0])).unsqueeze(1))
            self._state = self._model.initial_state(len(batch.reset), device=self._device)
        self._state = reset_state(self._state, batch.reset)
        self._read_tokens(positions)
        self._num_read += 1
        if self._num_read == self._num_batches:
            after = torch.arange(int(positions[-1, -1]) + 1, len(self._ids)).unsqueeze(1)
            h, c = (tensor[:, -1:].contiguous() for tensor in self._state)
            self._state = h, c
            self._read_tokens(after)

    def _read_tokens(self, positions: Tensor) -> None:
        """Reads the tokens at some positions of the text, `(T, B)`, from the state before them."""
        for rows in positions.split(_CHUNK):
            if len(rows):
                tokens = torch.from_numpy(self._ids[rows.numpy()].astype(np.int64))
                features, (h, c) = self._model.features(tokens.to(self._device), self._state)
                self._state = h.float(), c.float()
                self._logits[rows.to(self._device)] = self._model.logits(features).half()


def open_teacher(teaching: Teaching, precision: str, loader: TextLoader) -> TextTeacher:
    """Returns a teacher that keeps the text's logits where that is possible, or one that reads."""
    num_bytes = 2 * len(loader.ids) * teaching.model.config.vocab_size
    if loader.is_in_order and not teaching.needs_features and num_bytes <= MAX_KEPT_BYTES:
        return RememberingTeacher(teaching, precision, loader)
    return ReadingTeacher(teaching, precision, loader.num_lanes)
