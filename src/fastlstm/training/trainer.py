"""The training loop of every job: it steps, evaluates, saves and recovers."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext, suppress
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from fastlstm.errors import Dismissed, FastLSTMError, NonFiniteError, Stopped, counted
from fastlstm.runs.events import Event, Observer
from fastlstm.system.ceilings import doubt_ceilings
from fastlstm.training.callbacks import Callback, CallbackList, EarlyStopping
from fastlstm.training.checkpoint import (
    COUNTERS,
    BestWeights,
    Checkpoint,
    MemorySnapshots,
    Saver,
    Snapshots,
)
from fastlstm.training.device import set_seed
from fastlstm.training.events import (
    MachineEvents,
    PhaseTimes,
    ThroughputMeter,
    end_event,
    step_event,
)
from fastlstm.training.optimizer import OptimizerSet
from fastlstm.training.plan import TrainingPlan, TrainingResult
from fastlstm.training.precision import LossScaler
from fastlstm.training.schedule import EvaluationSchedule, learning_rate_factor
from fastlstm.training.state import (
    Progress,
    TrainingState,
    WeightAverage,
    bad_gradient,
    bad_weight,
    first_non_finite,
)
from fastlstm.training.stepper import Stepper
from fastlstm.training.task import Score, Task, Watch

CLOSING_S = 0.5
"""Seconds of a budget for its end, besides the evaluation, the checkpoint and the task's work."""
_KEPT = (*COUNTERS, "spent", "scored", "train_s")
"""Counters that a roll-back does not change."""


class _Turn(NamedTuple):
    """What to do next, as rank 0 broadcasts it: numbers, 1 for yes."""

    is_stopped: float
    is_evaluated: float
    is_over: float
    is_saved: float
    done: float  # share of the run
    step_share: float  # share of the run that one step takes; 0 unless steps are local


class Trainer:
    """Trains a task.

    Args:
        task: the model with its data.
        plan: options, length and device of the run.
        emit: receives every event, a plain dict.
        stop: polled; once it returns True the state is saved and Stopped is raised. Its attribute
            `name`, if any, is the reason.
        snapshots: stores the state; default in memory, for roll-backs only.
        callbacks: called in this order.
        run_path: the run directory, for events and callbacks.
        watch: called with the units scored so far in an evaluation, and all its units.

    `state` is what a checkpoint holds: also `model`, `optimizers` and `progress`.
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
        self.task, self.plan, self.stop, self.model = task, plan, stop, task.model
        self.world = plan.world
        self.snapshots: Snapshots = MemorySnapshots() if snapshots is None else snapshots
        self.optimizers = OptimizerSet(task.model, options)
        self.state = TrainingState(
            model=task.model,
            optimizers=self.optimizers,
            average=WeightAverage(task.model, options.ema) if options.ema > 0 else None,
            scaler=LossScaler("cuda") if options.precision == "fp16" else None,
        )
        patience = [EarlyStopping(options.patience)] if options.patience else []
        self.callbacks = CallbackList(self, [*callbacks, *patience])
        self.best, self.saver = BestWeights(self), Saver(self)
        self.stepper = Stepper(task, plan, self.state, self.callbacks, self.say)
        self._culprit: str | None = None  # why all processes go back after a round of local steps
        self.meter = ThroughputMeter(task, plan.ceiling_gflops)
        self._phases = PhaseTimes(self)
        self._evaluations = EvaluationSchedule(
            plan.eval_every, plan.evaluations, plan.stop_criterion
        )
        self._emit, self.run_path = emit, run_path
        self._machine = MachineEvents(self)
        self._watch = self._machine.watching(watch)
        self._started = time.perf_counter() if plan.started is None else plan.started
        self._last: Score | None = None
        self._last_event: Event = {}
        self.reason = plan.stop_criterion.text
        self._is_ended = self._has_warned = False
        self._launched, self._since = deque[int](), 0.0  # units of steps that a GPU is computing

    @property
    def progress(self) -> Progress:
        return self.state.progress

    def fit(self, checkpoint: Checkpoint | None = None) -> TrainingResult:
        """Trains to the end, from the start or from a checkpoint.

        Afterwards the model has the best weights, unless the task publishes them at once.

        Raises:
            Stopped: `stop` returned True; the state is saved.
            NonFiniteError: roll-backs did not cure NaN or Inf.
            StorageError: the last checkpoint or the best model could not be written.
            BudgetError: the budget was over before the first step.
        """
        set_seed(self.plan.options.seed, self.plan.device)
        self.world.broadcast([*self.model.parameters(), *self.model.buffers()])
        if self.world.decided(checkpoint is not None)[0]:
            self.restore(checkpoint)
        progress = self.progress
        before_s, self._started = progress.elapsed_s, self._started - progress.elapsed_s
        progress.add("setup", self.elapsed_s() - before_s)
        earlier_s = progress.train_s
        progress.slot = min(progress.slot, self._evaluations.slot(self.done()))
        self.callbacks.call("on_begin")
        try:
            self._fit()
        except Stopped:
            self._stopped()
        except NonFiniteError:
            with suppress(FastLSTMError):  # the error that ends the run counts for more
                self.best.publish_if_possible()
            raise
        finally:
            self.best.into_model()
            self.model.eval()
            self.callbacks.call("on_end")
        return self._result(earlier_s)

    def _fit(self) -> None:
        is_new = self.saver.saved_step < 0
        with closing(self.task.loader):
            self._phases.begin()
            if is_new and self.world.decided(self.done() < 1.0)[0]:
                if self.world.decided(self.plan.is_trained)[0]:
                    self._evaluate_start()
                self.saver.save_if_possible()
            self._train()
            self.saver.save_last()
        if not self.world.is_leader:
            return
        self.emit(self._phases.event())
        if self.meter.is_ceiling_wrong:
            threads, device = torch.get_num_threads(), self.plan.device.type
            doubt_ceilings(self.plan.options.precision, threads, device=device)
        if self.progress.best_step < 0:
            names = " and ".join(self.callbacks.refusing()) or "callbacks"
            text = "the run ended before an evaluation counted, so there is no best model"
            self.say("warning", f"{text} (waiting for: {names})")
        self.best.into_model()
        finish = self.task.finish(self)
        self.emit({**end_event(self, self.reason), "final": self._last_event, **finish})

    def _result(self, earlier_s: float) -> TrainingResult:
        progress = self.progress
        assert self._last is not None
        return TrainingResult(
            progress.step, progress.step / self.task.loader.steps_per_epoch, progress.best_step,
            progress.best_loss, self._last, self.reason, progress.tokens, self.elapsed_s(),
            progress.train_s, dict(progress.spent),
            self.task.loader.wait_s / max(progress.train_s - earlier_s, 1e-9),
        )  # fmt: skip

    def restore(self, checkpoint: Checkpoint | None, is_roll_back: bool = False) -> None:
        """Continues from the checkpoint of rank 0; see `Saver.restore`."""
        self._is_ended, self.reason, self._last = False, self.plan.stop_criterion.text, None
        self.stepper.forget()
        self._launched.clear()
        self.saver.restore(checkpoint, is_roll_back)

    def _train(self) -> None:
        """Steps and evaluates to the end; evaluates the last step."""
        self._loop()
        if self.reason == self.plan.stop_criterion.text:  # no callback has ended the run
            self.plan.stop_criterion.require_steps(self.progress.step, self.progress.setup_s)
        if self.plan.stop_criterion.budget_s is not None:  # what its reserve is for
            doing = "finishing: evaluation, files and report"
            self._emit({"event": "progress", "doing": doing, "unit": "", "done": 0, "total": None})
        while self._last is None or self.progress.evaluated_step != self.progress.step:
            if not self.evaluate():  # rolled back: later steps are taken again
                self._loop()

    def _loop(self) -> None:
        while True:
            turn = self._turn()
            if turn.is_stopped:
                self.settle()
                raise Stopped
            if (turn.is_evaluated or turn.is_over or turn.is_saved) and self.settle():
                continue  # decided again, with all results known
            if turn.is_evaluated:
                self.evaluate()
                continue
            if turn.is_over:
                self._is_ended = True
                return
            if turn.is_saved:
                self.saver.save_if_possible()
            if self.plan.is_local:
                self._take_round(turn)
            else:
                self.take_step(turn.done)
            self._machine.emit_if_due()

    def _turn(self) -> _Turn:
        """Returns what rank 0 decides; every process may stop the run."""
        done, is_stopped = self.done(), self.stop is not None and self.stop()
        is_due = self._evaluations.is_due(self.progress, done, self.elapsed_s())
        is_over, is_saved = self._is_ended or done >= 1.0, self.saver.is_due()
        share = self.done(later=1) - done if self.plan.is_local else 0.0
        turn = _Turn(is_stopped, is_due, is_over, is_saved, done, share)
        own = torch.tensor(turn, dtype=torch.float64)
        if not self.world.is_leader:
            own[1:] = 0.0
        return _Turn(*self.world.summed(own).tolist())

    def _take_round(self, turn: _Turn) -> None:
        """Takes local steps, then moves all processes to their mean weights or all of them back."""
        first = self.progress.step
        num = self.plan.round_steps(first, turn.done, turn.step_share)
        while self.progress.step < first + num:
            done = turn.done + turn.step_share * (self.progress.step - first)
            self.take_step(min(done, 1.0))
        told = torch.zeros(1 + self.world.size, dtype=torch.float64)
        told[0] = self._culprit is not None
        told[1 + self.world.rank] = self.meter.seconds_per_step
        self.world.heard(self.world.summed(told)[1:])
        if told[0]:
            culprit, self._culprit = self._culprit or "a tensor of another process", None
            self.roll_back(culprit)
            return
        average = self.state.average
        weights = [p for p in self.model.parameters() if p.requires_grad]
        self.world.average([*weights, *(() if average is None else average.tensors().values())])

    def _stopped(self) -> NoReturn:
        self.emit(self._phases.event())  # before saving: a resumed run cuts off later events
        self.saver.save()
        self.world.told()  # the agent ends all processes when the first one has ended
        if not self.world.is_leader:
            raise Dismissed(Stopped.exit_code) from None
        if self.run_path is None:
            raise Stopped("stopped while training") from None
        name = getattr(self.stop, "name", None) or "request"
        if self.world.size > 1 and self.stop is not None and not self.stop():
            name = "a signal to another process"
        self.emit(end_event(self, f"stopped by {name}"))
        saved = f"stopped by {name}; checkpoint-{self.saver.saved_step} is saved"
        raise Stopped(f"{saved}, start the run again with `resume=True` to continue") from None

    def end(self, reason: str) -> None:
        """Ends training after this step; the run is evaluated, saved and published. The first
        reason counts, for the `end` event."""
        if not self._is_ended:
            self._is_ended, self.reason = True, reason

    def elapsed_s(self) -> float:
        """Returns the wall-clock seconds of the run, over all its starts."""
        return time.perf_counter() - self._started

    def done(self, later: int = 0) -> float:
        """Returns the share of the training that is done, 0..1, `later` steps from now."""
        progress, reserve_s = self.progress, 0.0
        if self.plan.stop_criterion.budget_s is not None:
            unit_s = self.meter.unit_s
            reserve_s = self.meter.evaluation_s or unit_s * (progress.scored or self._limit())
            reserve_s += self.meter.save_s + CLOSING_S + self.task.finish_s(unit_s)
        return self.plan.stop_criterion.progress(
            progress.step + later, self.elapsed_s() + later * self.meter.seconds_per_step,
            progress.setup_s, reserve_s,
        )  # fmt: skip

    def emit(self, event: Event) -> None:
        """Hands an event to the screen, the files and the callbacks."""
        self._emit(event)
        self.callbacks.call("on_event", event)

    def say(self, level: str, text: str) -> None:
        """Emits a message; level is info or warning."""
        self.emit({"event": "message", "level": level, "text": text})

    def take_step(self, done: float | None = None) -> None:
        """Takes the next step of the run; the share that is done, by default by the clock, gives
        the learning rate."""
        started = time.perf_counter()
        factor = self._rate_factor(self.done() if done is None else done)
        batch = self.task.loader.next()
        if not self.model.training:
            self.model.train()
        after_bad = self._rate_factor(self.done(-1)) if self._launched else factor
        units, is_first = self.task.size(batch), not self._launched
        if self.stepper.launch(batch, factor, after_bad):
            if is_first:
                self._since = started
            self.progress.count(units)
            self._launched.append(units)
            # The previous step has ended while the host prepared this one.
            if not is_first and not self._settle_one():
                factor = after_bad
            if self._launched:  # not rolled back
                self.tell_of_steps(factor)
            return
        rollbacks = self.state.guard.rollbacks
        if self.settle():  # the first step that is no graph, such as one of another shape
            if self.state.guard.rollbacks > rollbacks:
                return  # rolled back: this batch comes later
            factor = self._rate_factor(self.done())
        loss, norm = self.step(batch, factor)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._bad_step(loss)
            if self.plan.is_local:  # the other processes count it too
                self.progress.count(units)
            return
        seconds = time.perf_counter() - started
        self.progress.count(units)
        self._record_step(loss, norm, units, seconds)
        self.tell_of_steps(factor)

    def _record_step(self, loss: float, norm: float, units: int, seconds: float) -> None:
        self.state.guard.in_a_row = 0
        self.progress.train_s += seconds
        self.progress.elapsed_s = self.elapsed_s()
        self.meter.add_step(loss, norm, units, seconds)

    def _rate_factor(self, done: float) -> float:
        options = self.plan.options
        factor = learning_rate_factor(done, options.warmup, options.cooldown)
        return factor * self.progress.lr_scale

    def settle(self) -> bool:
        """Waits for the launched steps, whose loss is known only then; returns whether there were
        any."""
        was_any = bool(self._launched)
        while self._launched:
            self._settle_one()
        return was_any

    def _settle_one(self) -> bool:
        """Waits for the oldest launched step; returns whether it has changed the weights."""
        units, result, progress = self._launched.popleft(), self.stepper.result(), self.progress
        assert result is not None
        seconds, self._since = time.perf_counter() - self._since, time.perf_counter()
        if not result.is_finite:
            for later in (units, *self._launched):
                progress.count(-later)
            self._bad_step(result.loss, result.gradient, is_reset=True)
            for later in self._launched:
                progress.count(later)
            return False
        self._record_step(result.loss, result.norm, units, seconds)
        return True

    def tell_of_steps(self, factor: float) -> None:
        """Emits the events that are due after a step at `factor` times the peak learning rate."""
        progress = self.progress
        if self.meter.log_due(self.plan.options.log_every, progress.step):
            step = progress.step
            self.settle()
            if self.progress.step == step:  # else the step has changed nothing
                left = self._evaluations.left(progress)
                self.emit(step_event(self, factor * self.optimizers.learning_rate, left))
                self._warn_of_straggler()
        if self._phases.is_due():
            self.emit(self._phases.event())

    def _warn_of_straggler(self) -> None:
        if self.task.is_pipelined:
            return  # stages differ by design
        line = self.world.straggler()
        if line is not None and not self._has_warned:
            self._has_warned = True
            self.say("warning", line)

    def step(self, batch: Any, factor: float = 1.0) -> tuple[float, float]:
        """Takes one optimizer step at `factor` times the peak learning rate, without counting it;
        returns the mean loss and the gradient norm before clipping."""
        if not self.model.training:
            self.model.train()
        return self.stepper.step(batch, factor)

    def _bad_step(
        self, loss: float, gradient: str | None = None, *, is_reset: bool = False
    ) -> None:
        """Skips a step whose loss or gradient (the first bad one, if known) is not finite; rolls
        back when skips do not help. A CUDA graph has reset the carried state (`is_reset`).
        """
        state, task = self.state, self.task
        self.task.gather(self.state)  # all processes must see the same weights
        weight, gradient = bad_weight(task.model), gradient or bad_gradient(task.model)
        if weight is not None:
            culprit = f"weight {weight}"
        elif not math.isfinite(loss):
            carried = task.carried().items()
            name = first_non_finite((n, t) for n, t in carried if n not in task.may_be_nan)
            culprit = f"carried {name}" if name else "loss"
        else:
            culprit = f"gradient of {gradient or 'another rank'}"
        state.optimizers.zero_grad()
        # The scaler has halved its scale: below 1 a smaller one cannot help.
        is_scaled = state.scaler is not None and state.scaler.get_scale() >= 1.0
        if weight is None and math.isfinite(loss) and is_scaled:
            return  # fp16 overflowed: the next batch has the smaller scale
        if not is_reset:
            task.reset_state()
        if not (state.guard.bad_step() or weight is not None):
            self._emit_skip(culprit, "step skipped, state reset")
        elif self.plan.is_local:
            self._culprit = culprit
        else:
            self.roll_back(culprit)

    def roll_back(self, culprit: str) -> None:
        """Goes back to the last good state, with half the learning rate. Raises NonFiniteError:
        there is no good state, or this is one roll-back too many."""
        self._emit_skip(culprit, "rolled back to the last good checkpoint")
        guard, before = self.state.guard, self.progress
        checkpoint = self.snapshots.last_good()
        if guard.roll_back() or not self.world.decided(checkpoint is not None)[0]:
            raise NonFiniteError(
                f"step {before.step}: {culprit} is NaN or Inf and came back after"
                f" {counted(guard.rollbacks - 1, 'roll-back')}; lower `learning_rate` or"
                " `grad_clip`, or try `precision='fp32'`"
            )
        self.restore(checkpoint, is_roll_back=True)
        progress = self.progress
        progress.lr_scale = before.lr_scale * 0.5
        for name in _KEPT:
            setattr(progress, name, getattr(before, name))
        name = "" if checkpoint is None else checkpoint.path.name
        self.say("warning", f"continuing from {name} with half the learning rate")

    def _emit_skip(self, culprit: str, action: str) -> None:
        about = {"step": self.progress.step, "what": "non-finite", "tensor": culprit}
        self.emit({"event": "skip", **about, "action": action})

    def _limit(self) -> int:
        return self._evaluations.limit(self.task, self.progress, self.meter.unit_s)

    def evaluate(self) -> bool:
        """Evaluates; returns False if the loss was not finite and the run was rolled back."""
        started, progress = time.perf_counter(), self.progress
        self.task.gather(self.state)
        if not progress.scored:
            progress.scored = int(self.world.decided(self._limit())[0])
            if progress.scored < self.task.num_valid:
                part = f"{progress.scored:,} of {self.task.num_valid:,} validation {self.task.unit}"
                self.say("info", f"each evaluation scores {part}")
        average = self.state.average
        averaged = nullcontext() if average is None else average.applied()
        with averaged, self.callbacks.weights_in_use():
            score = self.score(progress.scored)
            is_finite, culprit = math.isfinite(score.loss), ""
            if is_finite:
                unit_s = self._record(score, started) / max(score.num_units, 1)
            else:
                culprit = f"validation loss (weight {bad_weight(self.model)})"
        seconds = time.perf_counter() - started
        self.progress.add("evaluations", seconds)
        if not is_finite:  # after the block, in which the model holds the averaged weights
            self.roll_back(culprit)
            return False
        self.meter.add_evaluation(seconds, unit_s)
        return True

    def _evaluate_start(self) -> None:
        """Evaluates the weights before the first step, after a few units for the time of one."""
        started, units = time.perf_counter(), min(max(self.task.min_scored, 1), self.task.num_valid)
        self.score(units)
        self.meter.add_evaluation(0.0, (time.perf_counter() - started) / units)
        self.evaluate()

    def score(self, limit: int) -> Score:
        """Scores the validation part; the processes share its blocks, and all get the result.
        Raises Stopped: `stop` returned True in one of the processes."""
        task, world, watch, started = self.task, self.world, self._watch, time.perf_counter()
        num = task.num_blocks(limit)
        own = range(num)[world.share.rows(num)]
        sums = torch.zeros(num + 1, task.num_sums, dtype=torch.float64)
        try:
            if own:
                sums[own.start : own.stop] = self._sums(
                    limit, own, lambda done, part: watch(done * limit // part, limit)
                )
        except Stopped:
            sums[num] = 1.0  # tells the others
        if float(world.summed(sums)[num, 0]):
            raise Stopped("stopped while evaluating")
        return task.score(limit, sums[:num], time.perf_counter() - started)

    def _sums(self, limit: int, blocks: range, watch: Watch | None) -> Tensor:
        """Returns `Task.evaluate_blocks`, in halves with the same bits if GPU memory runs out."""
        try:
            return self.task.evaluate_blocks(limit, blocks, self.stop, watch)
        except torch.cuda.OutOfMemoryError:
            if len(blocks) < 2:
                raise
        torch.cuda.empty_cache()
        middle = len(blocks) // 2
        halves = blocks[:middle], blocks[middle:]
        return torch.cat([self._sums(limit, half, None) for half in halves])

    def _record(self, score: Score, started: float) -> float:
        """Records an evaluation while the model holds its weights; returns seconds of scoring."""
        progress, seconds = self.progress, time.perf_counter() - started
        is_accepted = bool(self.world.decided(not self.callbacks.refusing())[0])
        if not is_accepted and progress.best_step < progress.step:  # else a roll-back kept it
            self.best.forget()
        is_best = is_accepted and score.loss < progress.best_loss
        if progress.evaluated_step != progress.step:
            progress.evaluations += 1
            counts = is_accepted and not is_best
            progress.without_gain = progress.without_gain + 1 if counts else 0
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
            **({} if is_accepted else {"is_accepted": False}),
            "seconds": seconds,
            "elapsed_s": self.elapsed_s(),
        }
        self._last_event = self.callbacks.evaluate(event)
        self.emit(self._last_event)
        return seconds
