"""The training run of a command line, of a text or of a table.

`train`, `tune`, `predict`, `profile` and `scale` read it the same way; `evaluate`, `forecast` and
`compress` read the kind from their run (`parse_for_run`).
"""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastlstm.cli.command import (
    Arguments,
    Command,
    Parsed,
    UnknownFlagError,
    parse,
    split_arguments,
    typed,
)
from fastlstm.cli.config_file import config_keys, resolve_config
from fastlstm.cli.inputs import is_there, one_or_many, refuse_runs, require_run, require_tables
from fastlstm.cli.options import FORECAST_OPTIONS, TEXT_OPTIONS
from fastlstm.distributed.launch import is_started_by_torchrun
from fastlstm.errors import ConfigError, UsageError, hint_of_other_table, nearest_hint
from fastlstm.forecast.config import ForecastConfig
from fastlstm.report.events import stored_json
from fastlstm.report.history import read_history
from fastlstm.runs.run_directory import Kind, kind_of_run
from fastlstm.system.object_store import is_url
from fastlstm.text.config import PARTS, WHY_NOT_OF_TEXTS, TrainConfig
from fastlstm.text.data.source_kind import (
    SourceKind,
    column_of_texts,
    few,
    files_of,
    kind_of_source,
)
from fastlstm.text.data.sources import BUILT_IN, open_source


@dataclass(frozen=True)
class TrainingRun:
    """What a command line is to train.

    Attributes:
        argv, parsed: words behind the verb, and the same read.
        config: the configuration: defaults, then the file of --config, then flags.
        names: fields of it that were set.
        is_table: a forecaster is trained on a table, not a language model on a text.
        own: the result of `read_own`.
    """

    argv: list[str]
    parsed: Parsed
    config: Any
    names: set[str]
    is_table: bool
    own: Any = None

    @property
    def source(self) -> str | list[str]:
        return one_or_many(self.parsed.positionals)

    def train_command(
        self, options: Mapping[str, Any], verb: str = "train", taken: Collection[str] = ()
    ) -> str:
        """Returns the command that trains, or tunes, with other options.

        Its output directory is new: it does not exist, and no command in `taken` writes it.
        """
        arguments = split_arguments(self.parsed.command.options, self.argv)
        fields = FORECAST_OPTIONS if self.is_table else TEXT_OPTIONS
        known = {"config", *(option.name for option in fields)} - set(options)
        if "budget" in options:  # one end of a run excludes the others
            known -= {"steps", "epochs"}
        # A name that begins with a dash would be a flag; "-" is standard input.
        words = [f"./{w}" if w.startswith("-") and w != "-" else w for w in arguments.positionals]
        for option, value in arguments.options:
            if option.name not in known:
                continue
            if option.is_bool:
                words.append(option.flag if typed(value, bool) else f"--no-{option.flag[2:]}")
            else:
                words += [option.flag, value]
        for name, value in options.items():
            shown = f"{value:g}" if type(value) is float else f"{value}"
            words += [f"--{name.replace('_', '-')}", shown]
        own = self.parsed.command.verb
        given = self.parsed.values.get("out") if own != "tune" else None
        source = Path(self.parsed.positionals[0]).name.split(".")[0] or "run"
        first = given or f"{'tuning' if verb == 'tune' else 'runs'}/{source}"
        places = itertools.chain([first], (f"{first}-{number}" for number in itertools.count(2)))
        others = {shlex.split(text)[-1] for text in taken}
        out = next(place for place in places if not (os.path.exists(place) or place in others))
        return shlex.join(["fastlstm", verb, *words, "--out", out])


def read_training(
    argv: list[str], text: Command, table: Command, read_own: Callable[[Parsed], Any]
) -> TrainingRun:
    """Reads the command line of a verb that trains, and checks that its sources exist.

    `read_own` reads and checks the options that only this verb has. Raises FastLSTMError: bad
    usage; nothing was loaded.
    """
    command = command_for(argv, text, table)
    parsed = parse(command, argv)
    own, sources = read_own(parsed), parsed.positionals
    if command is table:
        config, names = resolve_config(parsed, FORECAST_OPTIONS, ForecastConfig)
        require_tables(sources)
        is_train = command.verb == "train"
        is_started = is_train and (parsed["start"] or kind_of_run(parsed["out"]) == "forecaster")
        if "horizon" not in names and not is_started:
            raise UsageError(
                "--horizon is missing: give --horizon N to train a forecaster of the next N rows"
                f" of {', '.join(sources)}"
            )
        return TrainingRun(argv, parsed, config, names, True, own)
    text_config, names = resolve_config(parsed, TEXT_OPTIONS, TrainConfig)
    refuse_runs([*sources, *filter(None, (getattr(text_config, part) for part in PARTS))])
    if not is_started_by_torchrun():  # with it, rank 0 says what another machine lacks
        open_source(sources)  # a misspelt name is an error before torch is loaded
    return TrainingRun(argv, parsed, text_config, names, False, own)


def command_for(argv: Sequence[str], text: Command, table: Command) -> Command:
    """Returns which command the arguments of `train` are meant for: texts or tables.

    It is the one for tables if an option is only for tables (`--horizon`, `--target` …), if a run
    or the configuration is a forecaster's, or if a file can only be a table (Parquet, Arrow …).
    Raises UsageError: the source and the options contradict each other, or both are possible.
    """
    arguments = _split_for_all(argv, text, table)
    try:
        is_table = _trains_on_table(arguments, text, table)
    except UsageError:
        for flag in arguments.unknown:
            raise UnknownFlagError(table, flag) from None
        raise
    return _checked(table if is_table else text, arguments, "forecaster" if is_table else "text")


def parse_for_run(argv: Sequence[str], commands: Mapping[Kind, Command]) -> tuple[Kind, Parsed]:
    """Returns the kind of RUN, the first argument, and the command line as its command reads it.

    Without a run it is the first command. Raises as `parse`, and UsageError: an option is for
    another kind.
    """
    arguments = _split_for_all(argv, *commands.values())
    runs = [kind_of_run(word) for word in arguments.positionals[:1]]
    kind = next((kind for kind in commands if kind in runs), next(iter(commands)))
    return kind, parse(_checked(commands[kind], arguments, kind), argv)


def _checked(command: Command, arguments: Arguments, kind: Kind) -> Command:
    """Returns the command; raises UsageError for an option that only other kinds have."""
    if not arguments.help and (arguments.positionals or command.verb == "train"):
        known = {option.name: option.flag for option in command.options}
        for option, _ in arguments.options:
            if option.name not in known:
                what = {"sequence": "sequence model"}.get(kind, kind)
                hint = nearest_hint(option.flag, known.values(), cutoff=1)
                raise UsageError(f"{option.flag} is not an option for a {what}; leave it out{hint}")
    return command


def _split_for_all(argv: Sequence[str], *commands: Command) -> Arguments:
    # An option of several commands has the same form in all: it is a switch, or it has a value.
    merged = {option.name: option for command in commands[::-1] for option in command.options}
    return split_arguments(tuple(merged.values()), argv)


def _trains_on_table(arguments: Arguments, text: Command, table: Command) -> bool:
    """Returns whether a forecaster is to be trained; raises UsageError if that is unclear."""
    only_tables = {o.name for o in table.options} - {o.name for o in text.options}
    values = {option.name: value for option, value in arguments.options}
    shown_as = {option.name: option.flag for option, _ in arguments.options}
    if not arguments.help and "config" in values:
        path = values["config"]
        shown_as |= {key: f"'{key}' in {path}" for key in sorted(config_keys(Path(path)))}
    of_tables = {name: shown for name, shown in shown_as.items() if name in only_tables}
    if "as_text" in values:
        for shown in of_tables.values():
            raise UsageError(
                f"--as-text trains a text model and {shown} is for a forecaster; give one of them"
            )
        return False
    if arguments.help:
        files = filter(os.path.isfile, arguments.positionals)
        return bool(of_tables) or any(kind_of_source(f) in ("csv", "binary table") for f in files)
    field = None if of_tables else str(values.get("text_field", "text"))
    kinds = {source: kind_of_source(source, field) for source in arguments.positionals}
    runs = {name: kind_of_run(values[name]) for name in ("out", "start") if name in values}
    own = next((name for name, kind in runs.items() if kind == "forecaster"), None)
    if of_tables or own is not None:
        _refuse_texts(kinds, of_tables, [option.flag for option in text.options], own)
        return True
    if runs.get("out") == "text":
        return False
    if "start" in values:
        require_run(values["start"], verb="train --start")
    _refuse_unclear(kinds, {option.name for option in text.options})
    return "binary table" in kinds.values()


def _refuse_texts(
    kinds: dict[str, SourceKind],
    of_tables: dict[str, str],
    text_flags: Sequence[str],
    own: str | None,
) -> None:
    why, cure = f"the run in --{own} is a forecaster", f"give another --{own}"
    if of_tables:
        name, shown = next(iter(of_tables.items()))
        reason = f" ({WHY_NOT_OF_TEXTS[name]})" if name in WHY_NOT_OF_TEXTS else ""
        why = f"{shown} is for a table{reason}"
        cure = f"leave out {shown}{nearest_hint(name, text_flags, cutoff=1)}"
    for source, kind in kinds.items():
        if kind == "text" and (hint := hint_of_other_table(source)):
            raise UsageError(f"{source} is not a table that fastlstm reads{hint}")
        if kind == "text":
            raise UsageError(
                f"{source} is a text and {why}: to train a text model on it, {cure}; to train a"
                " forecaster, name a table (CSV, Parquet, Arrow, .npy) instead"
            )


def _refuse_unclear(kinds: dict[str, SourceKind], names: Container[str]) -> None:
    """Refuses sources that may be a table or a text, and says how to train on either; `names` are
    the options of a text model."""
    as_text = ", or --as-text to train a text model on its characters" if "as_text" in names else ""
    for source, kind in kinds.items():
        may_have_texts = kind == "binary table" and "text_field" in names
        column = column_of_texts(source) if may_have_texts else None
        if kind == "csv" or column is not None:
            of_texts = f", or --text-field {column} to train a text model on it"
            raise UsageError(
                f"{source} is a table: give --horizon N to train a forecaster of its next N"
                f" rows{of_texts if column is not None else as_text}"
            )
        if kind == "mixed":
            tables, texts = files_of(source)
            files = as_text.replace("characters", "files")
            raise UsageError(
                f"{source} mixes tables ({few(tables)}) and texts ({few(texts)}): give --horizon"
                f" N to train a forecaster on its tables{files}; or name the files of one kind"
            )
    if len({kind == "binary table" for kind in kinds.values() if kind != "unknown"}) > 1:
        table = next(s for s, kind in kinds.items() if kind == "binary table")
        text = next(s for s, kind in kinds.items() if kind == "text")
        raise UsageError(f"{table} is a table and {text} is a text; train on one kind at a time")


def with_source_of_run(
    argv: list[str], text: Command, table: Command
) -> tuple[list[str], Path | None]:
    """Replaces a run on a command line by its source and options; returns the new command line and
    the path of the run, or the same command line and None."""
    arguments = _split_for_all(argv, text, table)
    runs = [word for word in arguments.positionals if os.path.isdir(word) and kind_of_run(word)]
    if not runs or (len(arguments.positionals) > 1 and arguments.unknown):
        return argv, None  # an unknown flag, whose value looks like a source, is said first
    if len(arguments.positionals) > 1:
        raise UsageError(
            "give one run, or sources to train on, not both; `fastlstm forecast` and `fastlstm"
            " evaluate` take a run and its data"
        )
    path = Path(runs[0])
    require_run(runs[0], verb=text.verb)
    words = [*arguments.unknown, *filter(None, [arguments.help])]
    words += [f"{option.flag}={value}" for option, value in arguments.options]
    return [*_sources_of(path, text.verb), "--config", str(path / "config.json"), *words], path


def _sources_of(path: Path, verb: str) -> list[str]:
    """Returns what a run was trained on. Raises ConfigError: the run does not name its source, or
    the source does not exist."""
    kind = kind_of_run(path)
    try:
        if kind == "text":
            name = stored_json(path / "config.json")["data"]["source"]
        else:
            name = read_history(path / "metrics.jsonl").start["source"]
    except (KeyError, TypeError):
        name = None
    if not isinstance(name, str) or not name:
        raise ConfigError(f"the files of {path} do not say what it was trained on")
    several = [] if kind == "text" else [name.split(", ")]
    for sources in [*several, [name]] if is_url(name) else [[name], *several]:
        if all(source in BUILT_IN or is_there(source) for source in sources):
            return sources
    instead = shlex.join(["fastlstm", verb, "--config", str(path / "config.json")])
    raise ConfigError(
        f"{path} was trained on {name}, which does not exist; name its source: {instead} SOURCE"
    )
