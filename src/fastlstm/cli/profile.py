"""`fastlstm profile SOURCE`: what holds a training run back, and the command that changes it."""

from __future__ import annotations

import json
import math
import os
import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlstm.cli import profile_generation, profile_server
from fastlstm.cli.command import Command, Option, Positional
from fastlstm.cli.config_file import resolve_config
from fastlstm.cli.inputs import one_or_many
from fastlstm.cli.options import TEXT_OPTIONS, json_option
from fastlstm.cli.output import print_result
from fastlstm.cli.parser import parse
from fastlstm.cli.train_command import train_command, train_words
from fastlstm.errors import EXIT_OK, ConfigError, UsageError
from fastlstm.runs.run_directory import kind_of_run
from fastlstm.system.fields import parse_duration
from fastlstm.text.config import TrainConfig
from fastlstm.text.data.sources import open_source

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastlstm.report.lines import Row
    from fastlstm.tuning.profile import Profile
    from fastlstm.tuning.verdicts import Verdict

_OWN = ("time", "no_verify", "json")
COMMAND = Command(
    verb="profile",
    summary="Say what holds a training run of a text back, and which command gains how much.",
    positionals=(Positional("SOURCE", "what the run trains on, or a run", is_many=True),),
    options=(
        Option("out", str, None, "run directory that the printed commands name", "run"),
        Option(
            "config", str, None, "YAML file of the options below, or config.json of a run", "run"
        ),
        Option("time", str, "15s", "time for all measurements", value="TIME"),
        Option("no_verify", bool, False, "do not run the first recommendation", is_switch=True),
        json_option("one JSON object"),
        *TEXT_OPTIONS,
    ),
    examples=(
        "fastlstm profile book.txt --batch-size 8 --threads 1",
        "fastlstm profile runs/book --json",
    ),
    other="The options are those of fastlstm train for a text. Other subjects: fastlstm profile RUN"
    " --generation, and fastlstm profile http://HOST:PORT of a server; each with --help.",
)
OTHER_COMMANDS = (profile_generation.COMMAND, profile_server.COMMAND)


def run(argv: list[str]) -> int:
    """Prints the profile; returns 0."""
    if "--generation" in argv:
        return profile_generation.run(argv)
    if any(map(profile_server.is_url, argv)):
        return profile_server.run(argv)
    parsed = parse(COMMAND, argv)
    sources, seconds = parsed.positionals, parse_duration(parsed["time"], "time")
    runs = [source for source in sources if os.path.isdir(source) and kind_of_run(source)]
    if runs:
        sources, argv = _of_run(sources, argv)
        parsed = parse(COMMAND, argv)
    config, names = resolve_config(parsed, TEXT_OPTIONS, TrainConfig)
    open_source(sources)  # a misspelt name is an error before torch is loaded

    from fastlstm.text.train import train
    from fastlstm.tuning.planned_run import chosen_sizes
    from fastlstm.tuning.profile import Profiled, Profiler

    profiler = Profiler(seconds)
    with tempfile.TemporaryDirectory(prefix="fastlstm-profile-") as folder:
        try:
            train(
                one_or_many(sources), out=Path(folder, "run"), config=config, given=names,
                observers=[], callbacks=[profiler], as_text=True,
            )  # fmt: skip
        except Profiled:
            pass
    profile = profiler.result
    assert profile is not None
    fixed = chosen_sizes(config, profiler.options)
    commands = {
        v.cause: train_command(COMMAND, _OWN, argv, {**fixed, **v.options})
        for v in profile.recommended
        if v.options
    }
    verified = None
    if not parsed["no_verify"] and profile.recommended:
        verified = _verified(argv, fixed, profile.recommended[0])
    verdicts = [{**v.to_dict(), "command": commands.get(v.cause)} for v in profile.verdicts]
    facts = {**profile.to_dict(), "verdicts": verdicts, "verified_gain": verified}
    print_result(facts, rows(profile, commands, verified), parsed["json"])
    return EXIT_OK


def _of_run(sources: list[str], argv: list[str]) -> tuple[list[str], list[str]]:
    """Returns the source that a run was trained on and the command line with the run's options."""
    if len(sources) > 1:
        raise UsageError("give one run, or sources to train on, not both")
    path = Path(sources[0])
    if kind_of_run(str(path)) != "text":
        raise UsageError(f"{path} is no run of a text model; profile measures those only")
    try:
        source = str(json.loads((path / "config.json").read_text("utf-8"))["data"]["source"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}/config.json does not say what it was trained on") from error
    return [source], [
        source, "--config", str(path / "config.json"),
        *(word for word in argv if word != sources[0]),
    ]  # fmt: skip


def _verified(argv: list[str], fixed: Mapping[str, Any], verdict: Verdict) -> float | None:
    """Returns the gain that the commands themselves show, or None where steps do not show it."""
    if not verdict.is_in_steps or not verdict.options:
        return None
    from fastlstm.tuning.profile import measured_gain

    words = [
        ["fastlstm", "train", *train_words(COMMAND, _OWN, argv, o)]
        for o in (fixed, {**fixed, **verdict.options})
    ]
    return measured_gain(shlex.join(words[0]), shlex.join(words[1]))


def rows(profile: Profile, commands: Mapping[str, str], verified: float | None) -> list[Row]:
    """Returns the lines of the result."""
    shares = sorted(profile.phases.items(), key=lambda item: -item[1])
    ceiling = profile.ceiling_share
    of_ceiling = "" if ceiling is None else f", {100 * ceiling:.0f} % of the ceiling"
    found: list[Row] = [
        ("speed", f"{profile.units_per_s:,.0f} {profile.unit}/s in steps{of_ceiling}"),
        ("time", " · ".join(f"{n.replace('_', ' ')} {100 * s:.0f} %" for n, s in shares)),
    ]
    if not profile.recommended:
        found.append(("verdict", f"nothing above 5 %: this run is healthy{of_ceiling}"))
    for place, verdict in enumerate(profile.recommended):
        found.append((f"{place + 1}. {verdict.cause}", f"{gain_text(verdict)}; {verdict.effect}"))
        found.append(("", verdict.evidence))
        if place == 0 and verified is not None:
            found.append(("", f"verified by running it: {100 * verified:+.0f} %"))
        if verdict.effect == "changes learning":
            found.append(("", "time to quality may differ: more units per second learn less each"))
        if verdict.cause in commands:
            found.append(("", commands[verdict.cause]))
    if profile.others is not None and profile.others > 0.1:
        found.append(("noise", f"other processes used {100 * profile.others:.0f} % of the cores"))
    return found


def gain_text(verdict: Verdict) -> str:
    """Returns "+45 % units per second (41 to 49 %)"."""
    text = f"{100 * verdict.gain:+.0f} % speed"
    if verdict.low == verdict.high:
        return f"{text}, by accounting"
    if not math.isfinite(verdict.high):
        return f"{text} (no interval)"
    return f"{text} ({100 * verdict.low:.0f} to {100 * verdict.high:.0f} %)"
