"""Which module a verb is in: some verbs are about a text or about a table."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import TYPE_CHECKING

from fastlstm.cli.config_file import config_keys
from fastlstm.cli.parser import HelpRequested, split_arguments
from fastlstm.errors import DataError, UsageError, nearest_hint
from fastlstm.runs.run_directory import kind_of_run
from fastlstm.text.config import WHY_NOT_OF_TEXTS
from fastlstm.text.data.source_kind import SourceKind, few, files_of, kind_of_source
from fastlstm.text.data.sources import hint_of_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastlstm.cli.command import Option

TABLE_MODULES = {"train": "train_series", "evaluate": "evaluate_series"}
"""Verb -> module for tables; the module named as the verb is for texts."""


def module_of(verb: str, argv: Sequence[str]) -> str:
    """Returns the module of `fastlstm.cli` that runs a verb with these arguments.

    A table is meant where an option says so that texts have not (`--horizon`, `--target` …), the
    run or the configuration is a forecaster's, or a file can be nothing else (Parquet, Arrow …).

    Raises:
        UsageError: an unknown flag; or the source and the options do not say the same.
    """
    if verb not in TABLE_MODULES:
        return verb
    text, table = _options(verb)
    # Options of one name are of one form, a switch or with a value, in both.
    merged = tuple({option.name: option for option in (*table, *text)}.values())
    is_help = False
    try:
        positionals, given = split_arguments(verb, merged, argv)
    except HelpRequested as asked:
        positionals, given, is_help = [], asked.given, True
    if verb == "evaluate":
        is_table = bool(positionals) and kind_of_run(positionals[0]) == "forecaster"
    else:
        only_tables = {o.name for o in table} - {o.name for o in text}
        is_table = _trains_on_table(positionals, given, only_tables, [o.flag for o in text])
    if not is_help and (positionals or verb == "train"):
        _refuse_others(given, table if is_table else text, "a forecaster" if is_table else "a text")
    return TABLE_MODULES[verb] if is_table else verb


def _refuse_others(given: Sequence[tuple[Option, str]], known: Sequence[Option], what: str) -> None:
    """Refuses an option that only the other module of a verb has."""
    names, flags = {option.name for option in known}, [option.flag for option in known]
    for option, _ in given:
        if option.name not in names:
            raise UsageError(
                f"{option.flag} is no option for {what}; leave it out"
                f"{nearest_hint(option.flag, flags, cutoff=1)}"
            )


def _options(verb: str) -> tuple[tuple[Option, ...], tuple[Option, ...]]:
    """Returns the options of a verb for texts and for tables."""
    from fastlstm.cli import evaluate, evaluate_series, train, train_series

    pair = (train, train_series) if verb == "train" else (evaluate, evaluate_series)
    return pair[0].COMMAND.options, pair[1].COMMAND.options


def _trains_on_table(
    sources: Sequence[str],
    given: Sequence[tuple[Option, str]],
    only_tables: set[str],
    of_texts: Sequence[str],
) -> bool:
    """Returns whether `train` is to make a forecaster.

    Raises:
        UsageError: it is not clear, or what is given contradicts itself.
    """
    values = {option.name: value for option, value in given}
    told = {option.name: option.flag for option, _ in given}
    if "config" in values:
        path = values["config"]
        told |= {key: f"'{key}' in {path}" for key in sorted(config_keys(Path(path)))}
    told = {name: shown for name, shown in told.items() if name in only_tables}
    if "as_text" in values:
        for shown in told.values():
            raise UsageError(
                f"--as-text trains a text model and {shown} is for a forecaster; give one of"
                " the two"
            )
        return False
    begun = kind_of_run(values["out"]) if "out" in values else None
    kinds = {source: kind_of_source(source) for source in sources}
    if told or begun == "forecaster":
        _refuse_texts(kinds, told, of_texts)
        return True
    if begun == "text":
        return False
    _refuse_unclear(kinds)
    return "binary table" in kinds.values()


def _refuse_texts(
    kinds: dict[str, SourceKind], told: dict[str, str], of_texts: Sequence[str]
) -> None:
    why, cure = "the run in --out is a forecaster's", "give another --out"
    for name, shown in told.items():
        why, cure = f"{shown} is for a table", f"leave out {shown}"
        why += f" ({WHY_NOT_OF_TEXTS[name]})" if name in WHY_NOT_OF_TEXTS else ""
        cure += nearest_hint(name, of_texts, cutoff=1)
        break
    for source, kind in kinds.items():
        if kind == "text":
            raise UsageError(
                f"{source} is a text and {why}: to train a text model on it, {cure}; to train a"
                " forecaster, name a table (CSV, Parquet, Arrow, .npy) instead"
            )


def _refuse_unclear(kinds: dict[str, SourceKind]) -> None:
    """Refuses what could be meant as a table or as a text, with the way to either."""
    for source, kind in kinds.items():
        if kind == "csv":
            raise UsageError(
                f"{source} holds a table: give --horizon N to train a forecaster of its next N"
                " rows, or --as-text to train a text model on its characters"
            )
        if kind == "mixed":
            tables, texts = files_of(source)
            raise UsageError(
                f"{source} mixes tables ({few(tables)}) and texts ({few(texts)}): give --horizon"
                " N to train a forecaster on its tables, or --as-text to train a text model on its"
                " files; or name the files of one kind"
            )
    if len({kind == "binary table" for kind in kinds.values() if kind != "unknown"}) > 1:
        table = next(s for s, kind in kinds.items() if kind == "binary table")
        text = next(s for s, kind in kinds.items() if kind == "text")
        raise UsageError(f"{table} is a table and {text} is a text; train on one kind at a time")


def refuse_runs(sources: Sequence[str]) -> None:
    """Sees that no source is a run: its files would be read as texts or tables.

    Raises:
        DataError: one is.
    """
    for source in sources:
        if os.path.isdir(source) and kind_of_run(source) is not None:
            raise DataError(f"{source} is a run, expected a text or a table to read")


def refuse_swapped(verb: str, path: str, sources: Sequence[str]) -> None:
    """Sees that the run comes before the data.

    Raises:
        UsageError: a file comes where the run is expected, and a run among the data.
    """
    runs = [name for name in sources if os.path.isdir(name) and kind_of_run(name) is not None]
    if runs and os.path.isfile(path):
        raise UsageError(f"{path} is a file; the run comes first: fastlstm {verb} {runs[0]} {path}")


def require_tables(sources: Sequence[str]) -> None:
    """Sees that the sources of a verb for tables are there and are no texts.

    Raises:
        DataError: one is not.
    """
    refuse_runs(sources)
    for source in sources:
        path = os.path.expanduser(source)
        if not os.path.exists(path) and not glob.glob(path, recursive=True):
            raise DataError(f"there is no file {source or repr('')}{hint_of_file(Path(path))}")
        if kind_of_source(source) == "text":
            raise DataError(f"{source} holds text, expected a table: CSV, Parquet, Arrow or .npy")
