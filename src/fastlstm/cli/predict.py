"""`fastlstm predict SOURCE --budget TIME`: what a training run of a text will end at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastlstm.cli.command import Command, Option, Positional
from fastlstm.cli.config_file import resolve_config
from fastlstm.cli.inputs import one_or_many, refuse_runs
from fastlstm.cli.kind import command_for
from fastlstm.cli.options import TEXT_OPTIONS, config_option, json_option, measure_option
from fastlstm.cli.output import print_result
from fastlstm.cli.parser import parse
from fastlstm.cli.predict_table import TABLE_COMMAND, run_table
from fastlstm.cli.train_command import train_command
from fastlstm.errors import EXIT_OK, UsageError, counted
from fastlstm.report.terminal import clock, short_count
from fastlstm.system.fields import parse_duration
from fastlstm.text.config import TrainConfig
from fastlstm.text.data.sources import open_source
from fastlstm.text.quality_law import MOST_LAYERS
from fastlstm.text.quality_prediction import FEWEST_STEPS

if TYPE_CHECKING:
    from fastlstm.report.lines import Row
    from fastlstm.text.quality_prediction import PredictedBits
    from fastlstm.tuning.predict import Prediction

COMMAND = Command(
    verb="predict",
    summary="Predict the quality of a training run from a short run of the same model.",
    positionals=(Positional("SOURCE", "what the run trains on", is_many=True),),
    options=(
        config_option(),
        measure_option("length of the short run"),
        Option(
            "measure_steps", int, None, "length of the short run in steps; default with --steps"
            " or\n--epochs is a tenth, at least 120", value="N",
        ),
        Option("target", float, None, "say how long it takes to reach so many bits/char"),
        json_option("one JSON object"),
        *TEXT_OPTIONS,
    ),
    examples=(
        "fastlstm predict book.txt --budget 1h",
        "fastlstm predict book.txt --budget 1h --target 1.60 --measure 2m",
        "fastlstm predict book.txt --steps 5000 --rnn-size 256",
    ),
    other="The options are those of fastlstm train for a text.\n"
    "For a table of time series: fastlstm predict --horizon N --help",
)  # fmt: skip

_OWN = ("measure", "measure_steps", "target", "json")
"""Options that train has not."""


def run(argv: list[str]) -> int:
    """Prints the prediction; returns 0."""
    from fastlstm.training.signals import ended_like_ctrl_c

    with ended_like_ctrl_c():
        return _predict(argv)


def _predict(argv: list[str]) -> int:
    if command_for(argv, COMMAND, TABLE_COMMAND) is TABLE_COMMAND:
        return run_table(argv)
    parsed = parse(COMMAND, argv)
    sources, target = parsed.positionals, parsed["target"]
    if target is not None and not 0.0 < target < 100.0:
        raise UsageError(f"--target is {target:g}, expected bits/char above 0, such as 1.6")
    measure_s = None if parsed["measure"] is None else parse_duration(parsed["measure"], "measure")
    config, names = resolve_config(parsed, TEXT_OPTIONS, TrainConfig)
    refuse_runs(sources)
    open_source(sources)  # a misspelt name is an error before torch is loaded

    from fastlstm.tuning.predict import predict_run

    found = predict_run(
        one_or_many(sources), config, names, measure_s, measure_steps=parsed["measure_steps"]
    )
    command = train_command(COMMAND, _OWN, argv, found.fixed)
    facts = found.to_dict() | {"command": command}
    if target is not None:
        facts |= {"target": target, "seconds_to_target": found.measured.seconds_to(target)}
    print_result(facts, rows(found, command, target), parsed["json"])
    return EXIT_OK


def rows(found: Prediction, command: str, target: float | None) -> list[Row]:
    """Returns the lines of the result."""
    law, length = found.measured, found.length(found.steps)
    times = length.tokens / law.measured.tokens
    sizes = [f"--{name.replace('_', '-')} {value}" for name, value in found.fixed.items()]
    shown: list[Row] = [
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
        *(
            ("this model" if place == 0 else "", f"{clock(seconds)}: {bits_text(bits)}")
            for place, (seconds, bits) in enumerate(found.others())
        ),
    ]
    if target is not None:
        shown.append(("target", target_text(found, target)))
    if sizes:
        shown.append(("chosen", f"by the budget: {' '.join(sizes)}"))
    if (steps := law.measured.steps) < FEWEST_STEPS:
        had = f"the short run had {counted(int(steps), 'step')}"
        shown.append(("", f"{had}, fewer than {FEWEST_STEPS}: give a longer --measure"))
    if law.num_layers > MOST_LAYERS:
        text = f"the law was measured with at most {MOST_LAYERS} layers"
        shown.append(("", f"{text}: the interval may be too narrow"))
    shown.append(("command", command))
    return shown


def bits_text(bits: PredictedBits) -> str:
    """Returns "1.612 bits/char (1.560 to 1.666)"."""
    return f"{bits.bits:.3f} bits/char ({bits.low:.3f} to {bits.high:.3f})"


def target_text(found: Prediction, target: float) -> str:
    """Returns how long the run must be to reach a target."""
    seconds = found.measured.seconds_to(target)
    if seconds is None:
        return f"{target:g} bits/char is out of reach of this model; a larger one may reach it"
    return f"{target:g} bits/char after about {clock(seconds)} with this model"
