"""`fastlstm predict`: what a run of a text ends at, from a short run with the same model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from fastlstm.errors import UsageError, counted
from fastlstm.report.terminal import clock
from fastlstm.text.config import TrainConfig
from fastlstm.text.quality_law import FEWEST_STEPS, Length, QualityPrediction
from fastlstm.text.size_plan import step_seconds
from fastlstm.text.task import TextTask
from fastlstm.training.schedule import StopCriterion
from fastlstm.tuning.planned_run import chosen_sizes, describe_machine, end_of_run, plan_run

if TYPE_CHECKING:
    from fastlstm.runs.events import Event, Observer
    from fastlstm.text.quality_law import PredictedBits
    from fastlstm.text.train import Source
    from fastlstm.training.trainer import Trainer

MIN_MEASURED_S, _MAX_DEFAULT_S = 5.0, 120.0
_DEFAULT_SHARE, _MAX_SHARE = 0.1, 0.25
_STEPS_SHARE = 0.8
"""Of a short run's time, when set-up and evaluations are done."""
_FACTORS = (0.5, 1.0, 2.0, 4.0)
"""Lengths, in lengths of the run, that a prediction is shown for."""


@dataclass(frozen=True)
class RunPrediction(ABC):
    """What a run of so many `steps` is expected to end at, from the short runs that were measured;
    `fixed` are the options that the budget chose."""

    measured: Any
    steps: float
    fixed: dict[str, Any]

    @abstractmethod
    def after(self, steps: float) -> Any:
        """Returns what a run of so many steps ends at."""

    @abstractmethod
    def seconds_for(self, steps: float) -> float:
        """Returns the seconds of a run of so many steps."""

    def others(self) -> list[tuple[float, Any]]:
        """Returns seconds and result of shorter and longer runs of the same model."""
        lengths = [self.steps * factor for factor in _FACTORS]
        return [(self.seconds_for(steps), self.after(steps)) for steps in lengths]

    def to_dict(self) -> dict[str, object]:
        """Returns all of it for JSON."""
        lengths = [{"seconds": seconds, **asdict(found)} for seconds, found in self.others()]
        return {
            **asdict(self.after(self.steps)), "seconds": self.seconds_for(self.steps),
            "steps": self.steps, "measured": asdict(self.measured), "chosen": self.fixed,
            "lengths": lengths, "machine": describe_machine(),
        }  # fmt: skip


@dataclass(frozen=True)
class Prediction(RunPrediction):
    """What a run of a text is expected to end at; the short run took `measured_s`."""

    measured: QualityPrediction
    measured_s: float

    def length(self, steps: float) -> Length:
        """Returns the length of a run of so many steps."""
        return self.measured.measured.times(steps / self.measured.measured.steps)

    def after(self, steps: float) -> PredictedBits:
        return self.measured.after(self.length(steps))

    def seconds_for(self, steps: float) -> float:
        return self.measured.seconds_for(self.length(steps))

    def to_dict(self) -> dict[str, object]:
        tokens = self.length(self.steps).tokens
        return {**super().to_dict(), "tokens": tokens, "measured_s": self.measured_s}


def predict_run(
    source: Source, config: TrainConfig, given: Collection[str] = (),
    measure_s: float | None = None, observers: Sequence[Observer] = (),
    measure_steps: int | None = None,
) -> Prediction:  # fmt: skip
    """Trains a short complete run and predicts what the whole run would end at.

    Args:
        source: as of `fastlstm.train`.
        config: options of the whole run.
        given: names of the options that were chosen.
        measure_s: seconds of the short run; default is a tenth of the whole one, 5 s to 2 min, or
            up to a quarter of it for 120 steps.
        observers: get the events of the short run.
        measure_steps: steps of the short run in place of seconds; default, where the whole run ends
            by steps or epochs, is a tenth of its steps, at least 120.

    Raises:
        UsageError: the whole run is no longer than the short one, or trains on BPE tokens.
        Stopped: SIGTERM or Ctrl-C; nothing is kept.
    """
    if config.vocab == "bpe":
        raise UsageError("predict needs a text of characters or bytes: --vocab is bpe")
    if measure_s is not None and measure_steps is not None:
        raise UsageError("--measure and --measure-steps are both given: leave one out")
    if measure_steps is not None and measure_steps < 1:
        raise UsageError(f"--measure-steps is {measure_steps}, expected at least 1")
    budget_s, step_s, short_s = StopCriterion.of(config, 1).budget_s, list[float](), 0.0
    if measure_steps is None and (budget_s is not None or measure_s is not None):
        short_s = short_run_s(measure_s, budget_s)

    def look(trainer: Trainer) -> None:
        if short_s and not measure_s and trainer.plan.device.type == "cpu":
            step_s.append(_step_s(trainer))

    planned = plan_run(source, config, given, look)
    stop = StopCriterion.of(planned.options, planned.steps_per_epoch)
    if step_s and budget_s is not None:
        few_s = step_s[0] * FEWEST_STEPS / _STEPS_SHARE
        short_s = max(short_s, min(few_s, _MAX_SHARE * budget_s))
    end: dict[str, Any] = {"budget": f"{short_s:g}s"}
    if not short_s:
        end = {"steps": short_steps(measure_steps, stop.total_steps, FEWEST_STEPS)}
    fixed = chosen_sizes(config, planned.options)
    # A short run would choose a shorter sequence length than the whole one.
    batches = {n: getattr(planned.options, n) for n in ("batch_size", "accumulate", "seq_length")}
    none = dict.fromkeys(("budget", "steps", "epochs"))
    short = replace(config, **{**fixed, **batches, **none, **end})
    ended = end_of_run(source, short, {*given, *fixed, *batches, *end}, observers)
    law = law_of(planned.start, ended, planned.options.optimizer)
    steps = float(stop.total_steps or 0)
    if budget_s is not None:
        steps = law.length_in(budget_s).steps
    return Prediction(law, steps, fixed, float(ended["elapsed_s"]))


def short_run_s(asked: float | None, budget_s: float | None) -> float:
    """Returns the seconds of the short run of one that takes a budget, or of any with None.

    Raises:
        UsageError: it is too short, or no shorter than the whole run.
    """
    default_s = 0.0 if budget_s is None else _DEFAULT_SHARE * budget_s
    seconds = asked or min(max(default_s, MIN_MEASURED_S), _MAX_DEFAULT_S)
    if seconds < MIN_MEASURED_S:
        raise UsageError(f"--measure is {seconds:g} s, expected at least {MIN_MEASURED_S:g} s")
    if budget_s is not None and seconds >= budget_s:
        raise UsageError(
            f"the run takes {clock(budget_s)} and --measure {clock(seconds)}: train it, or give a"
            " longer --budget"
        )
    return seconds


def short_steps(asked: int | None, total: int | None, fewest: int) -> int:
    """Returns the steps of the short run of one that takes `total` steps, or of any with None.

    Raises:
        UsageError: it is no shorter than the whole run.
    """
    steps = asked or max(fewest, int(_DEFAULT_SHARE * (total or 0)))
    if total is not None and steps >= total:
        smaller = "" if asked is None else ", or give a smaller --measure-steps"
        raise UsageError(
            f"the run takes {counted(total, 'step')} and the short run {counted(steps, 'step')}:"
            f" train it{smaller}"
        )
    return steps


def _step_s(trainer: Trainer) -> float:
    """Returns the seconds of a training step of a run that was set up."""
    task, options = trainer.task, trainer.plan.options
    assert isinstance(task, TextTask)
    assert isinstance(options, TrainConfig)
    sizes = {n: getattr(task.model.config, n) for n in ("rnn_size", "num_layers", "embed_size")}
    return float(step_seconds(replace(options, **sizes), task.loader.ids, task.tokenizer))


def law_of(start: Event, end: Event, optimizer: str) -> QualityPrediction:
    """Returns the law for the model of a complete run, from its first and last event, or the first
    one of another run of the same options."""
    setup_s = float(end["spent_s"]["setup"])
    return QualityPrediction(
        rnn_size=int(start["model"]["rnn_size"]),
        num_layers=int(start["model"]["num_layers"]),
        optimizer=optimizer,
        train_tokens=int(start["num_units"]["train"]),
        measured=Length(float(end["units"]), float(end["step"])),
        measured_bits=float(end["best_bits_per_char"]),
        tokens_per_s=end["units"] / (end["elapsed_s"] - setup_s),
        setup_s=setup_s,
    )
