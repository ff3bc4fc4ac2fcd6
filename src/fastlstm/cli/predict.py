"""`fastlstm predict SOURCE --budget TIME`: the result of a training run, predicted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastlstm.cli.command import Command, Option, Parsed, Positional
from fastlstm.cli.options import CONFIG, JSON, of_training_runs
from fastlstm.cli.output import print_result
from fastlstm.cli.training import read_training, with_source_of_run
from fastlstm.errors import EXIT_OK, UsageError, counted
from fastlstm.report.lines import Row, labelled
from fastlstm.report.terminal import clock, short_count
from fastlstm.system.fields import parse_duration
from fastlstm.text.quality_law import FEWEST_STEPS, MOST_LAYERS, PredictedBits
from fastlstm.training.signals import ended_like_ctrl_c

if TYPE_CHECKING:
    from fastlstm.tuning.predict import PredictedLoss, Prediction, TablePrediction

_MEASURE = "time of the short runs; default is a tenth of the budget, 5s to 2m"
_STEPS = (
    "length of the short run in steps; default with --steps or --epochs is a tenth, at least 120"
)
COMMAND, TABLE_COMMAND = of_training_runs(
    Command(
        verb="predict",
        summary="Predict the result of a training run from short runs of the same model.",
        positionals=(Positional("SOURCE", "what the run trains on, or a run", is_many=True),),
        options=(CONFIG, Option("measure", _MEASURE, value="TIME"), JSON),
        examples=(
            "fastlstm predict book.txt --budget 1h --target 1.60 --measure 2m",
            "fastlstm predict book.txt --steps 5000 --rnn-size 256",
            "fastlstm predict ETTh1.csv --target OT --horizon 96 --budget 5m",
        ),
    ),
    texts=(
        Option("measure_steps", _STEPS, int),
        Option("target", "also predict the time to reach this many bits/char", float),
    ),
)
_LITTLE = 0.01
"""A longer run that gains less than this share is not worth its time."""


@ended_like_ctrl_c()
def run(argv: list[str]) -> int:
    """Prints the prediction; returns 0."""
    argv, _ = with_source_of_run(argv, COMMAND, TABLE_COMMAND)
    job = read_training(argv, COMMAND, TABLE_COMMAND, _measure_s)
    parsed, measure_s = job.parsed, job.own
    if job.is_table:
        from fastlstm.tuning.predict import predict_forecaster

        table = predict_forecaster(job.source, job.config, job.names, measure_s)
        command = job.train_command(table.fixed)
        facts, shown = table.to_dict(), table_rows(table, command)
    else:
        from fastlstm.tuning.predict import predict_run

        found = predict_run(
            job.source, job.config, job.names, measure_s, measure_steps=parsed["measure_steps"]
        )
        command, target = job.train_command(found.fixed), parsed["target"]
        facts, shown = found.to_dict(), rows(found, command, target)
        if target is not None:
            facts |= {"target": target, "seconds_to_target": found.measured.seconds_to(target)}
    print_result(facts | {"command": command}, shown, parsed["json"])
    return EXIT_OK


def _measure_s(parsed: Parsed) -> float | None:
    target = parsed["target"] if parsed.command is COMMAND else None
    if target is not None and not 0.0 < target < 100.0:
        raise UsageError(f"--target is {target:g}, expected bits/char above 0, such as 1.6")
    return None if parsed["measure"] is None else parse_duration(parsed["measure"], "measure")


def rows(found: Prediction, command: str, target: float | None) -> list[Row]:
    """Returns the lines of the result for a text."""
    law, length, steps = found.measured, found.length(found.steps), found.measured.measured.steps
    sizes = [f"--{name.replace('_', '-')} {value}" for name, value in found.fixed.items()]
    notes = []
    if steps < FEWEST_STEPS:
        had = f"the short run had {counted(int(steps), 'step')}"
        notes.append(f"{had}, fewer than {FEWEST_STEPS}: give a longer --measure")
    if law.num_layers > MOST_LAYERS:
        text = f"the law was measured with at most {MOST_LAYERS} layers"
        notes.append(f"{text}: the interval may be too narrow")
    times = length.tokens / law.measured.tokens
    reach: list[Row] = []
    if target is not None:
        text = "is out of reach of this model; a larger one may reach it"
        if (seconds := law.seconds_to(target)) is not None:
            text = f"after about {clock(seconds)} with this model"
        reach = [("target", f"{target:g} bits/char {text}")]
    return [
        (
            "prediction",
            f"{bits_text(found.after(found.steps))} after {clock(found.seconds_for(found.steps))}",
        ),
        ("", f"{short_count(length.tokens)} characters, {times:.3g} times the short run"),
        (
            "measured",
            f"{law.measured_bits:.3f} bits/char after {clock(found.measured_s)}:"
            f" {short_count(law.measured.tokens)} characters, {law.tokens_per_s:,.0f}/s",
        ),
        *labelled("this model", [f"{clock(s)}: {bits_text(bits)}" for s, bits in found.others()]),
        *reach,
        *([("chosen", f"by the budget: {' '.join(sizes)}")] if sizes else []),
        *(("", note) for note in notes),
        ("command", command),
    ]


def bits_text(bits: PredictedBits) -> str:
    """Returns "1.612 bits/char (1.560 to 1.666)"."""
    return f"{bits.bits:.3f} bits/char ({bits.low:.3f} to {bits.high:.3f})"


def table_rows(found: TablePrediction, command: str) -> list[Row]:
    """Returns the lines of the result for a table."""
    from fastlstm.tuning.predict import FEWEST_TABLE_STEPS

    measured, others = found.measured, found.others()
    times, half = found.steps / measured.steps, max(1, measured.steps // 2)
    notes, size = [], found.fixed.get("hidden_size")
    if measured.half_loss <= measured.loss:
        notes.append("the longer run was no better: any length ends alike, within the limits")
    elif others[-1][1].loss > (1.0 - _LITTLE) * others[1][1].loss:
        notes.append("a longer run gains less than 1 %: more data or other settings may")
    if measured.steps < FEWEST_TABLE_STEPS:
        notes.append(f"fewer than {FEWEST_TABLE_STEPS} steps say little: give a longer --measure")
    return [
        ("prediction", f"{_loss_text(found.after(found.steps))} after {clock(others[1][0])}"),
        ("", f"{counted(int(found.steps), 'step')}, {times:.3g} times the short run"),
        (
            "measured",
            f"{measured.loss:.4f} validation loss after {counted(measured.steps, 'step')},"
            f" {measured.half_loss:.4f} after {counted(half, 'step')}: {clock(measured.seconds)} in"
            " all",
        ),
        *labelled("this model", [f"{clock(s)}: {_loss_text(loss)}" for s, loss in others]),
        *(("", note) for note in notes),
        *([] if size is None else [("chosen", f"by the budget: --hidden-size {size}")]),
        ("command", command),
    ]


def _loss_text(loss: PredictedLoss) -> str:
    """Returns "0.3512 validation loss (0.3401 to 0.3627)"."""
    return f"{loss.loss:.4f} validation loss ({loss.low:.4f} to {loss.high:.4f})"
