"""`fastlstm predict`: what a run of a text ends at, from a short run with the same model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fastlstm.errors import UsageError, counted
from fastlstm.report.terminal import clock
from fastlstm.text.config import TrainConfig
from fastlstm.text.quality_prediction import (
    FEWEST_STEPS,
    Length,
    PredictedBits,
    QualityPrediction,
)
from fastlstm.text.size_plan import step_seconds
from fastlstm.text.task import TextTask
from fastlstm.text.train import Source, train
from fastlstm.training.schedule import StopCriterion
from fastlstm.tuning.machine import describe_machine
from fastlstm.tuning.planned_run import PlannedRun, chosen_sizes, end_of_run, plan_run

if TYPE_CHECKING:
    from fastlstm.runs.events import Event, Observer
    from fastlstm.training.trainer import Trainer

MIN_MEASURED_S, _MAX_DEFAULT_S = 5.0, 120.0
_DEFAULT_SHARE, _MAX_SHARE = 0.1, 0.25
_STEPS_SHARE = 0.8
"""Of a short run's time, when set-up and evaluations are done."""
FACTORS = (0.5, 1.0, 2.0, 4.0)
"""Lengths, in lengths of the run, that a prediction is shown for."""


@dataclass(frozen=True)
class Prediction:
    """What a run is expected to end at.

    Attributes:
        law: the prediction for every length.
        length: of the run.
        config: of the run, with the size that its budget chose.
        fixed: the options that the budget chose, as names and values.
        measured_s: seconds that the short run took.
        machine: CPU and versions.
    """

    law: QualityPrediction
    length: Length
    config: TrainConfig
    fixed: dict[str, Any]
    measured_s: float
    machine: dict[str, object]

    @property
    def bits(self) -> PredictedBits:
        """What the run ends at."""
        return self.law.after(self.length)

    def others(self) -> list[tuple[float, PredictedBits]]:
        """Returns seconds and bits of shorter and longer runs of the same model."""
        lengths = [self.length.times(factor) for factor in FACTORS]
        return [(self.law.seconds_for(length), self.law.after(length)) for length in lengths]

    def to_dict(self) -> dict[str, object]:
        """Returns all of it for JSON."""
        lengths = [{"seconds": seconds, **asdict(bits)} for seconds, bits in self.others()]
        return {
            **asdict(self.bits), "seconds": self.law.seconds_for(self.length),
            "tokens": self.length.tokens, "measured": asdict(self.law), "chosen": self.fixed,
            "measured_s": self.measured_s, "lengths": lengths, "machine": self.machine,
        }  # fmt: skip


def predict_run(
    source: Source,
    config: TrainConfig,
    given: Collection[str] = (),
    measure_s: float | None = None,
    observers: Sequence[Observer] = (),
    measure_steps: int | None = None,
) -> Prediction:
    """Trains a short complete run and predicts what the whole run would end at.

    Args:
        source: as of `fastlstm.train`.
        config: options of the whole run.
        given: names of those that were chosen.
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
    planned, end = _plan(source, config, given, measure_s, measure_steps)
    fixed = chosen_sizes(config, planned.options)
    whole = replace(config, **fixed)
    # A short run would choose a shorter sequence length than the whole one.
    batches = {n: getattr(planned.options, n) for n in ("batch_size", "accumulate", "seq_length")}
    short = replace(whole, **{**batches, "budget": None, "steps": None, "epochs": None, **end})
    names = {*given, *fixed, *batches, *end}
    ended = end_of_run(source, short, names, observers, partial(train, as_text=True))
    return _predicted(planned, whole, fixed, ended)


def _plan(
    source: Source, config: TrainConfig, given: Collection[str], measure_s: float | None,
    measure_steps: int | None,
) -> tuple[PlannedRun, dict[str, Any]]:  # fmt: skip
    """Returns the whole run as it would be, and `budget` or `steps` of the short one."""
    budget_s = StopCriterion.of(config, 1).budget_s
    if measure_steps is None and (budget_s is not None or measure_s is not None):
        short_s = short_run_s(measure_s, budget_s)
        step_s = list[float]()
        planned = plan_run(
            source, config, given,
            look=lambda trainer: step_s.extend(() if measure_s else _step_s(trainer)),
        )  # fmt: skip
        if step_s and budget_s is not None:
            few_s = step_s[0] * FEWEST_STEPS / _STEPS_SHARE
            short_s = max(short_s, min(few_s, _MAX_SHARE * budget_s))
        return planned, {"budget": f"{short_s:g}s"}
    planned = plan_run(source, config, given)
    return planned, {"steps": _measure_steps(measure_steps, planned)}


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


def _step_s(trainer: Trainer) -> list[float]:
    """Returns the seconds of a training step of a run that was set up; nothing on a GPU."""
    task, options = trainer.task, trainer.plan.options
    assert isinstance(task, TextTask)
    assert isinstance(options, TrainConfig)
    if task.device.type != "cpu":
        return []
    model = task.model.config
    size = {name: getattr(model, name) for name in ("rnn_size", "num_layers", "embed_size")}
    options = replace(options, **size)
    return [step_seconds(options, task.loader.ids, task.tokenizer)]


def _measure_steps(asked: int | None, planned: PlannedRun) -> int:
    """Returns the steps of the short run; the whole one must be longer, if it ends by steps."""
    if asked is not None and asked < 1:
        raise UsageError(f"--measure-steps is {asked}, expected at least 1")
    total = StopCriterion.of(planned.options, planned.steps_per_epoch).total_steps
    if total is None:
        assert asked is not None
        return asked
    steps = asked or max(FEWEST_STEPS, int(_DEFAULT_SHARE * total))
    if steps >= total:
        raise UsageError(
            f"the run takes {counted(total, 'step')} and the short run {counted(steps, 'step')}:"
            " train it, or give a smaller --measure-steps"
        )
    return steps


def law_of(start: Event, end: Event, optimizer: str) -> QualityPrediction:
    """Returns the law for the model of a complete run.

    Args:
        start: the event that the run began with, or another run of the same options.
        end: the event that it ended with.
        optimizer: of the run.
    """
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


def _predicted(
    planned: PlannedRun, config: TrainConfig, fixed: dict[str, Any], end: Event
) -> Prediction:
    """Returns the prediction from the event that the short run ended with."""
    law = law_of(planned.start, end, planned.options.optimizer)
    stop = StopCriterion.of(config, planned.steps_per_epoch)
    if stop.total_steps is not None:
        length = law.measured.times(stop.total_steps / law.measured.steps)
    else:
        assert stop.budget_s is not None
        length = law.length_in(stop.budget_s)
    return Prediction(
        law, length, config, fixed, float(end["elapsed_s"]), describe_machine()
    )  # fmt: skip
