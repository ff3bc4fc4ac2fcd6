"""The task of training a forecaster: windows from zero state, or chunks with carried state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlstm.errors import DataError, Stopped
from fastlstm.forecast.closing import Closing
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.chunk_loader import ChunkBatch, ChunkLoader
from fastlstm.forecast.data.scaled_windows import ScaledWindows
from fastlstm.forecast.data.window_index import WindowIndex
from fastlstm.forecast.data.window_loader import WindowBatch, WindowLoader
from fastlstm.forecast.files import description_files
from fastlstm.forecast.model.network import ForecastNetwork, RecurrentState
from fastlstm.forecast.plan import flop_per_window, training_loader
from fastlstm.runs.events import Event
from fastlstm.training.precision import autocast
from fastlstm.training.state import Progress
from fastlstm.training.task import Score, Task, Watch
from fastlstm.training.trainer import Trainer

EVALUATION_BATCH = 256


class PreparedBatch(NamedTuple):
    """Windows as the network takes them, on its device; see `BatchPart`."""

    values: Tensor
    num_targets: Tensor
    statics: Tensor | None = None


@dataclass(frozen=True)
class BatchPart:
    """Some rows of a batch.

    Attributes:
        rows: of the batch.
        values: as the network takes them.
        statics: or None.
        actual: values of the targets, shape ``(B * origins, h, C)``; NaN if missing.
        count: what the sum of the losses is divided by.
    """

    rows: slice
    values: Tensor
    statics: Tensor | None
    actual: Tensor
    count: float | Tensor


class ForecastTask(Task):
    """A network with a table; a stateful network has a loader of chunks."""

    name, unit = "forecast", "windows"
    num_sums = 2
    min_scored, max_scored = 256, 20_000
    forward_share = 1 / 3
    row_axis = {"hidden": 1, "cell": 1, "level": 0}  # noqa: RUF012
    may_be_nan = frozenset({"level"})  # where a target had no value yet
    model: ForecastNetwork
    loader: WindowLoader | ChunkLoader

    def __init__(
        self,
        config: ForecastConfig,
        network: ForecastNetwork,
        inputs: ScaledWindows,
        loader: WindowLoader | ChunkLoader,
        valid: WindowIndex,
        device: torch.device,
        closing: Closing,
    ) -> None:
        sizes = network.config
        self.model, self.loader, self.num_valid = network, loader, len(valid)
        self.flop_per_unit = flop_per_window(sizes)
        self.num_lanes = loader.num_places if isinstance(loader, ChunkLoader) else 0
        steps = config.tbptt or sizes.input_size
        rows = config.batch_size * config.accumulate / loader.share.size
        self.step_units = rows * steps / sizes.input_size
        self._origins = (config.tbptt or 0) // sizes.patch
        self._precision, self._device = config.precision, device
        self._measure = config.loss if config.output == "point" else "loss"
        self._inputs, self._valid, self.closing = inputs, valid, closing
        self._state: RecurrentState | None = None

    def changed(self, options: Any, stop: Callable[[], bool] | None = None) -> ForecastTask:
        closing = self.closing
        table, split = closing.dataset.table, closing.split
        loader = training_loader(options, self.model.config, table, split, stop)
        return ForecastTask(
            options, self.model, self._inputs, loader, self._valid, self._device, closing
        )

    def size(self, batch: WindowBatch | ChunkBatch) -> int:
        return batch.total * (self._origins or 1)

    def num_rows(self, batch: WindowBatch | ChunkBatch | PreparedBatch) -> int:
        return len(batch.values)

    def num_targets(self, batch: WindowBatch | ChunkBatch) -> int:
        return self._num_present(self._target(batch.values))

    def losses(
        self,
        batch: WindowBatch | ChunkBatch | PreparedBatch,
        parts: Sequence[slice],
        count: float | None = None,
    ) -> Iterator[Tensor]:
        state: RecurrentState | None = None
        divisor: float | Tensor | None = count
        if isinstance(batch, PreparedBatch):
            values, divisor, statics = batch
        else:
            values, statics = self._inputs.prepare(batch.values, batch.segments)
            values = values.to(self._device, non_blocking=True)
            statics = None if statics is None else statics.to(self._device, non_blocking=True)
            state = continued_state(self._state, batch, self._device)
        target, states = self._target(values), []
        divisor = max(self._num_present(target), 1) if divisor is None else divisor
        for own in parts:
            each = self._origins or 1
            part = BatchPart(
                own, values[own], None if statics is None else statics[own],
                target[own.start * each : own.stop * each], divisor,
            )  # fmt: skip
            with autocast(self._precision, self._device):
                if self._origins:
                    before = None if state is None else rows_of_state(state, own)
                    parameters, after = self.model.read_chunk(part.values, part.statics, before)
                    states.append(after.detach())
                else:
                    parameters = self.model(part.values, part.statics)
            yield self.part_loss(part, parameters.float())
        if self._origins:
            self._state = joined_state(states) if states else self._no_state()

    def graph_inputs(self, batch: WindowBatch | ChunkBatch) -> list[Tensor] | None:
        if self._origins:
            return None
        values, statics = self._inputs.prepare(batch.values, batch.segments)
        count = torch.tensor(float(max(self._num_present(self._target(values)), 1)))
        return [values, count] if statics is None else [values, count, statics]

    def graph_batch(
        self, batch: WindowBatch | ChunkBatch, inputs: Sequence[Tensor]
    ) -> PreparedBatch:
        return PreparedBatch(*inputs)

    def _no_state(self) -> RecurrentState:
        """Returns the state of no rows: what a process has that got none of a small batch."""
        config = self.model.config
        cells = torch.zeros(config.num_layers, 0, config.hidden_size, device=self._device)
        return RecurrentState(cells, cells, torch.zeros(0, config.num_targets, device=self._device))

    def part_loss(self, part: BatchPart, parameters: Tensor) -> Tensor:
        """Returns the loss of a part of a batch, its share of the mean over the whole, for
        parameters ``(B * origins, h, C, num_parameters)``."""
        return self._summed(parameters, part.actual) / part.count

    def _target(self, values: Tensor) -> Tensor:
        """Returns the actual values, shape ``(B * origins, h, C)``."""
        config = self.model.config
        if self._origins:
            return self.model.horizons(values[..., : config.num_targets], self._origins)
        return values[:, config.input_size :, : config.num_targets]

    def _num_present(self, target: Tensor) -> int:
        if not self.model.config.has_missing:
            return target.numel()
        return int((~target.isnan()).sum())

    def _summed(self, parameters: Tensor, target: Tensor) -> Tensor:
        """Returns the sum of the losses of the present values."""
        if not self.model.config.has_missing:
            return self.model.output.loss(parameters, target).sum()
        losses = self.model.output.loss(parameters, target.nan_to_num(0.0))
        return torch.where(target.isnan(), 0.0, losses).sum()

    def num_blocks(self, limit: int) -> int:
        return -(-min(limit, len(self._valid)) // EVALUATION_BATCH)

    @torch.no_grad()
    def evaluate_blocks(
        self, limit: int, blocks: range, stop: Callable[[], bool] | None, watch: Watch | None
    ) -> Tensor:
        config, rows = self.model.config, self._valid.rows(limit)
        own = rows[blocks.start * EVALUATION_BATCH : blocks.stop * EVALUATION_BATCH]
        self.model.eval()
        sums, done = list[tuple[float, int]](), 0
        for values, statics in self._inputs.read(own, config, EVALUATION_BATCH):
            if stop is not None and stop():
                raise Stopped("stopped while evaluating")
            values = values.to(self._device)
            static = None if statics is None else statics.to(self._device)
            with autocast(self._precision, self._device):
                parameters = self.model(values, static).float()
            target = values[:, config.input_size :, : config.num_targets]
            sums.append((float(self._summed(parameters, target)), self._num_present(target)))
            done += len(values)
            if watch is not None:
                watch(done, len(own))
        return torch.tensor(sums, dtype=torch.float64).reshape(-1, self.num_sums)

    def score(self, limit: int, sums: Tensor, seconds: float) -> Score:
        total, count = (math.fsum(column) for column in sums.T.tolist())
        if not count:
            raise DataError(
                "the validation part has no value of the targets; give a longer one, or fewer"
                " targets"
            )
        return Score(total / count, min(limit, len(self._valid)))

    def files(self) -> dict[str, bytes]:
        return description_files(self.closing.stored)

    def publish(self, weights: Mapping[str, Tensor], trainer: Trainer) -> None:
        self.closing.publish(weights)

    def reset_state(self) -> None:
        self._state = None

    def carried(self) -> dict[str, Tensor]:
        return {} if self._state is None else self._state._asdict()

    def restore_carried(self, carried: Mapping[str, Tensor]) -> None:
        self._state = None
        if carried:
            self._state = restored_state(carried, self.model, self._device)

    def finish_s(self, unit_s: float) -> float:
        return self.closing.seconds(unit_s)

    def finish(self, trainer: Trainer) -> Event:
        self.model.cpu()
        return self.closing.finish(trainer)

    def totals(self, progress: Progress) -> Event:
        return {"measure": self._measure}


def continued_state(
    state: RecurrentState | None, batch: WindowBatch | ChunkBatch, device: torch.device
) -> RecurrentState | None:
    """Returns the state that a batch of chunks begins with, of that after the batch before; None is
    zero in all rows, as for windows."""
    if state is None or not isinstance(batch, ChunkBatch) or not batch.continues.any():
        return None
    # An epoch's last batch may have fewer lanes than the next one.
    return state.where(torch.from_numpy(batch.continues).to(device))


def rows_of_state(state: RecurrentState, part: slice) -> RecurrentState:
    """Returns the state of some rows."""
    each = state.hidden.shape[1] // len(state.level)
    cells = slice(part.start * each, part.stop * each)
    hidden, cell = (t[:, cells].contiguous() for t in (state.hidden, state.cell))
    return RecurrentState(hidden, cell, state.level[part])


def joined_state(states: list[RecurrentState]) -> RecurrentState:
    """Returns the state of all rows, float32 as it is carried."""
    hidden, cell, level = zip(*states, strict=True)
    return RecurrentState(torch.cat(hidden, 1), torch.cat(cell, 1), torch.cat(level))


def restored_state(
    carried: Mapping[str, Tensor], network: ForecastNetwork, device: torch.device
) -> RecurrentState:
    """Returns the state of a checkpoint; raises ValueError if it does not fit the network."""
    state, config = (
        RecurrentState(*(carried[name] for name in RecurrentState._fields)),
        network.config,
    )
    each = (config.num_layers, len(state.level) * network.num_channels)
    if not (
        state.hidden.shape == state.cell.shape == (*each, config.hidden_size)
        and state.level.shape[1:] == (config.num_targets,)
    ):
        raise ValueError("the carried state does not fit the network")
    return RecurrentState(*(part.to(device) for part in state))
