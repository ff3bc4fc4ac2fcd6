"""The training loop of a language model: it steps, evaluates, saves and recovers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastlstm.errors import (
    CorruptFileError,
    NonFiniteError,
    Setting,
    Stopped,
    StorageError,
    counted,
)
from fastlstm.runs.events import Observer
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.system.hardware import peak_memory_bytes
from fastlstm.system.prefetch import Prefetcher
from fastlstm.text.config import TrainConfig
from fastlstm.text.data.lanes import Batch, LaneBatches, WindowBatches
from fastlstm.text.data.tokenizer import Tokenizer
from fastlstm.text.evaluation import Evaluation, evaluate
from fastlstm.text.events import eval_event, tokens_per_char
from fastlstm.text.model import LanguageModel
from fastlstm.text.stepper import Stepper
from fastlstm.training.averaging import WeightAverage
from fastlstm.training.checkpoint import (
    Checkpoint,
    find_checkpoint,
    metrics_mark,
    reading,
    save_checkpoint,
)
from fastlstm.training.guard import bad_gradient, bad_weight, first_non_finite
from fastlstm.training.optimizer import OptimizerSet
from fastlstm.training.schedule import SaveTimes, StopCriterion, learning_rate_factor
from fastlstm.training.signals import StopFlag
from fastlstm.training.state import TrainingState, require_like
from fastlstm.training.throughput import ThroughputMeter

_BEST = "best"
"""File stem of the best weights in a checkpoint, there while they are not published."""
_EVALUATION_SHARE = 0.1
"""Of a budget, for one evaluation, at most; `_MIN_SCORED` tokens are scored in any case."""
_MIN_SCORED = 10_000
_FIRST_EVALUATION = 0.5
"""Of a budget, at most, before the first evaluation: what it takes is kept for the last one. Until
then that is a guess from steps, often twice too much on a busy machine."""


@dataclass(frozen=True)
class TrainPlan:
    """What a run does, with every open choice already made.

    Attributes:
        config: the resolved configuration; no field that matters is None.
        given: the configuration as the user gave it.
        ending: when it stops.
        device: where it runs.
        flop_per_token: floating-point operations of a training step per token.
        ceiling_gflops: measured GEMM rate of the device in this precision, 0 if unmeasured.
        started: `time.perf_counter()` when the wall clock of this start began.
        report_s: about how long the report will take, of a budget kept for it.
    """

    config: TrainConfig
    given: TrainConfig
    ending: StopCriterion
    device: torch.device
    flop_per_token: float
    ceiling_gflops: float
    started: float
    report_s: float = 0.0


class Trainer:
    """Trains a language model with truncated backpropagation through time.

    Args:
        plan: what to do.
        model: the model, on its device.
        batches: lanes or windows of the training split.
        valid_ids: the validation split, 1-d token ids.
        tokenizer: for bits per character.
        run: the locked run directory.
        files: config.json, tokenizer.json and generation_config.json as bytes.
        publish: writes the given weights, by name, as the run's model.
        emit: receives every event.
        stop: polled; when set, the state is saved and Stopped is raised.
        sample: writes a short text with the model, or None.
        watch: called with the validation tokens scored so far and in all.
    """

    def __init__(
        self,
        plan: TrainPlan,
        model: LanguageModel,
        batches: LaneBatches | WindowBatches,
        valid_ids: np.ndarray[Any, Any],
        tokenizer: Tokenizer,
        run: RunDirectory,
        files: dict[str, bytes],
        publish: Callable[[Mapping[str, torch.Tensor]], None],
        emit: Observer,
        stop: StopFlag,
        sample: Callable[[LanguageModel], str] | None = None,
        watch: Callable[[int, int], object] | None = None,
    ) -> None:
        self.plan, self.model, self.run, self.emit, self.stop = plan, model, run, emit, stop
        self._batches, self._valid_ids, self._tokenizer = batches, valid_ids, tokenizer
        self._files, self._publish, self._sample, self._watch = files, publish, sample, watch
        config = plan.config
        assert config.learning_rate is not None
        lanes = config.batch_size * config.accumulate
        self.state = TrainingState(
            model=model,
            optimizers=OptimizerSet(model, config, config.learning_rate),
            average=WeightAverage(model, config.ema) if config.ema > 0 else None,
            carried=model.initial_state(lanes, device=plan.device),
            scaler=torch.amp.GradScaler("cuda") if config.precision == "fp16" else None,
        )
        self._stepper = Stepper(config, model, plan.device, self.state, emit)
        self._loader: Prefetcher[Batch] | None = None
        self._saved_step = -1
        self._saves = SaveTimes(config.checkpoint_every)
        self._last: Evaluation | None = None
        self._unpublished: dict[str, torch.Tensor] = {}
        self._refusal: StorageError | None = None
        self._reason = plan.ending.text
        self._clock_offset = plan.started
        self._pace = ThroughputMeter(plan, tokens_per_char(valid_ids, tokenizer))

    def train(self, resume_from: Checkpoint | None = None) -> Evaluation:
        """Runs to the end and returns the last evaluation.

        Args:
            resume_from: a verified checkpoint, or None to start.

        Raises:
            Stopped: a signal came; the state is saved.
            NonFiniteError: NaN or Inf that roll-backs could not cure.
            StorageError: the final checkpoint or the best model could not be written.
            BudgetError: the budget was over before the first step.
        """
        position = None
        if resume_from is not None:
            with reading(resume_from):
                position = self.state.restore(resume_from.tensors, resume_from.meta)
                self._unpublished = resume_from.tensors.get(_BEST, {})
                if self._unpublished:
                    weights = dict(self.model.named_parameters())
                    require_like(weights, self._unpublished, _BEST)
            self._saved_step = self.state.progress.step
        self._open_loader(position)
        progress = self.state.progress
        before_s, self._clock_offset = progress.elapsed_s, self._clock_offset - progress.elapsed_s
        progress.add("setup", self.elapsed_s() - before_s)
        try:
            if resume_from is None and self._done() < 1.0:
                self._save_if_possible()
            self._loop()
            progress = self.state.progress
            self.plan.ending.require_steps(progress.step, progress.setup_s)
            while not self._is_evaluated():
                if not self._evaluate():  # rolled back: the steps since are to be taken again
                    self._loop()
            self._save()
            self._require_published()
        except Stopped:
            self._save_and_stop()
        except NonFiniteError:
            self._publish_best()
            raise
        finally:
            if self._loader is not None:
                self._loader.close()
        assert self._last is not None
        self._emit_end()
        return self._last

    def _is_evaluated(self) -> bool:
        progress = self.state.progress
        return self._last is not None and progress.evaluated_step == progress.step

    def _loop(self) -> None:
        while True:
            progress = self.state.progress
            if self.stop():
                raise Stopped
            if self._evaluation_due():
                self._evaluate()
                continue
            patience = self.plan.config.patience
            if patience and progress.without_gain >= patience:
                self._reason = f"no gain in {counted(patience, 'evaluation')}"
                return
            if self._done() >= 1.0:
                return
            if self._checkpoint_due():
                self._save_if_possible()
            self._step()

    def elapsed_s(self) -> float:
        """Seconds of wall clock of this run, over all its resumed parts."""
        return time.perf_counter() - self._clock_offset

    def _done(self) -> float:
        progress = self.state.progress
        reserve = self._pace.reserve_s(progress.scored or self._affordable())
        return self.plan.ending.progress(
            progress.step, self.elapsed_s(), progress.setup_s, reserve + self.plan.report_s
        )

    def _affordable(self) -> int:
        """Returns the validation tokens that an evaluation scores: at most a tenth of a budget."""
        budget_s, per_token_s = self.plan.ending.budget_s, self._pace.seconds_per_token
        if budget_s is None or per_token_s == 0.0:
            return len(self._valid_ids)
        left_s = max(budget_s - self.state.progress.setup_s, 0.0)
        fitting = int(_EVALUATION_SHARE * left_s / per_token_s)
        return min(len(self._valid_ids), max(_MIN_SCORED, fitting))

    # one step ---------------------------------------------------------------------------------

    def _step(self) -> None:
        assert self._loader is not None
        started = time.perf_counter()
        done = self._done()
        batch = self._loader.next()
        config = self.plan.config
        factor = learning_rate_factor(done, config.warmup, config.cooldown)
        loss, norm = self._stepper.step(batch, factor * self.state.progress.lr_scale)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._handle_bad_step(loss)
            return
        self.state.guard.good_step()
        progress = self.state.progress
        progress.step += 1
        progress.tokens += batch.y.numel()
        progress.elapsed_s = self.elapsed_s()
        progress.train_s += time.perf_counter() - started
        self._pace.add_step(loss, norm, batch.y.numel(), time.perf_counter() - started)
        if self._pace.log_due(config.log_every, progress.step):
            rate = factor * progress.lr_scale * self.state.optimizers.learning_rate
            self.emit(self._step_event(batch, rate))

    # trouble ----------------------------------------------------------------------------------

    def _handle_bad_step(self, loss: float) -> None:
        """Skips a step with NaN or Inf; rolls back when that does not help."""
        guard, step, lanes = (
            self.state.guard,
            self.state.progress.step,
            self.state.carried[0].shape[1],
        )
        weight = bad_weight(self.model)
        gradient = bad_gradient(self.model)
        if weight is not None:
            culprit = f"weight {weight}"
        elif not math.isfinite(loss):
            named = zip(("carried h", "carried c"), self.state.carried, strict=True)
            culprit = first_non_finite(named) or "loss"
        else:
            culprit = f"gradient of {gradient}"
        self.state.optimizers.zero_grad()
        if weight is None and math.isfinite(loss) and self._is_scale_too_large():
            return  # fp16 overflowed: the scaler has lowered its scale, the next batch goes on
        self.state.carried = self.model.initial_state(lanes, device=self.plan.device)
        if guard.bad_step(step, culprit) or weight is not None:
            self._roll_back(culprit)
        else:
            self._emit_skip(culprit, "step skipped, state reset")

    def _is_scale_too_large(self) -> bool:
        """Whether the loss was scaled up, so that a smaller scale may make the gradient finite."""
        scaler = self.state.scaler  # it has halved its scale since
        return scaler is not None and scaler.get_scale() >= 1.0

    def _emit_skip(self, culprit: str, action: str) -> None:
        step = self.state.progress.step
        about = {"step": step, "what": "non-finite", "tensor": culprit, "action": action}
        self.emit({"event": "skip", **about})

    def _roll_back(self, culprit: str) -> None:
        guard = self.state.guard
        self._emit_skip(culprit, "rolled back to the last good checkpoint")
        found, _ = find_checkpoint(self.run, finite=True)
        if guard.roll_back() or found is None:
            raise NonFiniteError(
                f"step {self.state.progress.step}: {culprit} is NaN or Inf and came back after"
                f" {counted(guard.rollbacks - 1, 'roll-back')}; lower ",
                Setting("learning_rate"),
                " or ",
                Setting("grad_clip"),
                ", or try ",
                Setting("precision", "fp32"),
            )
        before = self.state.progress
        position = self.state.restore(found.tensors, found.meta, keep_guard=True)
        progress = self.state.progress
        progress.lr_scale = before.lr_scale * 0.5
        progress.best_step, progress.best_loss = before.best_step, before.best_loss
        progress.best_bits_per_char = before.best_bits_per_char
        progress.spent, progress.scored = before.spent, before.scored
        self._saved_step = -1
        self._open_loader(position)
        self._say("warning", f"went on from {found.path.name} with half the learning rate")

    # evaluation and checkpoints -----------------------------------------------------------------

    def _evaluation_due(self) -> bool:
        progress, every = self.state.progress, self.plan.config.eval_every
        assert every is not None
        if progress.step == 0 or progress.evaluated_step == progress.step:
            return False
        is_late = progress.evaluations == 0 and self.plan.ending.budget_s is not None
        return progress.step % every == 0 or (is_late and self._done() >= _FIRST_EVALUATION)

    def _evaluate(self) -> bool:
        """Evaluates; returns False where the loss was not finite and the run was rolled back."""
        started = time.perf_counter()
        if not self.state.progress.scored:
            self._choose_scored()
        average = self.state.average
        with average.applied() if average is not None else nullcontext():
            result = evaluate(
                self.model,
                self._valid_ids,
                self._tokenizer,
                max_tokens=self.state.progress.scored,
                should_stop=self.stop,
                watch=self._watch,
            )
            is_finite = math.isfinite(result.nats_per_token)
            culprit = f"validation loss (weight {bad_weight(self.model)})"
            if is_finite:
                self._judge(result)
        seconds = time.perf_counter() - started
        self.state.progress.add("evaluations", seconds)
        if not is_finite:  # only now: within the block the model holds the averaged weights
            self._roll_back(culprit)
            return False
        self._pace.evaluation_s = seconds
        return True

    def _choose_scored(self) -> None:
        num, most = self._affordable(), len(self._valid_ids)
        self.state.progress.scored = num
        if num < most:
            self._say(
                "info",
                f"evaluations score the first {num:,} of {most:,} validation tokens: all of them"
                f" would take more than a tenth of the {self.plan.ending.text}",
            )

    def _judge(self, result: Evaluation) -> None:
        """Records an evaluation; the model holds the weights that it is of."""
        progress = self.state.progress
        is_best = result.nats_per_token < progress.best_loss
        if progress.evaluated_step != progress.step:
            progress.evaluations += 1
            progress.without_gain = 0 if is_best else progress.without_gain + 1
        progress.evaluated_step = progress.step
        if is_best:
            progress.best_step, progress.best_loss = progress.step, result.nats_per_token
            progress.best_bits_per_char = result.bits_per_char
            self._unpublished = {
                name: weight.detach().clone() for name, weight in self.model.named_parameters()
            }
            self._publish_best()
        self._last = result
        self.emit(eval_event(result, progress.step, is_best, self.elapsed_s()))
        every = self.plan.config.sample_every
        if self._sample is not None and every and progress.evaluations % every == 0:
            self.emit({"event": "sample", "step": progress.step, "text": self._sample(self.model)})

    def _publish_best(self) -> None:
        """Publishes the best weights unless they are published; what fails is tried again later."""
        if not self._unpublished:
            return
        try:
            self._publish(self._unpublished)
            self._unpublished, self._refusal = {}, None
        except StorageError as error:
            self._refusal = error
            self._say("warning", f"the best model is not published yet: {error}")

    def _require_published(self) -> None:
        """Raises StorageError when the best weights are still not published."""
        if self._refusal is not None:
            raise StorageError(
                f"{self._refusal} The best model (step {self.state.progress.best_step}) is not"
                f" published; checkpoint-{self._saved_step} keeps it, the same command with ",
                Setting("resume", True),
                " publishes it.",
            ) from self._refusal

    def _checkpoint_due(self) -> bool:
        step = self.state.progress.step
        return step != self._saved_step and self._saves.is_due(step)

    def _save(self) -> Path:
        assert self._loader is not None
        self._publish_best()
        started = time.perf_counter()
        self.state.progress.elapsed_s = self.elapsed_s()
        tensors, meta = self.state.capture(self._loader.state_dict())
        if self._unpublished:
            tensors[_BEST] = self._unpublished
        meta["metrics"] = metrics_mark(self.run.metrics_path)
        path = save_checkpoint(
            self.run,
            self.state.progress.step,
            tensors,
            meta,
            self._files,
            finite=first_non_finite(self.state.named_tensors()) is None,
            keep=self.plan.config.keep_checkpoints,
        )
        self._saved_step = self.state.progress.step
        self._saves.tried(self._saved_step)
        size = sum(file.stat().st_size for file in path.iterdir())
        seconds = time.perf_counter() - started
        self._pace.save_s = seconds
        self.state.progress.add("saving", seconds)
        self.emit(
            {
                "event": "checkpoint",
                "step": self._saved_step,
                "path": path.name,
                "seconds": seconds,
                "bytes": size,
            }
        )
        return path

    def _save_if_possible(self) -> None:
        try:
            self._save()
        except (StorageError, CorruptFileError) as error:
            self._saves.tried(self.state.progress.step)
            self._say("warning", f"checkpoint not written, the run goes on: {error}")

    def _save_and_stop(self) -> None:
        step = self.state.progress.step
        if self._saved_step != step:
            self._save()
        self.emit({"event": "end", "reason": f"stopped by {self.stop.name}", **self._totals()})
        raise Stopped(
            f"stopped by {self.stop.name}; checkpoint-{step} is saved, the same command with ",
            Setting("resume", True),
            " goes on",
        )

    def _open_loader(self, position: dict[str, int] | None) -> None:
        if self._loader is not None:
            self._loader.close()
        if position is not None:
            self._batches.load_state_dict(position)
        self._loader = Prefetcher(self._batches, should_stop=self.stop)
        self._pace.forget_wait()

    # events -------------------------------------------------------------------------------------

    def _say(self, level: str, text: str) -> None:
        self.emit({"event": "message", "level": level, "text": text})

    def _totals(self) -> dict[str, Any]:
        progress = self.state.progress
        return {
            "step": progress.step,
            "tokens": progress.tokens,
            "elapsed_s": self.elapsed_s(),
            "train_s": progress.train_s,
            "spent_s": progress.spent,
            "best_step": progress.best_step,
            "best_bits_per_char": progress.best_bits_per_char,
            "peak_memory_bytes": peak_memory_bytes(self.plan.device),
            "run": str(self.run.path),
        }

    def _emit_end(self) -> None:
        assert self._last is not None
        self.emit(
            {
                "event": "end",
                "reason": self._reason,
                **self._totals(),
                "final": eval_event(self._last, self.state.progress.step, False, self.elapsed_s()),
            }
        )

    def _step_event(self, batch: Batch, rate: float) -> dict[str, Any]:
        assert self._loader is not None
        progress = self.state.progress
        done, elapsed = self._done(), self.elapsed_s()
        ending = self.plan.ending
        if ending.budget_s is not None:
            eta = max(ending.budget_s - elapsed, 0.0)
        else:
            eta = self._pace.remaining_s((ending.total_steps or 0) - progress.step, batch.y.numel())
        return {
            "event": "step",
            "step": progress.step,
            "epoch": progress.step / self._batches.steps_per_epoch,
            "tokens": progress.tokens,
            "progress": done,
            "lr": rate,
            "elapsed_s": elapsed,
            "eta_s": eta,
            **self._pace.take(self._loader.wait_s),
        }
