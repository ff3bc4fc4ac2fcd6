"""What somebody named as a run, before anything heavy is loaded: is it one, and of which kind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from fastlstm.errors import FormatError, RunDirectoryError, nearest_hint
from fastlstm.run_directory import RunDirectory, kind_of_run

_TRAIN = {
    "text": "fastlstm train SOURCE --out RUN",
    "forecaster": "fastlstm train DATA --horizon N --out RUN",
}


def require_run(
    path: str | os.PathLike[str], wanted: Literal["text", "forecaster"] | None = None
) -> None:
    """Sees that a run or a checkpoint is there; whether its files are whole is not looked at.

    Args:
        path: what was named.
        wanted: the kind of model it must hold; None takes any.

    Raises:
        RunDirectoryError: nothing is there, or something else.
        FormatError: it holds a model of the other kind.
    """
    place = Path(path)
    train = _TRAIN[wanted or "text"]
    if not place.exists():
        hint = nearest_hint(place.name, _runs_in(place.parent))
        raise RunDirectoryError(
            f"{path}: no such run{hint}; train one with: {train.replace('RUN', str(path))}"
        )
    if not place.is_dir():
        if _is_run(place.absolute().parent):
            raise RunDirectoryError(
                f"{path} is a file of a run, expected the run: {place.absolute().parent}"
            )
        source = "SOURCE" if "SOURCE" in train else "DATA"
        raise RunDirectoryError(
            f"{path} is a file, expected the directory of a run; to train on it:"
            f" {train.replace(source, str(path))}"
        )
    kind = kind_of_run(place)
    if kind is None and not _is_run(place):
        if runs := _runs_in(place):
            named = ", ".join(str(place / name) for name in runs[:5])
            raise RunDirectoryError(f"{path} holds no run itself; name one of those in it: {named}")
        raise RunDirectoryError(
            f"{path}: holds no model and no checkpoint; train one with:"
            f" {train.replace('RUN', str(path))}"
        )
    if wanted == "text" and kind == "forecaster":
        raise FormatError(
            f"{path} holds a forecaster: fastlstm forecast {path} DATA forecasts with it"
        )
    if wanted == "forecaster" and kind == "text":
        raise FormatError(
            f"{path} holds a text model, expected a forecaster: fastlstm generate {path} writes"
            " text with it"
        )


def _is_run(directory: Path) -> bool:
    run = RunDirectory(directory)
    return run.has_published() or run.model_path.exists() or bool(run.checkpoints())


def _runs_in(directory: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(directory) if _is_run(Path(entry.path)))
    except OSError:
        return []
