"""Trains a forecaster: steps, validation on the way, the best weights at the end.

On windows, each from zero state, or on chunks of streams whose lanes carry their state on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastlstm.errors import NonFiniteError, Stopped, StorageError, counted
from fastlstm.forecast.data.chunk_loader import ChunkBatch, ChunkLoader
from fastlstm.forecast.data.scaled_windows import ScaledWindows
from fastlstm.forecast.data.window_index import WindowIndex
from fastlstm.forecast.data.window_loader import WindowBatch, WindowLoader
from fastlstm.forecast.model.network import ForecastNetwork, RecurrentState
from fastlstm.runs.events import Event, Observer
from fastlstm.training.averaging import WeightAverage
from fastlstm.training.checkpoint import Checkpoint, reading
from fastlstm.training.guard import bad_gradient
from fastlstm.training.optimizer import OptimizerSet
from fastlstm.training.precision import autocast
from fastlstm.training.schedule import SaveTimes, StopCriterion, learning_rate_factor
from fastlstm.training.state import Progress, Tensors, TrainingState, require_like

_MIN_VALID_WINDOWS, _MAX_VALID_WINDOWS = 512, 20_000
_VALID_PER_TRAINED = 4
"""Windows that all evaluations read, at most, per window trained on: forward alone is a third."""
_VALID_SHARE = 0.4
"""Of a budget, for all evaluations, at most."""
_FORWARD_SHARE = 1 / 3
"""Of a training step, for the same windows without gradients."""
_LOG_S = 1.0
_BAD_STEPS = 10
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class FitPlan:
    """How to train.

    Attributes:
        ending: when it is over.
        learning_rate: peak.
        windows_per_step: what a step reads, in windows of the input's length.
        optimizer: see `OptimizerSet`.
        weight_decay: decoupled (AdamW).
        warmup: share of the run that raises the learning rate.
        cooldown: share of the run, at its end, that lowers it to zero.
        grad_clip: largest global norm.
        ema: decay of the averaged weights that are judged and kept; 0 keeps the last ones.
        patience: evaluations without gain after which it ends; 0 never does.
        evaluations: of the validation windows in a run, evenly over it.
        precision: of the matrix products.
        checkpoint_every: steps between checkpoints; None is by time, see `SaveTimes`.
        seed: of dropout.
        closing: seconds that what follows training takes, of a budget kept for it, by the seconds
            that a window takes to forecast; about.
    """

    ending: StopCriterion
    learning_rate: float = 2e-3
    windows_per_step: float = 32.0
    optimizer: str = "adamw"
    weight_decay: float = 0.0
    warmup: float = 0.02
    cooldown: float = 0.7
    grad_clip: float = 1.0
    ema: float = 0.0
    patience: int = 0
    evaluations: int = 16
    precision: str = "fp32"
    checkpoint_every: int | None = None
    seed: int = 0
    closing: Callable[[float], float] = lambda _: 0.0


@dataclass(frozen=True)
class TrainingResult:
    """What came of it.

    Attributes:
        steps: optimizer steps taken.
        best_step: after which the kept weights were.
        best_loss: their validation loss, the mean over the values that are there.
        seconds: wall clock in all.
        input_wait_share: share of the steps' time spent waiting for windows.
        reason: why it ended.
        windows: trained on; of streams forecasts, one after every patch read.
        train_s: seconds of it spent in steps.
        spent: seconds of it by what else they were spent on, see `Progress`.
    """

    steps: int
    best_step: int
    best_loss: float
    seconds: float
    input_wait_share: float
    reason: str
    windows: int
    train_s: float
    spent: Mapping[str, float]


class ForecastTrainer:
    """Trains a model; afterwards it holds the weights that were best on the validation windows.

    Args:
        model: on the CPU.
        inputs: the table and its scaler.
        loader: of training windows, or of streams for a stateful network.
        valid: validation windows; as many are used, evenly spread, as keep the evaluations cheap
            beside the training, 512 to 20,000.
        plan: how.
        emit: receives every event, a plain dict.
        stop: polled.
        save: stores `capture()`; called at the start, when `SaveTimes` says so, when stopped and at
            the end. None keeps nothing.
        began: `time.perf_counter()` when the wall clock of this start began; default now.
        watch: called with the windows of an evaluation read so far and in all.

    Attributes:
        model: as given.
        is_over: whether all steps are taken and evaluated.
    """

    def __init__(
        self,
        model: ForecastNetwork,
        inputs: ScaledWindows,
        loader: WindowLoader | ChunkLoader,
        valid: WindowIndex,
        plan: FitPlan,
        emit: Observer,
        stop: Callable[[], bool] | None = None,
        save: Callable[[ForecastTrainer], None] | None = None,
        began: float | None = None,
        watch: Callable[[int, int], object] | None = None,
    ) -> None:
        self.model, self.inputs, self.plan, self.emit = model, inputs, plan, emit
        self._all_valid, self._valid = valid, valid.rows(0)  # chosen before the first evaluation
        self._stop, self._save_with, self._watch = stop, save, watch
        self._state = TrainingState(
            model,
            OptimizerSet(model, plan, plan.learning_rate),
            WeightAverage(model, plan.ema) if plan.ema > 0 else None,
        )
        self._loader, self.is_over = loader, False
        self._carried: RecurrentState | None = None
        self._best: dict[str, Tensor] = {}
        self._losses: list[float] = []
        self._bad, self._saved_step, self._evaluation_s, self._save_s = 0, -1, 0.0, 0.0
        self._logged = time.perf_counter()
        self._began = self._logged if began is None else began
        self._saves = SaveTimes(plan.checkpoint_every)
        self._logged_state, self._earlier_s, self._first_step = (0, 0, 0.0, 0.0), 0.0, 0

    @property
    def progress(self) -> Progress:
        """Returns the counters of the run."""
        return self._state.progress

    def train(self, found: Checkpoint | None = None) -> TrainingResult:
        """Runs to the end.

        Args:
            found: where to go on.

        Raises:
            Stopped: `stop` said so; the model holds the best weights so far.
            NonFiniteError: losses stayed NaN or infinite.
            StorageError: the last checkpoint could not be written.
            BudgetError: the budget was over before the first step.
        """
        plan = self.plan
        torch.default_generator.manual_seed(plan.seed)
        if found is not None:
            self._restore(found)
        progress = self.progress
        before_s, self._began = progress.elapsed_s, self._began - progress.elapsed_s
        progress.add("setup", self.elapsed_s() - before_s)
        due = int(self._done() * plan.evaluations)  # fewer than before, if the end is later
        progress.evaluations = min(progress.evaluations, due)
        try:
            with closing(self._loader):
                if found is None and self._done() < 1.0:
                    self._save_if_possible()
                reason = self._loop()
                plan.ending.require_steps(progress.step, progress.setup_s)
                if progress.evaluated_step != progress.step:
                    self._evaluate()
                if not self._best:
                    raise NonFiniteError(
                        "the validation loss was never finite; lower the learning rate, or look at"
                        " the values of the table; the validation part must have some of the"
                        " targets"
                    )
                self.is_over = True
                self._save()
        except Stopped:
            self._save()
            raise
        finally:
            if self._best:
                self.model.load_state_dict(self._best)
            self.model.eval()
        share = self._loader.wait_s / max(progress.train_s - self._earlier_s, 1e-9)
        return TrainingResult(
            progress.step, progress.best_step, progress.best_loss, self.elapsed_s(), share, reason,
            progress.tokens, progress.train_s, progress.spent,
        )  # fmt: skip

    def elapsed_s(self) -> float:
        """Returns the seconds of this run, over all its resumed parts."""
        return time.perf_counter() - self._began

    def capture(self) -> tuple[Tensors, dict[str, Any]]:
        """Returns (tensors by file stem, plain values) for a checkpoint."""
        self.progress.elapsed_s = self.elapsed_s()
        tensors, meta = self._state.capture(self._loader.state_dict())
        meta["valid_windows"] = len(self._valid)
        if self._best:
            tensors["best"] = self._best
        if self._carried is not None:
            tensors["carried"] = self._carried._asdict()
        return tensors, meta

    @contextmanager
    def best_weights(self) -> Iterator[ForecastNetwork]:
        """Puts the best weights into the model for the length of the block."""
        now = self._copy()
        self.model.load_state_dict(self._best)
        try:
            yield self.model.eval()
        finally:
            self.model.load_state_dict(now)

    def _restore(self, found: Checkpoint) -> None:
        with reading(found):
            self._loader.load_state_dict(self._state.restore(found.tensors, found.meta))
            if best := found.tensors.get("best", {}):
                require_like(self.model.state_dict(), best, "best")
            self._best = {n: t.clone() for n, t in best.items()}
            if "carried" in found.tensors:
                self._carried = RecurrentState(**found.tensors["carried"])
            self._valid = self._all_valid.rows(found.meta.get("valid_windows", 0))
        self._saved_step = self._first_step = found.step
        self._earlier_s = self.progress.train_s
        self._logged_state = (self.progress.step, self.progress.tokens, self._earlier_s, 0.0)

    def _affordable(self) -> int:
        """Returns how many windows an evaluation reads, and says so where it is not all."""
        plan, ending = self.plan, self.plan.ending
        if ending.budget_s is None:
            trained = (ending.total_steps or 0) * plan.windows_per_step
            fitting = _VALID_PER_TRAINED * trained / plan.evaluations
        else:
            left_s = _VALID_SHARE * max(ending.budget_s - self.progress.setup_s, 0.0)
            fitting = left_s / plan.evaluations / self._forecast_s()
        num = int(min(max(fitting, _MIN_VALID_WINDOWS), _MAX_VALID_WINDOWS))
        if num < len(self._all_valid):
            of = f"{num:,} of {len(self._all_valid):,}"
            text = f"each evaluation reads {of} validation windows, evenly spread"
            self.emit({"event": "message", "level": "info", "text": text})
        return num

    def _forecast_s(self) -> float:
        """Returns the seconds that a window takes to forecast, from the steps of this start."""
        if self._evaluation_s:
            return self._evaluation_s / len(self._valid)
        steps = self.progress.step - self._first_step
        seconds = (self.progress.train_s - self._earlier_s) / max(steps, 1)
        return max(_FORWARD_SHARE * seconds / self.plan.windows_per_step, 1e-9)

    def _loop(self) -> str:
        """Steps and evaluates to the end; returns why it ended."""
        plan, progress = self.plan, self.progress
        while (done := self._done()) < 1.0:
            if self._stop is not None and self._stop():
                raise Stopped("stopped while training")
            if done * plan.evaluations >= progress.evaluations + 1 and self._can_evaluate():
                self._evaluate()
            if plan.patience and progress.without_gain >= plan.patience:
                return f"no gain in {counted(plan.patience, 'evaluation')}"
            if self._saves.is_due(progress.step):
                self._save_if_possible()
            self._take_step(done)
        return plan.ending.text

    def _can_evaluate(self) -> bool:
        """Returns whether there is something new to evaluate, and of a budget the time for it."""
        progress = self.progress
        if progress.step <= max(progress.evaluated_step, 0):
            return False
        if self.plan.ending.budget_s is None:
            return True
        spent_s = progress.spent.get("evaluations", 0.0)
        return spent_s <= _VALID_SHARE * (self.elapsed_s() - progress.setup_s)

    def _done(self) -> float:
        progress, reserve_s = self.progress, 0.0
        if self.plan.ending.budget_s is not None:
            reserve_s = self._evaluation_s + self._save_s + self.plan.closing(self._forecast_s())
        return self.plan.ending.progress(
            progress.step, self.elapsed_s(), progress.setup_s, reserve_s
        )

    def _save(self) -> None:
        """Stores the state unless it is stored.

        Raises:
            StorageError: the disk refused.
        """
        if self._save_with is not None and self._saved_step != self.progress.step:
            started = time.perf_counter()
            self._save_with(self)
            self._save_s = time.perf_counter() - started
            self.progress.add("saving", self._save_s)
            self._saved_step = self.progress.step
            self._saves.tried(self._saved_step)

    def _save_if_possible(self) -> None:
        try:
            self._save()
        except StorageError as error:
            self._saves.tried(self.progress.step)
            text = f"not everything is stored yet, the run goes on: {error}"
            self.emit({"event": "message", "level": "warning", "text": text})

    def _take_step(self, done: float) -> None:
        started, plan, progress = time.perf_counter(), self.plan, self.progress
        self.model.train()
        loss, num_forecasts = self._training_loss(self._loader.next())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), plan.grad_clip)
        value = float(loss.detach())
        if math.isfinite(value) and math.isfinite(float(norm)):
            self._state.optimizers.step(learning_rate_factor(done, plan.warmup, plan.cooldown))
            if self._state.average is not None:
                self._state.average.update()
            progress.step, self._bad = progress.step + 1, 0
            progress.tokens += num_forecasts
            self._losses.append(value)
        else:
            self._skip()
        self._state.optimizers.zero_grad()
        progress.train_s += time.perf_counter() - started
        if time.perf_counter() - self._logged > _LOG_S:
            self._log(done, float(norm))

    def _skip(self) -> None:
        self._bad += 1
        self._carried = None  # it may be what is not finite
        culprit = bad_gradient(self.model) or "loss"
        if self._bad >= _BAD_STEPS:
            raise NonFiniteError(
                f"step {self.progress.step}: {culprit} was NaN or infinite {_BAD_STEPS} times in a"
                " row; lower the learning rate, or look at the values of the table"
            )
        about = {"step": self.progress.step, "what": "non-finite", "tensor": culprit}
        self.emit({"event": "skip", **about, "action": "step skipped"})

    def _training_loss(self, batch: WindowBatch | ChunkBatch) -> tuple[Tensor, int]:
        """Returns the mean loss of a batch and how many forecasts it is of."""
        values, statics = self.inputs.prepare(batch.values, batch.segments)
        if not isinstance(batch, ChunkBatch):
            losses, count = self._losses_of(values, statics)
            return losses / max(count, 1), len(values)
        config, carried = self.model.config, self._carried
        if carried is not None:  # an epoch's last batch may have fewer lanes than the next one
            continues = torch.from_numpy(batch.continues)
            carried = carried.where(continues) if continues.any() else None
        with autocast(self.plan.precision, _CPU):
            parameters, carried = self.model.read_chunk(values, statics, carried)
        self._carried = carried.detach()
        origins = len(parameters) // len(values)
        target = self.model.horizons(values[..., : config.num_targets], origins)
        losses, count = self._summed(parameters.float(), target)
        return losses / max(count, 1), len(parameters)

    def _losses_of(self, values: Tensor, statics: Tensor | None) -> tuple[Tensor, int]:
        """Returns the sum of the losses of windows, and of how many values it is."""
        config = self.model.config
        with autocast(self.plan.precision, _CPU):
            parameters = self.model(values, statics).float()
        return self._summed(parameters, values[:, config.input_size :, : config.num_targets])

    def _summed(self, parameters: Tensor, target: Tensor) -> tuple[Tensor, int]:
        """Returns the sum of the losses of the values that are there, and how many these are."""
        if not self.model.config.has_missing:
            return self.model.output.loss(parameters, target).sum(), target.numel()
        is_there = ~target.isnan()
        losses = self.model.output.loss(parameters, target.nan_to_num(0.0))
        return torch.where(is_there, losses, 0.0).sum(), int(is_there.sum())

    def _evaluate(self) -> None:
        started, progress, average = time.perf_counter(), self.progress, self._state.average
        if len(self._valid) == 0:
            self._valid = self._all_valid.rows(self._affordable())
        with average.applied() if average is not None else nullcontext():
            loss, kept = self._validation_loss(self._valid), self._copy()
        is_best = loss < progress.best_loss
        progress.without_gain = 0 if is_best else progress.without_gain + 1
        progress.evaluations = int(self._done() * self.plan.evaluations)
        progress.evaluated_step = progress.step
        if is_best:
            self._best, progress.best_loss, progress.best_step = kept, loss, progress.step
        seconds = time.perf_counter() - started
        self._evaluation_s = seconds
        progress.add("evaluations", seconds)
        self.emit(
            {
                "event": "eval",
                "step": progress.step,
                "split": "valid",
                "loss": loss,
                "is_best": is_best,
                "seconds": seconds,
                "elapsed_s": self.elapsed_s(),
            }
        )

    def _copy(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    @torch.no_grad()
    def _validation_loss(self, rows: NDArray[np.int64]) -> float:
        """Returns the mean loss of all values that are there; NaN where none is."""
        self.model.eval()
        total, count, done = 0.0, 0, 0
        config = self.model.config
        for values, statics in self.inputs.read(rows, config.input_size + config.horizon):
            if self._stop is not None and self._stop():
                raise Stopped("stopped while evaluating")
            losses, num = self._losses_of(values, statics)
            total, count, done = total + float(losses), count + num, done + len(values)
            if self._watch is not None:
                self._watch(done, len(rows))
        return total / count if count else math.nan

    def _log(self, done: float, norm: float) -> None:
        progress, wait_s = self.progress, self._loader.wait_s
        self._logged = time.perf_counter()
        step, windows, train_s, waited_s = self._logged_state
        self._logged_state = (progress.step, progress.tokens, progress.train_s, wait_s)
        spent = max(progress.train_s - train_s, 1e-9)
        steps_left = (self.plan.ending.total_steps or 0) - progress.step
        budget_s, per_step = self.plan.ending.budget_s, spent / max(progress.step - step, 1)
        evaluations_left = self.plan.evaluations - progress.evaluations
        left = steps_left * per_step + evaluations_left * self._evaluation_s
        if budget_s is not None:
            left = budget_s - self.elapsed_s()
        event: Event = {
            "event": "step",
            "step": progress.step,
            "epoch": progress.step / self._loader.steps_per_epoch,
            "progress": done,
            "loss": sum(self._losses) / max(1, len(self._losses)),
            "grad_norm": norm,
            "lr": self.plan.learning_rate
            * learning_rate_factor(done, self.plan.warmup, self.plan.cooldown),
            "windows_per_s": (progress.tokens - windows) / spent,
            "input_wait_share": (wait_s - waited_s) / spent,
            "elapsed_s": self.elapsed_s(),
            "eta_s": max(left, 0.0),
        }
        self._losses.clear()
        self.emit(event)
