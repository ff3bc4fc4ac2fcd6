"""The inputs of a verb: a run to open, texts or tables to read; wrong ones are refused early."""

from __future__ import annotations

import glob
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from fastlstm.cli.options import READ_OPTIONS
from fastlstm.cli.output import say
from fastlstm.errors import DataError, UsageError
from fastlstm.runs import find_run
from fastlstm.runs.run_directory import Kind, kind_of_run
from fastlstm.system.devices import check_device
from fastlstm.system.object_store import is_url
from fastlstm.text.data.source_kind import kind_of_source
from fastlstm.text.data.sources import hint_of_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastlstm.cli.command import Parsed
    from fastlstm.forecast.forecaster import Forecaster
    from fastlstm.system.fields import Device
    from fastlstm.text.lm import LM


def require_run(path: str, wanted: Kind | None = None) -> None:
    """Works as `find_run.require_run`; the error for a file shows how to train on it."""
    if os.path.isfile(path):
        wanted = "forecaster" if kind_of_source(path) in ("csv", "binary table") else "text"
    find_run.require_run(path, wanted)


def one_or_many(sources: list[str]) -> str | list[str]:
    """Returns a single source as a text, several as a list."""
    return sources[0] if len(sources) == 1 else sources


def open_model(path: str, weights: str | None = None, device: Device = "auto") -> LM:
    """Loads the model of a run or checkpoint as `LM.load`; prints a note about its files."""
    require_run(path, "text")
    check_device(device)

    from fastlstm.text.lm import LM

    lm = LM.load(path, weights=weights, device=device)
    if lm.note:
        say(f"note: {lm.note}")
    return lm


def open_forecaster(parsed: Parsed, tables: Sequence[str]) -> Forecaster:
    """Loads the forecaster RUN of a verb with `READ_OPTIONS`; prints a note about its weights.

    Raises:
        FastLSTMError: RUN is no forecaster, or one of `tables` no table.
    """
    path = parsed.positionals[0]
    require_run(path, "forecaster")
    require_tables(tables)

    from fastlstm.forecast.forecaster import Forecaster

    model = Forecaster.load(path, device=parsed["device"], **parsed.given(READ_OPTIONS))
    compression = model.stored_.compression
    if compression is not None and compression.note:
        say(f"note: {compression.note}")
    return model


def refuse_runs(sources: Sequence[str]) -> None:
    """Raises DataError for a run as a source: its files would be read as texts or tables."""
    for source in sources:
        if _is_run(source):
            raise DataError(f"{source} is a run, expected a text or a table")


def _is_run(path: str) -> bool:
    return os.path.isdir(path) and kind_of_run(path) is not None


def refuse_swapped(verb: str, path: str, sources: Sequence[str]) -> None:
    """Raises UsageError if a run and its data are swapped."""
    runs = [name for name in sources if _is_run(name)]
    if runs and os.path.isfile(path):
        raise UsageError(f"{path} is a file; the run comes first: fastlstm {verb} {runs[0]} {path}")


def warn_of_table(source: str) -> None:
    """Warns about a table as the source of a verb that reads texts."""
    if kind_of_source(source) in ("csv", "binary table", "mixed"):
        warnings.warn(f"{source} is a table; its characters are read as a text", stacklevel=3)


def require_tables(sources: Sequence[str]) -> None:
    """Raises DataError for a missing source, a run or a text: the verb reads tables."""
    refuse_runs(sources)
    for source in sources:
        path = os.path.expanduser(source)
        is_there = is_url(source) or os.path.exists(path) or glob.glob(path, recursive=True)
        if not is_there:
            raise DataError(f"there is no file {source or repr('')}{hint_of_file(Path(path))}")
        if kind_of_source(source) == "text":
            raise DataError(
                f"{source} is a text, expected a table: CSV, Parquet, Arrow or .npy; if it is a"
                " CSV, give it a name ending in .csv"
            )
