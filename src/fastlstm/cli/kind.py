"""Whether `train`, `evaluate`, `tune` … mean a text or a table, by options and files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fastlstm.cli.config_file import config_keys
from fastlstm.cli.parser import UnknownFlagError, split_arguments
from fastlstm.errors import UsageError, nearest_hint
from fastlstm.runs.run_directory import kind_of_run
from fastlstm.text.config import WHY_NOT_OF_TEXTS
from fastlstm.text.data.source_kind import SourceKind, few, files_of, kind_of_source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastlstm.cli.command import Command
    from fastlstm.cli.parser import Arguments


def command_for(argv: Sequence[str], text: Command, table: Command) -> Command:
    """Returns the command that a command line is meant for.

    It is the one for tables if an option is only for tables (`--horizon`, `--target` …), if the run
    or the configuration is a forecaster's, or if a file can only be a table (Parquet, Arrow …).

    Raises:
        UsageError: the source and the options contradict each other, or both are possible.
    """
    # Options of one name are of one form, a switch or with a value, in both.
    merged = {option.name: option for option in (*table.options, *text.options)}
    arguments = split_arguments(tuple(merged.values()), argv)
    try:
        if text.verb in ("evaluate", "compress"):
            runs = arguments.positionals[:1]
            is_table = bool(runs) and kind_of_run(runs[0]) == "forecaster"
        else:
            is_table = _trains_on_table(arguments, text, table)
    except UsageError:
        for flag in arguments.unknown:
            raise UnknownFlagError(table, flag) from None
        raise
    command = table if is_table else text
    if not arguments.is_help and (arguments.positionals or text.verb == "train"):
        _refuse_others(arguments, command, "a forecaster" if is_table else "a text")
    return command


def _refuse_others(arguments: Arguments, command: Command, what: str) -> None:
    """Refuses an option that only the other command has."""
    known = {option.name: option.flag for option in command.options}
    for option, _ in arguments.options:
        if option.name not in known:
            hint = nearest_hint(option.flag, known.values(), cutoff=1)
            raise UsageError(f"{option.flag} is not an option for {what}; leave it out{hint}")


def _trains_on_table(arguments: Arguments, text: Command, table: Command) -> bool:
    """Returns whether `train` is to train a forecaster; raises UsageError if that is unclear."""
    only_tables = {o.name for o in table.options} - {o.name for o in text.options}
    values = {option.name: value for option, value in arguments.options}
    shown_as = {option.name: option.flag for option, _ in arguments.options}
    if not arguments.is_help and "config" in values:
        path = values["config"]
        shown_as |= {key: f"'{key}' in {path}" for key in sorted(config_keys(Path(path)))}
    of_tables = {name: shown for name, shown in shown_as.items() if name in only_tables}
    if "as_text" in values:
        for shown in of_tables.values():
            raise UsageError(
                f"--as-text trains a text model and {shown} is for a forecaster; give one of them"
            )
        return False
    if arguments.is_help:
        return bool(of_tables)
    run = kind_of_run(values["out"]) if "out" in values else None
    kinds = {source: kind_of_source(source) for source in arguments.positionals}
    if of_tables or run == "forecaster":
        _refuse_texts(kinds, of_tables, [option.flag for option in text.options])
        return True
    if run == "text":
        return False
    _refuse_unclear(kinds, any(option.name == "as_text" for option in text.options))
    return "binary table" in kinds.values()


def _refuse_texts(
    kinds: dict[str, SourceKind], of_tables: dict[str, str], text_flags: Sequence[str]
) -> None:
    why, cure = "the run in --out is a forecaster", "give another --out"
    if of_tables:
        name, shown = next(iter(of_tables.items()))
        reason = f" ({WHY_NOT_OF_TEXTS[name]})" if name in WHY_NOT_OF_TEXTS else ""
        why = f"{shown} is for a table{reason}"
        cure = f"leave out {shown}{nearest_hint(name, text_flags, cutoff=1)}"
    for source, kind in kinds.items():
        if kind == "text":
            raise UsageError(
                f"{source} is a text and {why}: to train a text model on it, {cure}; to train a"
                " forecaster, name a table (CSV, Parquet, Arrow, .npy) instead"
            )


def _refuse_unclear(kinds: dict[str, SourceKind], has_as_text: bool) -> None:
    """Refuses sources that may be a table or a text, and says how to train on either."""
    as_text = ", or --as-text to train a text model on its characters" if has_as_text else ""
    for source, kind in kinds.items():
        if kind == "csv":
            raise UsageError(
                f"{source} is a table: give --horizon N to train a forecaster of its next N"
                f" rows{as_text}"
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
