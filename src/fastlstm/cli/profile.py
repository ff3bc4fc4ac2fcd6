"""`fastlstm profile SOURCE`: what holds a training run back, and the command that changes it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlstm.cli.command import Command, Option, Positional
from fastlstm.cli.config_file import resolve_config
from fastlstm.cli.inputs import one_or_many, require_tables
from fastlstm.cli.kind import command_for
from fastlstm.cli.options import FORECAST_OPTIONS, TEXT_OPTIONS, config_option, json_option
from fastlstm.cli.output import print_result, say
from fastlstm.cli.parser import parse
from fastlstm.cli.profile_rows import rows
from fastlstm.cli.source_of_run import with_source_of_run
from fastlstm.cli.train_command import train_command, train_words
from fastlstm.errors import EXIT_OK, FastLSTMError, StorageError, UsageError
from fastlstm.forecast.config import ForecastConfig
from fastlstm.runs.run_directory import TRAINER_FILE
from fastlstm.system.fields import parse_duration
from fastlstm.system.storage import finite, write_json
from fastlstm.text.config import TrainConfig
from fastlstm.text.data.sources import open_source

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastlstm.tuning.profile import Profile
    from fastlstm.tuning.verdicts import Verdict

PROFILE_FILE = "profile.json"
"""In a run directory, what was found about the run."""
_OWN = ("measure", "no_verify", "ops", "trace", "json")
_PROFILE_OPTIONS = (
    Option("out", str, None, "run directory that the printed commands name", "run"),
    config_option(),
    Option("measure", str, "12s", "time for all measurements", value="TIME"),
    Option("no_verify", bool, False, "do not run the first recommendation", is_switch=True),
    Option(
        "ops",
        bool,
        False,
        "list the operations of a step with their time",
        is_switch=True,
    ),
    Option(
        "trace",
        str | None,
        None,
        "write a trace of three steps as Chrome trace JSON (opens in Perfetto)",
        value="FILE",
    ),
    json_option("one JSON object"),
)
COMMAND = Command(
    verb="profile",
    summary="Find the bottlenecks of a training run and measure what removing each gains.",
    positionals=(Positional("SOURCE", "what the run trains on, or a run", is_many=True),),
    options=(*_PROFILE_OPTIONS, *TEXT_OPTIONS),
    examples=(
        "fastlstm profile book.txt --batch-size 8 --threads 1",
        "fastlstm profile runs/book --ops",
    ),
    other="Training a forecaster on a table has options of its own:\n"
    "  fastlstm profile --horizon N --help",
)
TABLE_COMMAND = Command(
    verb="profile",
    summary="Find the bottlenecks of training a forecaster, and what removing each gains.",
    positionals=(Positional("DATA", "a table, or the run of a forecaster", is_many=True),),
    options=(*_PROFILE_OPTIONS, *FORECAST_OPTIONS),
    examples=("fastlstm profile ETTh1.csv --horizon 96 --threads 1",),
)


def run(argv: list[str]) -> int:
    """Prints the profile; returns 0."""
    from fastlstm.training.signals import ended_like_ctrl_c

    with ended_like_ctrl_c():
        return _profile_training(argv)


def _profile_training(argv: list[str]) -> int:
    argv, run_path = with_source_of_run(argv, COMMAND, TABLE_COMMAND)
    command = command_for(argv, COMMAND, TABLE_COMMAND)
    parsed = parse(command, argv)
    sources, seconds = parsed.positionals, parse_duration(parsed["measure"], "measure")
    trace = None if parsed["trace"] is None else Path(parsed["trace"])
    config: TrainConfig | ForecastConfig
    if command is COMMAND:
        config, names = resolve_config(parsed, TEXT_OPTIONS, TrainConfig)
        open_source(sources)  # a misspelt name is an error before torch is loaded
    else:
        config, names = resolve_config(parsed, FORECAST_OPTIONS, ForecastConfig)
        require_tables(sources)
        if "horizon" not in names:
            raise UsageError("--horizon is missing: give the number of rows to forecast")

    from fastlstm.tuning.op_times import check_trace
    from fastlstm.tuning.planned_run import chosen_sizes
    from fastlstm.tuning.profile import profile_run
    from fastlstm.tuning.verification import with_instruction_set

    if trace is not None:
        check_trace(trace)
    source = one_or_many(sources)
    profile, options = profile_run(source, config, names, seconds, parsed["ops"], trace)
    fixed = chosen_sizes(config, options)
    profile = with_instruction_set(profile, train_words(command, _OWN, argv, fixed))
    commands = _commands(profile, command, argv, config, fixed)
    verified = None
    if not parsed["no_verify"] and profile.recommended:
        verified = _verified(command, argv, fixed, profile.recommended[0], profile.step_share)
    verdicts = [{**v.to_dict(), "command": commands.get(v.cause)} for v in profile.verdicts]
    facts = {**profile.to_dict(), "verdicts": verdicts, "verified_gain": verified}
    found = rows(profile, commands, verified)
    if trace is not None:
        found.append(("trace", f"{trace}, {trace.stat().st_size / 1e6:.1f} MB; Perfetto opens it"))
    print_result(facts, found, parsed["json"])
    if run_path is not None and not (run_path / TRAINER_FILE).exists():  # a file more is damage
        try:
            write_json(run_path / PROFILE_FILE, finite(facts))
        except StorageError as error:
            say(f"note: this profile is not kept in the run: {error}")
    return EXIT_OK


def _commands(
    profile: Profile, command: Command, argv: list[str], config: TrainConfig | ForecastConfig,
    fixed: Mapping[str, Any],
) -> dict[str, str]:  # fmt: skip
    """Returns the commands by cause: of what is recommended, and of what tune is to try."""
    commands = dict[str, str]()
    for v in profile.recommended:
        if v.options or v.command_prefix:
            words = train_command(
                command, _OWN, argv, {**fixed, **v.options}, taken=commands.values()
            )
            commands[v.cause] = v.command_prefix + words
    for v in profile.to_try:
        tuned = {**fixed, "budget": config.budget or config.default_budget, "axes": v.axis}
        own = (*_OWN, "steps", "epochs")
        commands[v.cause] = train_command(
            command, own, argv, tuned, verb="tune", taken=commands.values()
        )
    return commands


def _verified(
    command: Command, argv: list[str], fixed: Mapping[str, Any], verdict: Verdict,
    step_share: float,
) -> float | None:  # fmt: skip
    """Returns the gain of the whole run that the steps of the commands themselves show, or None
    where steps do not show it."""
    if not verdict.is_in_steps or not verdict.options:
        return None
    from fastlstm.tuning.verification import measured_gain

    a, b = (train_words(command, _OWN, argv, o) for o in (fixed, {**fixed, **verdict.options}))
    try:
        return measured_gain(a, b, step_share)
    except FastLSTMError as error:  # such as of a text from standard input, which is used up
        say(f"note: the first recommendation was not verified: {error}")
        return None
