"""A teacher of a text model: it reads the batches that the student learns from."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastlstm.compression.distillation import Logits, Output
from fastlstm.text.data.lanes import Batch
from fastlstm.text.data.loader import TextLoader
from fastlstm.text.model import LanguageModel, State, reset_state
from fastlstm.training.precision import autocast
from fastlstm.training.task import Watch, even_parts

MAX_KEPT_BYTES = 2**30
"""Of logits that are kept: those of 5 million characters, where 100 differ."""
_LARGEST = 65_504.0
"""In float16."""
_CHUNK = 1024
"""Tokens that are read at once where no batch holds them."""


class Teaching(NamedTuple):
    """How a student learns from a teacher, a model in evaluation mode on the student's device.

    `temperature` divides the logits of both, `alpha` is the teacher's share in the loss.
    """

    model: LanguageModel
    temperature: float
    alpha: float
    needs_features: bool = False


class ReadingTeacher:
    """What a teacher predicts for the batches of a training: it reads each, its state carried.

    A step is `read`, `output` of each part of the lanes once, `advance`; one that is tried again
    begins with `read`.

    Attributes:
        seconds: spent in it.
    """

    def __init__(self, teaching: Teaching, precision: str, num_lanes: int) -> None:
        self._model, self._precision, self.seconds = teaching.model, precision, 0.0
        self._device = teaching.model.output.bias.device
        self._state = self._start = self._model.initial_state(num_lanes, device=self._device)
        self._x, self._ends = torch.empty(0), list[State]()

    def read(self, batch: Batch, parts: Sequence[slice]) -> None:
        """Makes `output` that of a batch, which is read in parts where memory is short."""
        self._x, self._ends = batch.x.to(self._device), []
        self._start = reset_state(self._state, batch.reset)

    def output(self, part: slice) -> Logits | Output:
        """Returns the predictions of some lanes, N = T B rows in the order `(T, B)`."""
        with self._reading():
            features, end = self._model.features(self._x[:, part], lanes_of(self._start, part))
        self._ends.append(end)
        return Output(features.flatten(0, 1), self._model.output_weight, self._model.output.bias)

    def advance(self) -> None:
        """Ends the batch: the next one is read from the state after it."""
        self._state = joined(self._ends)

    def catch_up(self, loader: TextLoader, num_parts: int, watch: Watch | None) -> None:
        """Makes up for what was read before the position of the loader.

        Args:
            loader: of a resumed training.
            num_parts: in which batches were read.
            watch: called with the tokens read so far and in all.

        Raises:
            Stopped: the loader was asked to stop.
        """

    def reset_state(self) -> None:
        """Reads the next batch from zero state."""
        for tensor in self._state:
            tensor.zero_()

    def carried(self) -> dict[str, Tensor]:
        """Returns the tensors that a checkpoint holds."""
        return dict(zip(("teacher_h", "teacher_c"), self._state, strict=True))

    @contextmanager
    def _reading(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            with torch.no_grad(), autocast(self._precision, self._device):
                yield
        finally:
            self.seconds += time.perf_counter() - started


class RememberingTeacher(ReadingTeacher):
    """Reads the batches of the first epoch, and keeps the logits of the text for the epochs after.

    A resumed training reads that epoch again, as far as it came: checkpoints hold nothing of it.
    The logits are in the memory of the CPU, as float16.
    """

    def __init__(self, teaching: Teaching, precision: str, loader: TextLoader) -> None:
        super().__init__(teaching, precision, loader.num_lanes)
        self._ids, self._num_batches, self._num_read = loader.ids, loader.steps_per_epoch, 0
        size = len(self._ids), self._model.config.vocab_size
        self._logits = torch.empty(size, dtype=torch.float16)
        self._positions = torch.empty(0, dtype=torch.int64)

    def read(self, batch: Batch, parts: Sequence[slice]) -> None:
        if batch.epoch == 0 and batch.index == self._num_read:
            with self._reading():
                self._read_next(batch, parts)
        self._positions = batch.positions()

    def output(self, part: slice) -> Logits | Output:
        return Logits(self._logits[self._positions[:, part].flatten()].to(self._device))

    def advance(self) -> None:
        """Does nothing: `read` moves on."""

    def reset_state(self) -> None:
        """Does nothing: the first epoch is read once."""

    def carried(self) -> dict[str, Tensor]:
        return {}

    def catch_up(self, loader: TextLoader, num_parts: int, watch: Watch | None) -> None:
        position = loader.state_dict()
        needed = position["index"] if position["epoch"] == 0 else self._num_batches
        if self._num_read >= needed:
            return
        for batch in loader.first_epoch():
            if batch.index == needed:
                break
            if batch.index == self._num_read:
                parts = even_parts(len(batch.reset), num_parts)
                with self._reading():
                    self._read_next(batch, parts)
            if watch is not None:
                size = batch.x.numel()
                watch((batch.index + 1) * size, needed * size)

    def _read_next(self, batch: Batch, parts: Sequence[slice]) -> None:
        """Reads the next batch of the first epoch; with the first and last what is around them."""
        positions, ends = batch.positions(), list[State]()
        if batch.index == 0:
            self._read_rest(range(int(positions[0, 0])), self._model.initial_state(1))
        start = reset_state(self._state, batch.reset)
        for part in parts:
            ends.append(self._read_tokens(positions[:, part], lanes_of(start, part)))
        end = joined(ends)
        if batch.index + 1 == self._num_batches:
            rest = range(int(positions[-1, -1]) + 1, len(self._ids))
            self._read_rest(rest, lanes_of(end, slice(-1, None)))
        self._state, self._num_read = end, self._num_read + 1

    def _read_rest(self, positions: range, state: State) -> None:
        """Reads tokens that no batch of the first epoch holds."""
        for rows in torch.tensor(positions, dtype=torch.int64).unsqueeze(1).split(_CHUNK):
            if len(rows):
                state = self._read_tokens(rows, state)

    def _read_tokens(self, positions: Tensor, state: State) -> State:
        """Keeps the logits of some tokens, `(T, B)`; returns the state after them."""
        tokens = torch.from_numpy(self._ids[positions.numpy()].astype(np.int64)).to(self._device)
        h, c = (tensor.to(self._device) for tensor in state)
        features, end = self._model.features(tokens, (h, c))
        logits = self._model.logits(features).float().clamp_(-_LARGEST, _LARGEST)
        self._logits[positions] = logits.half().cpu()
        return end


def open_teacher(teaching: Teaching, precision: str, loader: TextLoader) -> ReadingTeacher:
    """Returns a teacher that keeps the text's logits where that is possible, or one that reads."""
    num_bytes = 2 * len(loader.ids) * teaching.model.config.vocab_size
    if loader.is_in_order and not teaching.needs_features and num_bytes <= MAX_KEPT_BYTES:
        return RememberingTeacher(teaching, precision, loader)
    return ReadingTeacher(teaching, precision, loader.num_lanes)


def lanes_of(state: State, part: slice) -> State:
    """Returns the state `(L, B, H)` of some lanes."""
    return state[0][:, part].contiguous(), state[1][:, part].contiguous()


def joined(states: Sequence[State]) -> State:
    """Returns the state of lanes whose parts are given in order, in float32."""
    h, c = (torch.cat([state[k].float() for state in states], dim=1) for k in range(2))
    return h, c
