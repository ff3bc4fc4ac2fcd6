"""Trains a forecaster on windows: steps, validation on the way, the best weights at the end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastlstm.errors import NonFiniteError, Stopped
from fastlstm.nn.forecaster import ForecastNetwork
from fastlstm.series.inputs import Inputs
from fastlstm.series.windows import WindowIndex, WindowLoader
from fastlstm.training.averaging import WeightAverage
from fastlstm.training.guard import bad_gradient
from fastlstm.training.metrics import Observer
from fastlstm.training.schedule import Ending, learning_rate_factor

_EVALUATIONS = 16
"""Of the validation windows in a run, evenly over it."""
_MAX_VALID_WINDOWS = 20_000
_LOG_S = 1.0
_BAD_STEPS = 10


@dataclass(frozen=True)
class FitPlan:
    """How to train.

    Attributes:
        ending: when it is over.
        batch_size: windows per step.
        learning_rate: peak.
        weight_decay: decoupled (AdamW).
        warmup: share of the run that raises the learning rate.
        cooldown: share of the run, at its end, that lowers it to zero.
        grad_clip: largest global norm.
        ema: decay of the averaged weights that are judged and kept; 0 keeps the last ones.
        patience: evaluations without gain after which it ends; 0 never does.
        seed: of order and dropout.
    """

    ending: Ending
    batch_size: int = 32
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    warmup: float = 0.02
    cooldown: float = 0.7
    grad_clip: float = 1.0
    ema: float = 0.0
    patience: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Fitted:
    """What came of it.

    Attributes:
        steps: optimizer steps taken.
        best_step: after which the kept weights were.
        best_loss: their validation loss.
        seconds: wall clock in all.
        input_wait_share: share of the steps' time spent waiting for windows.
        reason: why it ended.
    """

    steps: int
    best_step: int
    best_loss: float
    seconds: float
    input_wait_share: float
    reason: str


class ForecastTrainer:
    """Trains a model; afterwards it holds the weights that were best on the validation windows.

    Args:
        model: on the CPU.
        inputs: the table and its scaler.
        train: training windows.
        valid: validation windows; of more than 20,000 as many are used, evenly spread.
        plan: how.
        emit: receives every event, a plain dict.
        stop: polled.
    """

    def __init__(
        self,
        model: ForecastNetwork,
        inputs: Inputs,
        train: WindowIndex,
        valid: WindowIndex,
        plan: FitPlan,
        emit: Observer,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        self.model, self.inputs, self.plan, self.emit = model, inputs, plan, emit
        self._train, self._valid, self._stop = train, valid.rows(_MAX_VALID_WINDOWS), stop
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=plan.learning_rate, weight_decay=plan.weight_decay,
        )  # fmt: skip
        self._average = WeightAverage(model, plan.ema) if plan.ema > 0 else None
        self._best: dict[str, Tensor] = {}
        self._best_loss, self._best_step, self._without_gain = math.inf, 0, 0
        self._step, self._bad, self._step_s = 0, 0, 0.0
        self._losses: list[float] = []
        self._started = time.perf_counter()
        self._logged = self._started

    def train(self) -> Fitted:
        """Runs to the end.

        Raises:
            Stopped: `stop` said so; the model holds the best weights so far.
            NonFiniteError: losses stayed NaN or infinite.
        """
        plan, table = self.plan, self.inputs.table
        torch.manual_seed(plan.seed)
        evaluated, reason = 0, plan.ending.text
        loader = WindowLoader(
            table, 1, plan.batch_size, index=self._train, seed=plan.seed, should_stop=self._stop
        )
        try:
            with loader:
                while (done := self._done()) < 1.0:
                    if self._stop is not None and self._stop():
                        raise Stopped("stopped while training")
                    if done * _EVALUATIONS >= evaluated + 1:
                        evaluated = int(done * _EVALUATIONS)
                        self._evaluate()
                        if plan.patience and self._without_gain >= plan.patience:
                            reason = f"no gain in {plan.patience} evaluations"
                            break
                    self._take_step(loader, done)
                else:
                    self._evaluate()
        finally:
            if self._best:
                self.model.load_state_dict(self._best)
            self.model.eval()
        share = loader.wait_s / max(self._step_s, 1e-9)
        seconds = time.perf_counter() - self._started
        return Fitted(self._step, self._best_step, self._best_loss, seconds, share, reason)

    def _done(self) -> float:
        return self.plan.ending.progress(self._step, time.perf_counter() - self._started)

    def _take_step(self, loader: WindowLoader, done: float) -> None:
        started, plan = time.perf_counter(), self.plan
        self.model.train()
        batch = loader.next()
        loss = self._loss(*self.inputs.prepare(batch.values, batch.segments))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), plan.grad_clip)
        value = float(loss.detach())
        if math.isfinite(value) and math.isfinite(float(norm)):
            factor = learning_rate_factor(done, plan.warmup, plan.cooldown)
            for group in self._optimizer.param_groups:
                group["lr"] = plan.learning_rate * factor
            self._optimizer.step()
            if self._average is not None:
                self._average.update()
            self._step, self._bad = self._step + 1, 0
            self._losses.append(value)
        else:
            self._skip()
        self._optimizer.zero_grad()
        self._step_s += time.perf_counter() - started
        if time.perf_counter() - self._logged > _LOG_S:
            self._log(loader, done)

    def _skip(self) -> None:
        self._bad += 1
        culprit = bad_gradient(self.model) or "loss"
        if self._bad >= _BAD_STEPS:
            raise NonFiniteError(
                f"step {self._step}: {culprit} was NaN or infinite {_BAD_STEPS} times in a row;"
                " lower the learning rate, or look at the values of the table"
            )
        about = {"step": self._step, "what": "non-finite", "tensor": culprit}
        self.emit({"event": "skip", **about, "action": "step skipped"})

    def _loss(self, values: Tensor, statics: Tensor | None) -> Tensor:
        """Returns the mean loss over the values that are there."""
        config = self.model.config
        target = values[:, config.input_size :, : config.num_targets]
        parameters = self.model(values, statics)
        if not config.has_missing:
            return self.model.output.loss(parameters, target).mean()
        is_there = ~target.isnan()
        losses = self.model.output.loss(parameters, target.nan_to_num(0.0))
        return torch.where(is_there, losses, 0.0).sum() / is_there.sum().clamp(min=1)

    def _evaluate(self) -> None:
        started = time.perf_counter()
        if self._average is not None:
            with self._average.applied():
                loss = self._validation_loss()
                kept = self._copy()
        else:
            loss, kept = self._validation_loss(), self._copy()
        is_best = loss < self._best_loss
        self._without_gain = 0 if is_best else self._without_gain + 1
        if is_best:
            self._best, self._best_loss, self._best_step = kept, loss, self._step
        now = time.perf_counter()
        self.emit(
            {
                "event": "eval",
                "step": self._step,
                "split": "valid",
                "loss": loss,
                "is_best": is_best,
                "seconds": now - started,
                "elapsed_s": now - self._started,
            }
        )

    def _copy(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    @torch.no_grad()
    def _validation_loss(self) -> float:
        self.model.eval()
        total, count = 0.0, 0
        config = self.model.config
        for values, statics in self.inputs.read(self._valid, config.input_size + config.horizon):
            total += float(self._loss(values, statics)) * len(values)
            count += len(values)
        return total / count

    def _log(self, loader: WindowLoader, done: float) -> None:
        now = time.perf_counter()
        self._logged = now
        self.emit(
            {
                "event": "step",
                "step": self._step,
                "epoch": self._step / loader.steps_per_epoch,
                "progress": done,
                "loss": sum(self._losses) / max(1, len(self._losses)),
                "windows_per_s": self._step * self.plan.batch_size / max(self._step_s, 1e-9),
                "input_wait_share": loader.wait_s / max(self._step_s, 1e-9),
                "elapsed_s": now - self._started,
            }
        )
        self._losses.clear()
