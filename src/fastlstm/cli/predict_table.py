"""`fastlstm predict DATA --horizon N`: what a training run of a forecaster will end at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastlstm.cli.command import Command, Positional
from fastlstm.cli.config_file import resolve_config
from fastlstm.cli.inputs import one_or_many, require_horizon, require_tables
from fastlstm.cli.options import FORECAST_OPTIONS, config_option, json_option, measure_option
from fastlstm.cli.output import print_result
from fastlstm.cli.parser import parse
from fastlstm.cli.train_command import train_command
from fastlstm.errors import EXIT_OK, counted
from fastlstm.forecast.config import ForecastConfig
from fastlstm.report.terminal import clock
from fastlstm.system.fields import parse_duration

if TYPE_CHECKING:
    from fastlstm.report.lines import Row
    from fastlstm.tuning.predict_table import PredictedLoss, TablePrediction

TABLE_COMMAND = Command(
    verb="predict",
    summary="Predict the loss of a forecaster's training run from two short runs of it.",
    positionals=(Positional("DATA", "the table that the run trains on", is_many=True),),
    options=(
        config_option(),
        measure_option("time of the short runs"),
        json_option("one JSON object"),
        *FORECAST_OPTIONS,
    ),
    examples=("fastlstm predict ETTh1.csv --target OT --horizon 96 --budget 5m",),
    other="The options are those of fastlstm train for a table.",
)  # fmt: skip
_OWN = ("measure", "json")
_LITTLE = 0.01
"""A longer run that gains less than this share is not worth its time."""


def run_table(argv: list[str]) -> int:
    """Prints the prediction; returns 0."""
    parsed = parse(TABLE_COMMAND, argv)
    sources = parsed.positionals
    measure_s = None if parsed["measure"] is None else parse_duration(parsed["measure"], "measure")
    config, names = resolve_config(parsed, FORECAST_OPTIONS, ForecastConfig)
    require_horizon(names, sources)
    require_tables(sources)

    from fastlstm.tuning.predict_table import predict_forecaster

    found = predict_forecaster(one_or_many(sources), config, names, measure_s)
    command = train_command(TABLE_COMMAND, _OWN, argv, found.fixed)
    print_result({**found.to_dict(), "command": command}, rows(found, command), parsed["json"])
    return EXIT_OK


def rows(found: TablePrediction, command: str) -> list[Row]:
    """Returns the lines of the result."""
    from fastlstm.tuning.predict_table import FEWEST_STEPS

    measured, others = found.measured, found.others()
    times = found.steps / measured.steps
    shown: list[Row] = [
        ("prediction", f"{_text(found.after(found.steps))} after {clock(others[1][0])}"),
        ("", f"{counted(int(found.steps), 'step')}, {times:.3g} times the short run"),
        (
            "measured",
            f"{measured.loss:.4f} validation loss after {counted(measured.steps, 'step')},"
            f" {measured.half_loss:.4f} after {counted(max(1, measured.steps // 2), 'step')}:"
            f" {clock(measured.seconds)} in all",
        ),
        *(
            ("this model" if place == 0 else "", f"{clock(seconds)}: {_text(loss)}")
            for place, (seconds, loss) in enumerate(others)
        ),
    ]
    if measured.half_loss <= measured.loss:
        shown.append(("", "the longer run was no better: any length ends alike, within the limits"))
    elif others[-1][1].loss > (1.0 - _LITTLE) * others[1][1].loss:
        shown.append(("", "a longer run gains less than 1 %: more data or other settings may"))
    if measured.steps < FEWEST_STEPS:
        shown.append(("", f"fewer than {FEWEST_STEPS} steps say little: give a longer --measure"))
    if found.fixed:
        shown.append(("chosen", f"by the budget: --hidden-size {found.fixed['hidden_size']}"))
    return [*shown, ("command", command)]


def _text(loss: PredictedLoss) -> str:
    """Returns "0.3512 validation loss (0.3401 to 0.3627)"."""
    return f"{loss.loss:.4f} validation loss ({loss.low:.4f} to {loss.high:.4f})"
