"""The task of a forecaster: its training, then calibration, files and scores on the test part.

Training reads windows from zero state, or chunks with carried state. Calibration and scores each
have a share of a budget; if that share is too small, they read fewer windows and say so.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlstm.errors import DataError, Stopped
from fastlstm.forecast.calibration import MIN_CALIBRATED, Calibration, calibrate
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.error_measures import QuantileScores
from fastlstm.forecast.data.scaled_windows import ScaledWindows
from fastlstm.forecast.data.splits import Split
from fastlstm.forecast.data.window_index import spread_out
from fastlstm.forecast.data.window_loader import ChunkBatch, ChunkLoader, WindowBatch, WindowLoader
from fastlstm.forecast.evaluation import (
    coverage_note,
    evaluate_forecasts,
    evaluation_events,
    num_test_windows,
)
from fastlstm.forecast.files import StoredForecaster, description_files, forecaster_files
from fastlstm.forecast.model.network import ForecastNetwork, RecurrentState
from fastlstm.forecast.plan import flop_per_window, training_loader
from fastlstm.forecast.ridge import MAX_AVERAGED, best_share
from fastlstm.runs.events import Event
from fastlstm.training.precision import autocast
from fastlstm.training.session import RunSession
from fastlstm.training.state import Progress
from fastlstm.training.task import Score, Task, Watch
from fastlstm.training.trainer import CLOSING_S, Trainer

EVALUATION_BATCH = 256
_FINAL_SHARE, _EARLY_SHARE, _TEST_SHARE = 0.1, 0.02, 0.15
"""Largest shares of a budget: for the last calibration, an earlier one, and the test part."""
_CALIBRATION_COST, _TEST_COST = 1.5, 2.5
"""Time per window, relative to a forecast (ETTh1, 96 steps of 7 targets)."""


class PreparedBatch(NamedTuple):
    """Windows as the network reads them, on its device; see `BatchPart`."""

    values: Tensor
    num_targets: Tensor
    statics: Tensor | None = None


@dataclass(frozen=True)
class BatchPart:
    """Some rows of a batch, as the network reads them.

    Attributes:
        rows: places of these rows in the batch.
        actual: values of the targets, shape ``(B * origins, h, C)``; NaN if missing.
        count: divisor of the summed losses.
    """

    rows: slice
    values: Tensor
    statics: Tensor | None
    actual: Tensor
    count: float | Tensor


class ForecastTask(Task):
    """A forecaster and its table; a stateful network has a loader of chunks.

    If `session` has no run directory, nothing is written or evaluated. `budget_s` are the seconds
    of the whole run.

    Attributes:
        stored: the forecaster to train; after `finish` with the best weights, calibrated.
        is_averaged: average the forecast with the linear path's if the average has a smaller loss.
    """

    name, unit = "forecast", "windows"
    num_sums = 2
    min_scored, max_scored = 256, 20_000
    forward_share = 1 / 3
    row_axis = {"hidden": 1, "cell": 1, "level": 0}  # noqa: RUF012
    may_be_nan = frozenset({"level"})  # where a target had no value yet
    is_averaged = False
    model: ForecastNetwork
    loader: WindowLoader | ChunkLoader

    def __init__(
        self,
        session: RunSession,
        stored: StoredForecaster,
        dataset: SeriesDataset,
        split: Split,
        inputs: ScaledWindows,
        loader: WindowLoader | ChunkLoader,
        device: torch.device,
        budget_s: float | None = None,
    ) -> None:
        config, sizes = stored.config, stored.network.config
        self.session, self.stored, self.dataset, self.split = session, stored, dataset, split
        self.inputs, self.model, self.loader = inputs, stored.network, loader
        self.budget_s = budget_s
        self.valid = split.windows(dataset.table, "valid", sizes.input_size, sizes.horizon)
        self.num_valid = len(self.valid)
        self.flop_per_unit = flop_per_window(sizes)
        self.num_lanes = loader.num_places if isinstance(loader, ChunkLoader) else 0
        steps = config.tbptt or sizes.input_size
        rows = config.batch_size * config.accumulate / loader.share.size
        self.step_units = rows * steps / sizes.input_size
        self._origins = (config.tbptt or 0) // sizes.patch
        self._precision, self._device = config.precision, device
        self._measure = config.loss if config.output == "point" else "loss"
        self._state: RecurrentState | None = None
        tested = num_test_windows(dataset, split, sizes)
        self._num_tested = min(tested, MIN_CALIBRATED) if session.run is None else tested
        self._known: tuple[Mapping[str, Tensor], Calibration] | None = None

    def changed(self, options: Any, stop: Callable[[], bool] | None = None) -> ForecastTask:
        loader = training_loader(options, self.model.config, self.dataset.table, self.split, stop)
        return ForecastTask(
            self.session, dataclasses.replace(self.stored, config=options), self.dataset,
            self.split, self.inputs, loader, self._device, self.budget_s,
        )  # fmt: skip

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
            values, statics = self.inputs.prepare(batch.values, batch.segments)
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
                    states.append(RecurrentState(*(tensor.detach() for tensor in after)))
                else:
                    parameters = self.model(part.values, part.statics)
            yield self.part_loss(part, parameters.float())
        if self._origins:
            self._state = joined_state(states) if states else self._no_state()

    def graph_inputs(self, batch: WindowBatch | ChunkBatch) -> list[Tensor] | None:
        if self._origins:
            return None
        values, statics = self.inputs.prepare(batch.values, batch.segments)
        count = torch.tensor(float(max(self._num_present(self._target(values)), 1)))
        return [values, count] if statics is None else [values, count, statics]

    def graph_batch(
        self, batch: WindowBatch | ChunkBatch, inputs: Sequence[Tensor]
    ) -> PreparedBatch:
        return PreparedBatch(*inputs)

    def _no_state(self) -> RecurrentState:
        """Returns the state of a process without rows of a small batch."""
        config = self.model.config
        cells = torch.zeros(config.num_layers, 0, config.hidden_size, device=self._device)
        return RecurrentState(cells, cells, torch.zeros(0, config.num_targets, device=self._device))

    def part_loss(self, part: BatchPart, parameters: Tensor) -> Tensor:
        """Returns a part's share of the mean loss of its batch, for parameters
        ``(B * origins, h, C, num_parameters)``."""
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
        return -(-min(limit, len(self.valid)) // EVALUATION_BATCH)

    @torch.no_grad()
    def evaluate_blocks(
        self, limit: int, blocks: range, stop: Callable[[], bool] | None, watch: Watch | None
    ) -> Tensor:
        config, rows = self.model.config, self.valid.rows(limit)
        own = rows[blocks.start * EVALUATION_BATCH : blocks.stop * EVALUATION_BATCH]
        self.model.eval()
        sums, done = list[tuple[float, int]](), 0
        for values, statics in self.inputs.read(own, config, EVALUATION_BATCH):
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
                "the validation part has no value of the targets; give a longer validation part, or"
                " fewer targets"
            )
        return Score(total / count, min(limit, len(self.valid)))

    def files(self) -> dict[str, bytes]:
        return description_files(self.stored)

    def publish(self, weights: Mapping[str, Tensor], trainer: Trainer) -> None:
        """Publishes weights; with a budget, calibrates them on few windows until the end."""
        if self.session.run is None:
            return
        network = copy.deepcopy(self.model).cpu().eval()
        network.load_state_dict(weights)
        calibration, *_ = self._calibrate(network, _EARLY_SHARE)
        if self.budget_s is None:
            self._known = weights, calibration
        best = dataclasses.replace(self.stored, network=network, calibration=calibration)
        self.session.run.publish(forecaster_files(best))

    def reset_state(self) -> None:
        self._state = None

    def carried(self) -> dict[str, Tensor]:
        return {} if self._state is None else self._state._asdict()

    def restore_carried(self, carried: Mapping[str, Tensor]) -> None:
        self._state = None
        if carried:
            self._state = restored_state(carried, self.model, self._device)

    def totals(self, progress: Progress) -> Event:
        return {"measure": self._measure}

    def finish_s(self, unit_s: float) -> float:
        if self.budget_s is None:
            return 0.0
        averaged_s = self.is_averaged * min(len(self.valid), MAX_AVERAGED) * unit_s
        calibration_s = _CALIBRATION_COST * len(self.valid) * unit_s
        test_s = _TEST_COST * self._num_tested * unit_s
        return (
            min(calibration_s, _FINAL_SHARE * self.budget_s)
            + min(test_s, _TEST_SHARE * self.budget_s)
            + _CALIBRATION_COST * averaged_s
            + self.session.report_s()
        )

    def approve(
        self, stored: StoredForecaster, trainer: Trainer
    ) -> tuple[StoredForecaster, Mapping[str, bytes]] | None:
        """Returns the forecaster to publish at the end and files beside it; None refuses."""
        return stored, {}

    def finish(self, trainer: Trainer) -> Event:
        """Calibrates, publishes and evaluates the best weights."""
        self.model.cpu()
        network = self.stored.network.eval()
        if self.is_averaged:
            network = self._averaged(network, trainer)
        with trainer.progress.counted("calibration"):
            calibration = self._last_calibration(network, trainer)
        self.stored = dataclasses.replace(self.stored, network=network, calibration=calibration)
        if missing := self.stored.unsupported((0.025, 0.1, 0.9, 0.975)):
            trainer.say("info", missing)
        if self.session.run is None:
            if self.session.world.is_leader:
                self._check_coverage(trainer)
            return {}
        if (approved := self.approve(self.stored, trainer)) is None:
            return {}
        self.stored, more = approved
        with trainer.progress.counted("saving"):
            self.session.run.publish({**forecaster_files(self.stored), **more})
            trainer.best.set_published()
        return self._evaluate(trainer)

    def _check_coverage(self, trainer: Trainer) -> None:
        """Warns of intervals whose coverage of some test windows is clearly off their level."""
        sizes = self.model.config
        with suppress(DataError):  # no test part
            index = self.split.windows(self.inputs.table, "test", sizes.input_size, sizes.horizon)
            rows = spread_out(index.rows(self._num_tested))
            scores = QuantileScores((), (0.8,), has_crps=False)
            figures = evaluate_forecasts(self.stored, self.inputs, rows, 1, scores)["forecaster"]
            if note := coverage_note(self.stored, self.inputs, rows, figures):
                trainer.say("warning", note)

    def _averaged(self, network: ForecastNetwork, trainer: Trainer) -> ForecastNetwork:
        """Returns the network, averaged with its linear path if that lowers the loss."""
        share, ratio = best_share(network, self.inputs, self.valid)
        if share == 1.0:
            return network
        trainer.say(
            "info",
            f"the forecast is the average of {share:.0%} LSTM and {1 - share:.0%} linear path: this"
            f" lowers the validation error by {1 - ratio:.1%}",
        )
        network, self._known = copy.deepcopy(network), None
        network.average_with_linear(share)
        return network

    def _last_calibration(self, network: ForecastNetwork, trainer: Trainer) -> Calibration:
        if self._known is not None and self._known[0] is trainer.best.weights:
            return self._known[1]
        calibration, read, total = self._calibrate(network, _FINAL_SHARE)
        if read < total:
            text = f"quantiles are calibrated on {read:,} of {total:,} validation windows"
            trainer.say("info", f"{text}: more would not fit the budget")
        return calibration

    def _calibrate(self, network: ForecastNetwork, share: float) -> tuple[Calibration, int, int]:
        """Returns a calibration within a share of the budget, the windows read, and all windows.

        If the run was stopped before, reads `MIN_CALIBRATED` windows; a stop now raises Stopped.
        """
        is_stopped = self._is_stopped()
        read, total = 0, 0
        show_progress = self.session.watch("calibrating quantiles", "windows")

        def show(done: int, of: int) -> None:
            nonlocal read, total
            read, total = done, of
            show_progress(done, of)
            if not is_stopped:
                self._stop_if_asked("calibrating quantiles")

        limit_s = None if self.budget_s is None else share * self.budget_s
        limit_s = 0.0 if is_stopped else limit_s
        return calibrate(network, self.inputs, self.valid, show, limit_s), read, total

    def _is_stopped(self) -> bool:
        return self.session.stop is not None and self.session.stop()

    def _stop_if_asked(self, doing: str) -> None:
        if self._is_stopped():
            raise Stopped(f"stopped while {doing}")

    def _evaluate(self, trainer: Trainer) -> Event:
        """Emits the scores of the test part; returns the error for the `end` event."""
        trainer.say("info", "evaluating the forecasts of the test part")
        show = self.session.watch("evaluating the test part", "windows")

        def should_continue(done: int, total: int) -> bool:
            show(done, total)
            self._stop_if_asked("evaluating the test part")
            if self.budget_s is None:
                return True
            return self.budget_s - trainer.elapsed_s() - self.session.report_s() > CLOSING_S

        about: Event = {}
        with trainer.progress.counted("judging"):
            for event in evaluation_events(
                self.stored, self.dataset, self.split, self.inputs, should_continue
            ):
                trainer.emit(event)
                if event["event"] == "test":
                    about = self._test_error(event, trainer)
        return about

    def _test_error(self, test: Event, trainer: Trainer) -> Event:
        """Returns the error on the test part; says if only some windows were evaluated."""
        if test["windows"] < test["of_windows"] and self.budget_s is not None:
            part = f"{test['windows']:,} of {test['of_windows']:,} windows"
            text = f"evaluated {part}, evenly spread: all would not fit the budget"
            trainer.say("info", f"{text}; 'fastlstm evaluate RUN DATA' evaluates all")
        measure = "mse" if self.stored.config.loss == "mse" else "mae"
        if len(test["targets"]) > 1 or len(self.dataset.series) > 1:  # their units or sizes differ
            measure = "rel_mae"
        errors = {name: scores.get(measure) for name, scores in test["scores"].items()}
        return {"test_error": {"measure": measure, **errors}}


def continued_state(
    state: RecurrentState | None, batch: WindowBatch | ChunkBatch, device: torch.device
) -> RecurrentState | None:
    """Returns the state at the start of a batch of chunks; None, as for windows, means zeros.

    `state` is the state after the batch before.
    """
    if state is None or not isinstance(batch, ChunkBatch) or not batch.continues.any():
        return None
    continues = torch.from_numpy(batch.continues).to(device)
    # An epoch's last batch may have fewer lanes than the next one.
    own = rows_of_state(state, slice(0, len(continues)))
    cells = continues.repeat_interleave(own.hidden.shape[1] // len(own.level))[:, None]
    return RecurrentState(
        torch.where(cells, own.hidden, 0.0),
        torch.where(cells, own.cell, 0.0),
        torch.where(continues[:, None], own.level, math.nan),
    )


def rows_of_state(state: RecurrentState, part: slice) -> RecurrentState:
    """Returns the state of some rows."""
    each = state.hidden.shape[1] // len(state.level)
    cells = slice(part.start * each, part.stop * each)
    hidden, cell = (t[:, cells].contiguous() for t in (state.hidden, state.cell))
    return RecurrentState(hidden, cell, state.level[part])


def joined_state(states: list[RecurrentState]) -> RecurrentState:
    """Returns the state of all rows."""
    hidden, cell, level = zip(*states, strict=True)
    return RecurrentState(torch.cat(hidden, 1), torch.cat(cell, 1), torch.cat(level))


def restored_state(
    carried: Mapping[str, Tensor], network: ForecastNetwork, device: torch.device
) -> RecurrentState:
    """Returns the state of a checkpoint; raises ValueError if it does not fit the network."""
    state = RecurrentState(*(carried[name] for name in RecurrentState._fields))
    config = network.config
    each = (config.num_layers, len(state.level) * network.num_channels)
    if not (
        state.hidden.shape == state.cell.shape == (*each, config.hidden_size)
        and state.level.shape[1:] == (config.num_targets,)
    ):
        raise ValueError("the carried state does not fit the network")
    return RecurrentState(*(part.to(device) for part in state))
