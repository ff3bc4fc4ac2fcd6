"""A run in place of what it was trained on: `profile RUN`, `scale RUN`."""

from __future__ import annotations

import glob
import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from fastlstm.cli.parser import split_arguments
from fastlstm.errors import ConfigError, FastLSTMError, UsageError
from fastlstm.report.history import read_history
from fastlstm.runs.run_directory import kind_of_run
from fastlstm.system.storage import MAX_JSON_BYTES, read_bytes
from fastlstm.text.data.corpora import BUILT_IN

if TYPE_CHECKING:
    from fastlstm.cli.command import Command


def with_source_of_run(
    argv: list[str], text: Command, table: Command
) -> tuple[list[str], Path | None]:
    """Returns a command line with the source and options of a run in place of the run, and the
    run's path; the same command line where it names no run.

    Args:
        argv: words behind the verb.
        text: the command of the verb for texts.
        table: that for tables.
    """
    merged = {option.name: option for option in (*table.options, *text.options)}
    arguments = split_arguments(tuple(merged.values()), argv)
    runs = [word for word in arguments.positionals if os.path.isdir(word) and kind_of_run(word)]
    if not runs:
        return argv, None
    if len(arguments.positionals) > 1:
        raise UsageError("give one run, or sources to train on, not both")
    path = Path(runs[0])
    words = [*arguments.unknown, *(["--help"] if arguments.is_help else [])]
    for option, value in arguments.options:
        words.append(f"{option.flag}={value}")
    return [*_sources_of(path, text.verb), "--config", str(path / "config.json"), *words], path


def _sources_of(path: Path, verb: str) -> list[str]:
    """Returns what a run was trained on.

    Raises:
        ConfigError: its files do not say so, or it is not there.
    """
    kind = kind_of_run(path)
    if kind == "sequence":
        raise ConfigError(f"{path} is a sequence model, expected a run of a text or a table")
    name = _source_of(path, kind)
    several = [[name]] if kind == "text" else [[name], name.split(", ")]
    for sources in several:
        if all(map(_is_there, sources)):
            return sources
    instead = shlex.join(["fastlstm", verb, "--config", str(path / "config.json")])
    raise ConfigError(
        f"{path} was trained on {name}, which is not here; name what it was trained on:"
        f" {instead} SOURCE"
    )


def _is_there(source: str) -> bool:
    place = os.path.expanduser(source)
    return source in BUILT_IN or os.path.exists(place) or bool(glob.glob(place, recursive=True))


def _source_of(path: Path, kind: str | None) -> str:
    """Returns the name of what a run was trained on; raises ConfigError where nothing says it."""
    try:
        if kind == "text":
            config = json.loads(read_bytes(path / "config.json", MAX_JSON_BYTES))
            source = config["data"]["source"]
        else:
            source = read_history(path / "metrics.jsonl").start["source"]
    except (FastLSTMError, ValueError, KeyError, TypeError, RecursionError):
        source = None
    if not isinstance(source, str) or not source:
        raise ConfigError(f"the files of {path} do not say what it was trained on")
    return source
