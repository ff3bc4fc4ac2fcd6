"""Checks that a path is a run, and of which kind, before anything heavy is imported."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from fastlstm.errors import FormatError, Message, RunDirectoryError, nearest_hint
from fastlstm.runs.run_directory import RunDirectory, kind_of_run

Kind = Literal["text", "forecaster"]


def require_run(path: str | os.PathLike[str], wanted: Kind | None = None) -> None:
    """Checks that a path is a run or a checkpoint; does not check its files.

    Args:
        path: given by the user.
        wanted: required kind of model; None for any.

    Raises:
        RunDirectoryError: not a run.
        FormatError: a model of the other kind.
    """
    place = RunDirectory(path).path
    if not os.path.exists(path):
        hint = nearest_hint(place.name, _runs_in(place.parent))
        train = _training(wanted, run=str(path))
        raise RunDirectoryError(
            f"{str(path) or repr('')}: no such run{hint}; train one with: ", train
        )
    if not place.is_dir():
        if _is_run(place.absolute().parent):
            raise RunDirectoryError(
                f"{path} is a file of a run, expected the run: {place.absolute().parent}"
            )
        raise RunDirectoryError(
            f"{path} is a file, expected the directory of a run; to train on it: ",
            _training(wanted, source=str(path)),
        )
    kind = kind_of_run(place)
    if kind is None and not _is_run(place):
        if runs := _runs_in(place):
            named = ", ".join(str(place / name) for name in runs[:5])
            raise RunDirectoryError(
                f"{path} is not a run itself; name one of the runs in it: {named}"
            )
        raise RunDirectoryError(
            f"{path}: has no model and no checkpoint; train one with: ",
            _training(wanted, run=str(path)),
        )
    if wanted == "text" and kind == "forecaster":
        use = Message(
            f"fastlstm.Forecaster.load({str(path)!r}) opens it",
            flags=f"fastlstm forecast {path} DATA forecasts with it",
        )
        raise FormatError(f"{path} is a forecaster, expected a text model: ", use)
    if wanted == "forecaster" and kind == "text":
        use = Message(
            f"fastlstm.LM.load({str(path)!r}) opens it",
            flags=f"fastlstm generate {path} writes text with it",
        )
        raise FormatError(f"{path} is a text model, expected a forecaster: ", use)


def _training(wanted: Kind | None, source: str | None = None, run: str | None = None) -> Message:
    """Returns how to train a run, in Python and on the command line."""
    out = "RUN" if run is None else repr(run)
    if wanted == "forecaster":
        table = "DATA" if source is None else repr(source)
        return Message(
            f"fastlstm.Forecaster(horizon=N).fit({table}).save({out})",
            flags=f"fastlstm train {source or 'DATA'} --horizon N --out {run or 'RUN'}",
        )
    return Message(
        f"fastlstm.train({'SOURCE' if source is None else repr(source)}, out={out})",
        flags=f"fastlstm train {source or 'SOURCE'} --out {run or 'RUN'}",
    )


def _is_run(directory: Path) -> bool:
    run = RunDirectory(directory)
    return run.has_published() or run.model_path.exists() or bool(run.checkpoints())


def _runs_in(directory: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(directory) if _is_run(Path(entry.path)))
    except OSError:
        return []
