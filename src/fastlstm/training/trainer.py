"""The training loop of every job: it steps, evaluates, saves and recovers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch

from fastlstm.errors import (
    CorruptFileError,
    FastLSTMError,
    NonFiniteError,
    Setting,
    Stopped,
    StorageError,
)
from fastlstm.runs.events import Event, Observer
from fastlstm.system.hardware import peak_memory_bytes
from fastlstm.training.averaging import WeightAverage
from fastlstm.training.best_weights import STEM as BEST
from fastlstm.training.best_weights import BestWeights
from fastlstm.training.callbacks import Callback, CallbackList, EarlyStopping
from fastlstm.training.checkpoint import Checkpoint, reading
from fastlstm.training.evaluations import EvaluationSchedule
from fastlstm.training.guard import bad_weight, first_non_finite
from fastlstm.training.optimizer import OptimizerSet
from fastlstm.training.options import TrainingOptions
from fastlstm.training.recovery import handle_bad_step, roll_back
from fastlstm.training.schedule import SaveTimes, StopCriterion, learning_rate_factor
from fastlstm.training.snapshots import MemorySnapshots, Snapshots
from fastlstm.training.state import Progress, Tensors, TrainingState
from fastlstm.training.stepper import Stepper
from fastlstm.training.task import Score, Task, Watch
from fastlstm.training.throughput import ThroughputMeter

_FINITE = ("model", "optimizer", "average", "carried")
"""Stems of the tensors without NaN and Inf in a state that can be restored."""
CLOSING_S = 0.5
"""Kept of a budget beside what the evaluation, the checkpoint and the task need at its end."""


@dataclass(frozen=True)
class TrainingPlan:
    """How a run goes, with every open choice made.

    Attributes:
        options: resolved; the learning rate is not None.
        stop_criterion: when the run stops.
        device: where it runs.
        eval_every: steps between evaluations; None spreads `evaluations` evenly over the run.
        evaluations: in the run.
        ceiling_gflops: measured GEMM rate of the device in this precision, 0 if unmeasured.
        started: `time.perf_counter()` when the wall clock of this start began.
    """

    options: TrainingOptions
    stop_criterion: StopCriterion
    device: torch.device
    eval_every: int | None = None
    evaluations: int = 16
    ceiling_gflops: float = 0.0
    started: float | None = None


@dataclass(frozen=True)
class TrainingResult:
    """Result of training.

    Attributes:
        steps: optimizer steps taken.
        epochs: passes over the training part.
        best_step: step of the best evaluation.
        best_loss: its validation loss.
        last: the last evaluation.
        reason: why training ended.
        units: tokens, windows or sequences trained on.
        seconds: wall clock in all.
        train_s: the part of it spent in steps.
        spent: seconds of the other parts, see `Progress`.
        input_wait_share: share of the steps' time spent waiting for batches.
    """

    steps: int
    epochs: float
    best_step: int
    best_loss: float
    last: Score
    reason: str
    units: int
    seconds: float
    train_s: float
    spent: Mapping[str, float]
    input_wait_share: float


class Trainer:
    """Trains a task.

    Args:
        task: the model with its data.
        plan: how.
        emit: receives every event, a plain dict.
        stop: polled; when set, the state is saved and Stopped is raised. Its `name`, if it has
            one, says what set it.
        snapshots: keeps the state; default in memory, for roll-backs only.
        callbacks: see `Callback`.
        run_path: of the run directory, for the `end` event; None where there is none.
        watch: called with the units of an evaluation scored so far and in all.

    Attributes:
        state: model, optimizers, averaged weights, counters.
    """

    def __init__(
        self,
        task: Task,
        plan: TrainingPlan,
        emit: Observer,
        stop: Callable[[], bool] | None = None,
        snapshots: Snapshots | None = None,
        callbacks: Sequence[Callback] = (),
        run_path: str | None = None,
        watch: Watch | None = None,
    ) -> None:
        options = plan.options
        assert options.learning_rate is not None
        self.task, self.plan, self.stop = task, plan, stop
        self.snapshots: Snapshots = MemorySnapshots() if snapshots is None else snapshots
        self.state = TrainingState(
            model=task.model,
            optimizers=OptimizerSet(task.model, options, options.learning_rate),
            average=WeightAverage(task.model, options.ema) if options.ema > 0 else None,
            scaler=torch.amp.GradScaler("cuda") if options.precision == "fp16" else None,
        )
        patience = [EarlyStopping(options.patience)] if options.patience else []
        self.callbacks = CallbackList([*callbacks, *patience])
        self.best = BestWeights(self)
        self._emit, self._run_path, self._watch = emit, run_path, watch
        self._stepper = Stepper(
            task, options, self.state,
            lambda: self.callbacks.gradients(self), lambda: self.callbacks.update(self), self.say,
        )  # fmt: skip
        self._evaluations = EvaluationSchedule(
            plan.eval_every, plan.evaluations, plan.stop_criterion
        )
        self._meter = ThroughputMeter(task, plan.ceiling_gflops)
        self._started = time.perf_counter() if plan.started is None else plan.started
        self._saves, self._saved_step = SaveTimes(options.checkpoint_every), -1
        self._last: Score | None = None
        self._last_event: Event = {}
        self._reason = plan.stop_criterion.text
        self._is_ended = False

    @property
    def model(self) -> torch.nn.Module:
        """The model that is trained."""
        return self.task.model

    @property
    def progress(self) -> Progress:
        """Counters of the run."""
        return self.state.progress

    @property
    def optimizers(self) -> OptimizerSet:
        """The optimizers."""
        return self.state.optimizers

    def fit(self, checkpoint: Checkpoint | None = None) -> TrainingResult:
        """Runs to the end. A task that does not publish at once has the best weights in its model
        afterwards.

        Args:
            checkpoint: a verified checkpoint to continue from, or None to start.

        Raises:
            Stopped: `stop` said so; the state is saved.
            NonFiniteError: NaN or Inf that roll-backs could not cure.
            StorageError: the last checkpoint or the best model could not be written.
            BudgetError: the budget was over before the first step.
        """
        self._seed()
        if checkpoint is not None:
            with reading(checkpoint):
                self.restore(checkpoint.tensors, checkpoint.meta)
            self.callbacks.restore(checkpoint.tensors, checkpoint.meta.get("callbacks", {}))
        progress = self.progress
        before_s, self._started = progress.elapsed_s, self._started - progress.elapsed_s
        progress.add("setup", self.elapsed_s() - before_s)
        earlier_s = progress.train_s
        progress.slot = min(progress.slot, self._evaluations.slot(self.done()))
        self.callbacks.begin(self)
        try:
            with closing(self.task.loader):
                if checkpoint is None and self.done() < 1.0:
                    self._save_if_possible()
                self._train()
                self._save_last()
            self.best.into_model()
            finish = self.task.finish(self)
            self._emit_end(self._reason, {"final": self._last_event, **finish})
        except Stopped:
            self._stopped()
        except NonFiniteError:
            with suppress(FastLSTMError):  # the error that ends the run counts for more
                self.best.publish_if_possible()
            raise
        finally:
            self.best.into_model()
            self.model.eval()
            self.callbacks.end(self)
        return self._result(earlier_s)

    def _seed(self) -> None:
        torch.default_generator.manual_seed(self.plan.options.seed)
        if self.plan.device.type == "cuda":
            torch.cuda.manual_seed(self.plan.options.seed)

    def _train(self) -> None:
        """Steps and evaluates to the end; the last step is evaluated."""
        self._loop()
        if self._reason == self.plan.stop_criterion.text:  # and no callback's
            self.plan.stop_criterion.require_steps(self.progress.step, self.progress.setup_s)
        while self._last is None or self.progress.evaluated_step != self.progress.step:
            if not self.evaluate():  # rolled back: the steps since are taken again
                self._loop()

    def _loop(self) -> None:
        while True:
            if self.stop is not None and self.stop():
                raise Stopped
            done = self.done()
            if self._evaluations.is_due(self.progress, done, self.elapsed_s()):
                self.evaluate()
                continue
            if self._is_ended or done >= 1.0:
                self._is_ended = True
                return
            step = self.progress.step
            if step != self._saved_step and self._saves.is_due(step):
                self._save_if_possible()
            self._take_step()

    def end(self, reason: str) -> None:
        """Ends training after the present step; the run is evaluated, saved and published.

        Args:
            reason: for the `end` event. Once training is over another one changes nothing.
        """
        if not self._is_ended:
            self._is_ended, self._reason = True, reason

    def elapsed_s(self) -> float:
        """Returns the seconds of wall clock of this run, over all its starts."""
        return time.perf_counter() - self._started

    def done(self) -> float:
        """Returns how much of the training is done, 0..1."""
        progress, reserve_s = self.progress, 0.0
        if self.plan.stop_criterion.budget_s is not None:
            unit_s = self._meter.unit_s
            reserve_s = self._meter.evaluation_s or unit_s * (progress.scored or self._limit())
            reserve_s += self._meter.save_s + CLOSING_S + self.task.finish_s(unit_s)
        return self.plan.stop_criterion.progress(
            progress.step, self.elapsed_s(), progress.setup_s, reserve_s
        )

    def emit(self, event: Event) -> None:
        """Hands an event to the display, the files and the callbacks."""
        self._emit(event)
        self.callbacks.event(self, event)

    def say(self, level: str, text: str) -> None:
        """Emits a message; level is info or warning."""
        self.emit({"event": "message", "level": level, "text": text})

    # one step -----------------------------------------------------------------------------------

    def _take_step(self) -> None:
        started, options = time.perf_counter(), self.plan.options
        factor = learning_rate_factor(self.done(), options.warmup, options.cooldown)
        factor *= self.progress.lr_scale
        batch = self.task.loader.next()
        size = self.task.size(batch)
        loss, norm = self.step(batch, factor)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            handle_bad_step(self, loss)
            return
        progress, seconds = self.progress, time.perf_counter() - started
        self.state.guard.good_step()
        progress.step += 1
        progress.tokens += size
        progress.elapsed_s = self.elapsed_s()
        progress.train_s += seconds
        self._meter.add_step(loss, norm, size, seconds)
        if self._meter.log_due(options.log_every, progress.step):
            self._emit_step(factor * self.optimizers.learning_rate)

    def step(self, batch: Any, factor: float = 1.0) -> tuple[float, float]:
        """Takes one optimizer step; the counters of the run stay.

        Args:
            batch: of the task's loader.
            factor: share of the peak learning rate.

        Returns:
            Mean loss and the gradient norm before clipping.
        """
        if not self.model.training:
            self.model.train()
        return self._stepper.step(batch, factor)

    # evaluation ---------------------------------------------------------------------------------

    def _limit(self) -> int:
        return self._evaluations.limit(self.task, self.progress, self._meter.unit_s)

    def evaluate(self) -> bool:
        """Evaluates; returns False where the loss was not finite and the run was rolled back."""
        started, progress = time.perf_counter(), self.progress
        if not progress.scored:
            progress.scored = self._limit()
            if progress.scored < self.task.num_valid:
                part = f"{progress.scored:,} of {self.task.num_valid:,} validation {self.task.unit}"
                self.say("info", f"each evaluation scores {part}")
        average = self.state.average
        with average.applied() if average is not None else nullcontext():
            score = self.task.evaluate(progress.scored, self.stop, self._watch)
            is_finite = math.isfinite(score.loss)
            culprit = f"validation loss (weight {bad_weight(self.model)})"
            if is_finite:
                self._judge(score, started)
        seconds = time.perf_counter() - started
        self.progress.add("evaluations", seconds)
        if not is_finite:  # only now: within the block the model holds the averaged weights
            roll_back(self, culprit)
            return False
        self._meter.add_evaluation(seconds, score.num_units)
        return True

    def _judge(self, score: Score, started: float) -> None:
        """Records an evaluation; the model holds the weights that were evaluated."""
        progress, seconds = self.progress, time.perf_counter() - started
        is_best = score.loss < progress.best_loss
        if progress.evaluated_step != progress.step:
            progress.evaluations += 1
            progress.without_gain = 0 if is_best else progress.without_gain + 1
        progress.evaluated_step = progress.step
        progress.slot = self._evaluations.slot(self.done())
        if is_best:
            progress.best_step, progress.best_loss = progress.step, score.loss
            bits = score.metrics.get("bits_per_char")
            progress.best_bits_per_char = math.inf if bits is None else bits
            self.best.keep()
        self._last = score
        event = {
            "event": "eval",
            "step": progress.step,
            "split": "valid",
            "loss": score.loss,
            **score.metrics,
            "num_units": score.num_units,
            "is_best": is_best,
            "seconds": seconds,
            "elapsed_s": self.elapsed_s(),
        }
        self._last_event = self.callbacks.evaluate(self, event)
        self.emit(self._last_event)

    # checkpoints --------------------------------------------------------------------------------

    def capture(self) -> tuple[Tensors, dict[str, Any]]:
        """Returns (tensors by file stem, plain values) for a checkpoint."""
        self.progress.elapsed_s = self.elapsed_s()
        tensors, meta = self.state.capture(self.task.loader.state_dict())
        own, meta["callbacks"] = self.callbacks.capture()
        groups = {**own, "carried": self.task.carried(), BEST: dict(self.best.weights)}
        tensors.update({stem: group for stem, group in groups.items() if group})
        meta["published_step"] = self.best.published_step
        return tensors, meta

    def restore(self, tensors: Tensors, meta: dict[str, Any], keep_guard: bool = False) -> None:
        """Puts back what `capture` returned.

        Args:
            tensors: by file stem.
            meta: plain values.
            keep_guard: keep today's trouble counters and best weights: it is a roll-back.
        """
        self.task.loader.load_state_dict(self.state.restore(tensors, meta, keep_guard))
        first = {name: tensor for name, tensor in tensors["state"].items() if name in "hc"}
        self.task.restore_carried(tensors.get("carried", first))  # of format 1: in "state"
        self._saved_step = -1  # after a roll-back the state is saved again, with its new rate
        self._is_ended, self._reason, self._last = False, self.plan.stop_criterion.text, None
        if not keep_guard:
            self._saved_step = self.progress.step
            self.best.restore(tensors.get(BEST, {}), int(meta.get("published_step", -1)))
        if not isinstance(meta.get("callbacks", {}), dict):
            raise TypeError("callbacks is no object")

    def save(self) -> None:
        """Saves the state and publishes the best weights, unless that is done.

        Raises:
            StorageError: the disk refused.
        """
        if self.task.publishes_at_once:  # what the disk refused before is not in the checkpoint
            self.best.publish_if_possible()
        if self._saved_step != self.progress.step:
            self._save()
        if not self.task.publishes_at_once:  # it may take long, and the state is safe now
            with self.progress.counted("saving"):
                self.best.publish_if_possible()

    def _save_last(self) -> None:
        """Saves the state; a task that does not publish at once does so when it finishes."""
        if self.task.publishes_at_once:
            self.best.publish_if_possible()
        self._save()  # the last evaluation belongs to it, even where the step is saved
        if self.task.publishes_at_once:
            self.best.require_published(self._saved_step)

    def _save(self) -> None:
        progress = self.progress
        started = time.perf_counter()
        tensors, meta = self.capture()
        named = (
            (f"{stem} {name}", tensor)
            for stem in _FINITE
            for name, tensor in tensors.get(stem, {}).items()
            if name not in self.task.may_be_nan
        )
        is_finite = first_non_finite(named) is None
        about = self.snapshots.save(progress.step, tensors, meta, self.task.files(), is_finite)
        self._saved_step = progress.step
        self._saves.tried(progress.step)
        self._meter.save_s = time.perf_counter() - started
        progress.add("saving", self._meter.save_s)
        if about is not None:
            seconds = {"step": progress.step, "seconds": self._meter.save_s}
            self.emit({"event": "checkpoint", **seconds, **about})

    def _save_if_possible(self) -> None:
        try:
            self.save()
        except (StorageError, CorruptFileError) as error:
            self._saves.tried(self.progress.step)
            self.say("warning", f"checkpoint not written, training continues: {error}")

    def _stopped(self) -> None:
        """Saves the state after a stop and raises Stopped."""
        self.save()
        if self._run_path is None:
            raise Stopped("stopped while training")
        name = getattr(self.stop, "name", None) or "request"
        self._emit_end(f"stopped by {name}", {})
        raise Stopped(
            f"stopped by {name}; checkpoint-{self._saved_step} is saved, the same command with ",
            Setting("resume", True),
            " continues it",
        )

    # events -------------------------------------------------------------------------------------

    def _emit_step(self, rate: float) -> None:
        progress, stop_criterion = self.progress, self.plan.stop_criterion
        if stop_criterion.budget_s is not None:
            eta_s = max(stop_criterion.budget_s - self.elapsed_s(), 0.0)
        else:
            eta_s = self._meter.seconds_per_step * (
                (stop_criterion.total_steps or 0) - progress.step
            )
            eta_s += self._evaluations.left(progress) * self._meter.evaluation_s
        rates = self._meter.take(self.task.loader.wait_s)
        self.emit(
            {
                "event": "step",
                "step": progress.step,
                "epoch": progress.step / self.task.loader.steps_per_epoch,
                "units": progress.tokens,
                "progress": self.done(),
                "lr": rate,
                **rates,
                **self.task.step_metrics(rates["loss"]),
                "elapsed_s": self.elapsed_s(),
                "eta_s": eta_s,
            }
        )

    def _emit_end(self, reason: str, about: Event) -> None:
        progress = self.progress
        self.emit(
            {
                "event": "end",
                "task": self.task.name,
                "reason": reason,
                "step": progress.step,
                "units": progress.tokens,
                "elapsed_s": self.elapsed_s(),
                "train_s": progress.train_s,
                "spent_s": dict(progress.spent),
                "best_step": progress.best_step,
                "best_loss": progress.best_loss,
                "peak_memory_bytes": peak_memory_bytes(self.plan.device),
                "run": self._run_path,
                **self.task.totals(progress),
                **about,
            }
        )

    def _result(self, earlier_s: float) -> TrainingResult:
        progress = self.progress
        assert self._last is not None
        wait_s = self.task.loader.wait_s
        return TrainingResult(
            progress.step, progress.step / self.task.loader.steps_per_epoch, progress.best_step,
            progress.best_loss, self._last, self._reason, progress.tokens, self.elapsed_s(),
            progress.train_s, dict(progress.spent),
            wait_s / max(progress.train_s - earlier_s, 1e-9),
        )  # fmt: skip
