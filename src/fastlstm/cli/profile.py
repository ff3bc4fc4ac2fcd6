"""`fastlstm profile SOURCE`: what holds a training run back, and the command that changes it."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlstm.cli import profile_generation, profile_server
from fastlstm.cli.command import Command, Option, Positional
from fastlstm.cli.config_file import resolve_config
from fastlstm.cli.inputs import one_or_many, require_tables
from fastlstm.cli.kind import command_for
from fastlstm.cli.options import FORECAST_OPTIONS, TEXT_OPTIONS, json_option
from fastlstm.cli.output import print_result
from fastlstm.cli.parser import parse
from fastlstm.cli.profile_rows import rows
from fastlstm.cli.train_command import train_command, train_words
from fastlstm.errors import EXIT_OK, ConfigError, UsageError
from fastlstm.forecast.config import ForecastConfig
from fastlstm.report.history import read_history
from fastlstm.runs.run_directory import kind_of_run
from fastlstm.system.fields import parse_duration
from fastlstm.system.storage import finite, write_json
from fastlstm.text.config import TrainConfig
from fastlstm.text.data.sources import open_source

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastlstm.tuning.profile import Profiler
    from fastlstm.tuning.verdicts import Verdict

PROFILE_FILE = "profile.json"
"""In a run directory, what was found about the run."""
_OWN = ("measure", "no_verify", "ops", "trace", "json")
_PROFILE_OPTIONS = (
    Option("out", str, None, "run directory that the printed commands name", "run"),
    Option("config", str, None, "YAML file of the options below, or config.json of a run", "run"),
    Option("measure", str, "12s", "time for all measurements", value="TIME"),
    Option("no_verify", bool, False, "do not run the first recommendation", is_switch=True),
    Option("ops", bool, False, "list the operations of a step, with ceilings", is_switch=True),
    Option("trace", str | None, None, "record some steps for Perfetto", value="FILE"),
    json_option("one JSON object"),
)
COMMAND = Command(
    verb="profile",
    summary="Say what holds a training run back, and which command gains how much.",
    positionals=(Positional("SOURCE", "what the run trains on, or a run", is_many=True),),
    options=(*_PROFILE_OPTIONS, *TEXT_OPTIONS),
    examples=(
        "fastlstm profile book.txt --batch-size 8 --threads 1",
        "fastlstm profile runs/book --ops",
    ),
    other="With --help, too: --horizon N, RUN --generation, http://HOST:PORT",
)
TABLE_COMMAND = Command(
    verb="profile",
    summary="Say what holds the training of a forecaster back, and which command gains how much.",
    positionals=(Positional("DATA", "a table, or the run of a forecaster", is_many=True),),
    options=(*_PROFILE_OPTIONS, *FORECAST_OPTIONS),
    examples=("fastlstm profile ETTh1.csv --horizon 96 --threads 1",),
)
OTHER_COMMANDS = (profile_generation.COMMAND, profile_server.COMMAND)


def run(argv: list[str]) -> int:
    """Prints the profile; returns 0."""
    if "--generation" in argv:
        return profile_generation.run(argv)
    if any(map(profile_server.is_url, argv)):
        return profile_server.run(argv)
    argv, run_path = _with_source_of_run(argv)
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

    from fastlstm.tuning.planned_run import chosen_sizes
    from fastlstm.tuning.profile import Profiler, with_instruction_set

    profiler = Profiler(seconds, parsed["ops"], trace)
    _set_up(sources, config, names, profiler)
    assert profiler.result is not None
    fixed = chosen_sizes(config, profiler.options)
    words = ["fastlstm", "train", *train_words(command, _OWN, argv, fixed)]
    profile = with_instruction_set(profiler.result, shlex.join(words))
    commands = {
        v.cause: v.command_prefix + train_command(command, _OWN, argv, {**fixed, **v.options})
        for v in profile.recommended
        if v.options or v.command_prefix
    }
    verified = None
    if not parsed["no_verify"] and profile.recommended:
        verified = _verified(command, argv, fixed, profile.recommended[0])
    verdicts = [{**v.to_dict(), "command": commands.get(v.cause)} for v in profile.verdicts]
    facts = {**profile.to_dict(), "verdicts": verdicts, "verified_gain": verified}
    if run_path is not None:
        write_json(run_path / PROFILE_FILE, finite(facts))
    found = rows(profile, commands, verified)
    if trace is not None:
        found.append(("trace", f"{trace}, {trace.stat().st_size / 1e6:.1f} MB; Perfetto opens it"))
    print_result(facts, found, parsed["json"])
    return EXIT_OK


def _set_up(
    sources: list[str], config: TrainConfig | ForecastConfig, names: Any, profiler: Profiler
) -> None:
    """Sets the run up as `train` does, in a directory that is removed, and profiles it."""
    from fastlstm.tuning.profile import Profiled

    with tempfile.TemporaryDirectory(prefix="fastlstm-profile-") as folder:
        shared: dict[str, Any] = {"out": Path(folder, "run"), "config": config, "given": names}
        shared |= {"observers": [], "callbacks": [profiler]}
        try:
            if isinstance(config, TrainConfig):
                from fastlstm.text.train import train

                train(one_or_many(sources), as_text=True, **shared)
            else:
                from fastlstm.forecast.train import train_forecaster

                train_forecaster(one_or_many(sources), **shared)
        except Profiled:
            pass


def _with_source_of_run(argv: list[str]) -> tuple[list[str], Path | None]:
    """Returns a command line with the source and options of a run in place of the run, and the
    run's path; the same command line where it names no run."""
    runs = [word for word in argv if os.path.isdir(word) and kind_of_run(word)]
    if not runs:
        return argv, None
    path = Path(runs[0])
    source = _source_of(path, kind_of_run(path))
    words = [word for word in argv if word != runs[0]]
    if len(runs) > 1 or any(os.path.isfile(word) for word in words[:1]):
        raise UsageError("give one run, or sources to train on, not both")
    return [*source.split(", "), "--config", str(path / "config.json"), *words], path


def _source_of(path: Path, kind: str | None) -> str:
    """Returns what a run was trained on.

    Raises:
        ConfigError: its files do not say so.
    """
    try:
        if kind == "text":
            data = json.loads((path / "config.json").read_text("utf-8"))["data"]
            source = data["source"]
        else:
            source = read_history(path / "metrics.jsonl").start["source"]
    except (OSError, ValueError, KeyError, TypeError):
        source = None
    if not isinstance(source, str) or not source:
        raise ConfigError(f"the files of {path} do not say what it was trained on")
    return source


def _verified(
    command: Command, argv: list[str], fixed: Mapping[str, Any], verdict: Verdict
) -> float | None:
    """Returns the gain that the commands themselves show, or None where steps do not show it."""
    if not verdict.is_in_steps or not verdict.options:
        return None
    from fastlstm.tuning.profile import measured_gain

    words = [
        ["fastlstm", "train", *train_words(command, _OWN, argv, o)]
        for o in (fixed, {**fixed, **verdict.options})
    ]
    return measured_gain(shlex.join(words[0]), shlex.join(words[1]))
