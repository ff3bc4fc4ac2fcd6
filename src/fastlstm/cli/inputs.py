"""The inputs of a verb: a run to open, texts or tables to read; wrong ones are refused early."""

from __future__ import annotations

import glob
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from fastlstm.cli.options import READ_OPTIONS, given_options
from fastlstm.cli.output import say
from fastlstm.errors import DataError, UsageError
from fastlstm.runs import find_run
from fastlstm.runs.run_directory import Kind, kind_of_run
from fastlstm.system.devices import check_device
from fastlstm.system.object_store import is_url
from fastlstm.text.data.source_kind import kind_of_source
from fastlstm.text.data.sources import hint_of_file

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from fastlstm.cli.parser import Parsed
    from fastlstm.forecast.forecaster import Forecaster
    from fastlstm.system.fields import Device
    from fastlstm.text.lm import LM


def require_run(path: str, wanted: Kind | None = None) -> None:
    """Checks that a run or a checkpoint is there; see `find_run.require_run`.

    For a file the error shows how to train on it: a table is trained on as a table.
    """
    if os.path.isfile(path):
        wanted = "forecaster" if kind_of_source(path) in ("csv", "binary table") else "text"
    find_run.require_run(path, wanted)


def one_or_many(sources: list[str]) -> str | list[str]:
    """Returns a single source as a text, several as a list."""
    return sources[0] if len(sources) == 1 else sources


def open_model(path: str, weights: str | None = None, device: Device = "auto") -> LM:
    """Loads the model of a run or checkpoint; a note about the choice of files is printed.

    `weights` and `device` are those of `LM.load`.

    Raises:
        FastLSTMError: as `fastlstm.text.files.load_language_model`.
    """
    require_run(path, "text")
    check_device(device)

    from fastlstm.text.files import load_language_model
    from fastlstm.text.lm import LM

    loaded = load_language_model(path)
    if loaded.note:
        say(f"note: {loaded.note}")
    return LM.of(loaded, weights, device)


def open_forecaster(parsed: Parsed, tables: Sequence[str]) -> Forecaster:
    """Loads the forecaster RUN of a verb, which reads tables as its options say.

    A note about the format of its weights is printed.

    Args:
        parsed: with RUN first, and `READ_OPTIONS`.
        tables: checked to be tables.

    Raises:
        FastLSTMError: RUN is no forecaster, or one of `tables` no table.
    """
    path = parsed.positionals[0]
    require_run(path, "forecaster")
    require_tables(tables)

    from fastlstm.forecast.forecaster import Forecaster

    reading = given_options(parsed, READ_OPTIONS)
    model = Forecaster.load(path, device=parsed["device"], **reading)
    compression = model.stored_.compression
    if compression is not None and compression.note:
        say(f"note: {compression.note}")
    return model


def refuse_runs(sources: Sequence[str]) -> None:
    """Refuses a run as a source: its files would be read as texts or tables.

    Raises:
        DataError: a source is a run.
    """
    for source in sources:
        if os.path.isdir(source) and kind_of_run(source) is not None:
            raise DataError(f"{source} is a run, expected a text or a table")


def refuse_swapped(verb: str, path: str, sources: Sequence[str]) -> None:
    """Checks that the run comes before the data.

    Raises:
        UsageError: a file comes where the run is expected, and a run among the data.
    """
    runs = [name for name in sources if os.path.isdir(name) and kind_of_run(name) is not None]
    if runs and os.path.isfile(path):
        raise UsageError(f"{path} is a file; the run comes first: fastlstm {verb} {runs[0]} {path}")


def warn_of_table(source: str) -> None:
    """Warns where a source of a verb for texts is a table."""
    if kind_of_source(source) in ("csv", "binary table", "mixed"):
        warnings.warn(f"{source} is a table; its characters are read as a text", stacklevel=3)


def require_tables(sources: Sequence[str]) -> None:
    """Checks that the sources of a verb for tables exist and are not texts.

    Raises:
        DataError: one is not.
    """
    refuse_runs(sources)
    for source in sources:
        path = os.path.expanduser(source)
        is_there = is_url(source) or os.path.exists(path) or glob.glob(path, recursive=True)
        if not is_there:
            raise DataError(f"there is no file {source or repr('')}{hint_of_file(Path(path))}")
        if kind_of_source(source) == "text":
            raise DataError(f"{source} is a text, expected a table: CSV, Parquet, Arrow or .npy")


def require_horizon(names: Collection[str], sources: Sequence[str]) -> None:
    """Checks that the horizon of a forecaster is among the options that were given.

    Raises:
        UsageError: it is not.
    """
    if "horizon" not in names:
        raise UsageError(
            "--horizon is missing: give --horizon N to train a forecaster of the next N rows"
            f" of {', '.join(sources)}"
        )
