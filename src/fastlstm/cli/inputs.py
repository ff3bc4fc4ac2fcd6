"""The inputs of a verb: a run to open, texts or tables to read; wrong ones are refused early."""

from __future__ import annotations

import glob
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlstm.cli.command import Parsed
from fastlstm.cli.options import READ_OPTIONS
from fastlstm.cli.output import say
from fastlstm.errors import DataError, UsageError
from fastlstm.runs import find_run
from fastlstm.runs.run_directory import Kind, kind_of_run
from fastlstm.system.fields import Device
from fastlstm.system.hardware import check_device
from fastlstm.system.object_store import is_url
from fastlstm.text.data.source_kind import kind_of_source
from fastlstm.text.data.sources import hint_of_file

if TYPE_CHECKING:
    from fastlstm.forecast.forecaster import Forecaster
    from fastlstm.text.lm import LM

_SEQUENCES = (
    "write one with numpy.savez(FILE, X=X, y=y), X of shape (N, T, C), with lengths=lengths of"
    " padded sequences"
)


def require_run(path: str, wanted: Kind | None = None, verb: str = "") -> None:
    """Works as `find_run.require_run`; the error for a file shows how to train on it."""
    if os.path.isfile(path):
        wanted = "forecaster" if kind_of_source(path) in ("csv", "binary table") else "text"
    find_run.require_run(path, wanted, verb)


def one_or_many(sources: list[str]) -> str | list[str]:
    """Returns a single source as a text, several as a list."""
    return sources[0] if len(sources) == 1 else sources


def open_model(path: str, weights: str | None = None, device: Device = "auto") -> LM:
    """Loads the model of a run or checkpoint as `LM.load`; prints a note about its files."""
    require_run(path, "text", "generate")  # evaluate gives it texts only
    check_device(device)

    from fastlstm.text.lm import LM

    lm = LM.load(path, weights=weights, device=device)
    if lm.note:
        say(f"note: {lm.note}")
    return lm


def open_forecaster(parsed: Parsed, tables: Sequence[str]) -> Forecaster:
    """Loads the forecaster RUN of a verb with `READ_OPTIONS`; prints a note about its weights.
    Raises FastLSTMError: RUN is no forecaster, or one of `tables` no table."""
    path = parsed.positionals[0]
    require_run(path, "forecaster", "forecast")
    require_tables(tables)

    from fastlstm.forecast.forecaster import Forecaster

    model = Forecaster.load(path, device=parsed["device"], **parsed.given(READ_OPTIONS))
    compression = model.stored_.compression
    if compression is not None and compression.note:
        say(f"note: {compression.note}")
    return model


def read_sequences(path: str, needs_answers: bool) -> tuple[Any, Any]:
    """Returns the sequences of a file, an array `(N, T, C)` or a list of `(T_i, C)`, and its
    answers, None without.

    Raises DataError: no such file, no .npy or .npz, larger than the memory, or an array is missing
    or of another length.
    """
    import numpy as np

    place = os.path.expanduser(path)
    if not os.path.isfile(place):
        raise DataError(f"there is no file {path or repr('')}{hint_of_file(Path(place))}")
    try:
        with open(place, "rb") as file:
            loaded = np.load(file, allow_pickle=False)
            found = {"X": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    except MemoryError as error:
        advice = "divide its sequences among several files"
        text = f"{path} does not fit into memory; {advice}: {error}".removesuffix(": ")
        raise DataError(text) from None
    except Exception as error:  # NumPy, zipfile and codecs raise a dozen kinds for damaged files
        if isinstance(error, OSError) and error.strerror:
            raise DataError(f"cannot read {path}: {error.strerror}") from None
        raise DataError(f"{path} is no .npy or .npz file of numbers: {_SEQUENCES}") from None
    if missing := {"X", *(["y"] if needs_answers else [])} - found.keys():
        raise DataError(f"{path} has no array {min(missing)}, but {', '.join(found)}: {_SEQUENCES}")
    if unused := sorted(found.keys() - {"X", "y", "lengths"}):
        say(f"note: {path} also has {', '.join(unused)}, not used")
    X, y, lengths = found["X"], found.get("y"), found.get("lengths")
    if not all(isinstance(array, np.ndarray) for array in (X, y, lengths) if array is not None):
        raise DataError(f"{path} is no .npy or .npz file of numbers: {_SEQUENCES}")
    if X.ndim < 2 or not len(X):
        raise DataError(f"X of {path} has shape {X.shape}: {_SEQUENCES}")
    if lengths is None:
        return X, y
    if lengths.shape != X.shape[:1] or not np.isin(lengths, np.arange(1, X.shape[1] + 1)).all():
        raise DataError(f"{path}: `lengths` is not 1 to {X.shape[1]} for each sequence")
    return [steps[: int(length)] for steps, length in zip(X, lengths, strict=True)], y


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
    if kind_of_source(source) in ("csv", "mixed"):
        warnings.warn(f"{source} is a table; its characters are read as a text", stacklevel=3)


def is_there(source: str) -> bool:
    """Returns whether a file, a directory or files of a glob exist; True for a URL."""
    path = os.path.expanduser(source)
    return is_url(source) or os.path.exists(path) or bool(glob.glob(path, recursive=True))


def require_tables(sources: Sequence[str]) -> None:
    """Raises DataError for a missing source, a run or a text: the verb reads tables."""
    refuse_runs(sources)
    for source in sources:
        if not is_there(source):
            hint = hint_of_file(Path(os.path.expanduser(source)))
            raise DataError(f"there is no file {source or repr('')}{hint}")
        if kind_of_source(source) == "text":
            raise DataError(
                f"{source} is a text, expected a table: CSV, Parquet, Arrow or .npy; if it is a"
                " CSV, give it a name ending in .csv"
            )
