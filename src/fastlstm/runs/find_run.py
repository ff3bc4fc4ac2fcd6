"""Checks that a path is a run of some kind, without heavy imports."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fastlstm.errors import FormatError, RunDirectoryError, StorageError, nearest_hint
from fastlstm.runs.manifest import MANIFEST
from fastlstm.runs.run_directory import TRAINER_FILE, Kind, RunDirectory, kind_of_run

_OPENED_BY: dict[Kind, tuple[str, str]] = {
    "text": ("a text model", "`fastlstm.LM.load` or `fastlstm generate`"),
    "forecaster": ("a forecaster", "`fastlstm.Forecaster.load` or `fastlstm forecast`"),
    "sequence": (
        "a sequence model",
        "`fastlstm.SequenceRegressor.load` or `fastlstm.SequenceClassifier.load`",
    ),
}
"""The model of each kind of run, and what opens it."""
_IN_PYTHON = (
    "`fit` of `fastlstm.SequenceClassifier` and `fastlstm.SequenceRegressor` trains a new one in"
    " Python; an imported one trains on in Keras (`fastlstm.keras.accelerate`) or by a loop over"
    " the torch module of `fastlstm.import_module` (docs/exchange.md, Fine-tune)"
)
REFUSED: dict[str, dict[Kind, str]] = {
    "generate": {
        "forecaster": "`fastlstm forecast {run} DATA` forecasts with it",
        "sequence": "`fastlstm forecast {run} DATA` answers sequences with it",
    },
    "forecast": {"text": "`fastlstm generate {run}` writes text with it"},
    "serve": {
        "sequence": "`fastlstm export {run} --to onnx --out DIR` writes it for servers of ONNX"
    },
    "compress": {
        "sequence": "`fastlstm export {run} --to onnx --weights int8 --out DIR` rounds its weights"
    },
    "train --start": {"sequence": _IN_PYTHON},
    "profile": {"sequence": _IN_PYTHON},
    "predict": {"sequence": _IN_PYTHON},
    "scale": {"sequence": _IN_PYTHON},
}
"""By verb: the kinds of run that it does not take, and what to use instead. Every other verb that
takes a run takes every kind; docs/runs.md has the table."""
_MODEL_FILES = (".keras", ".h5", ".onnx", ".pt", ".safetensors")
"""Files of other frameworks that `fastlstm import` reads."""


def require_run(path: str | os.PathLike[str], wanted: Kind | None = None, verb: str = "") -> None:
    """Checks that a path is a run or checkpoint of the wanted kind, by default any, without reading
    its model; `verb` opens it, which takes no kind in `REFUSED`.

    Raises RunDirectoryError: not a run; FormatError: a run of another kind.
    """
    place = RunDirectory(path).path
    if not os.path.exists(path):
        hint = nearest_hint(place.name, _runs_in(place.parent))
        train = _training(wanted, run=str(path))
        raise RunDirectoryError(
            f"{str(path) or repr('')}: no such run{hint}; train one with: {train}"
        )
    if not place.is_dir():
        if _is_run(place.absolute().parent):
            raise RunDirectoryError(
                f"{path} is a file of a run, expected the run: {place.absolute().parent}"
            )
        if place.suffix.lower() in _MODEL_FILES:
            raise RunDirectoryError(
                f"{path} is a file, expected the directory of a run; to make one of it:"
                f" `fastlstm import {path} --out RUN`"
            )
        raise RunDirectoryError(
            f"{path} is a file, expected the directory of a run; to train on it:"
            f" {_training(wanted, source=str(path))}"
        )
    kind = kind_of_run(place)
    if kind is None and not _is_run(place):
        if runs := _runs_in(place):
            named = ", ".join(str(place / name) for name in runs[:5])
            raise RunDirectoryError(
                f"{path} is not a run itself; name one of the runs in it: {named}"
            )
        raise RunDirectoryError(
            f"{path}: has no model and no checkpoint; train one with:"
            f" {_training(wanted, run=str(path))}"
        )
    if kind is not None and (instead := REFUSED.get(verb, {}).get(kind)) is not None:
        what = f"{path} is {_OPENED_BY[kind][0]}, which `fastlstm {verb}` does not take"
        raise FormatError(f"{what}; {instead.format(run=path)}")
    if wanted is not None and kind not in (wanted, None):
        what, opener = _OPENED_BY[kind]
        raise FormatError(f"{path} is {what}, expected {_OPENED_BY[wanted][0]}; {opener} opens it")


def read_model(path: str | Path, kind: Kind, names: Sequence[str]) -> dict[str, bytes]:
    """Reads the files `names` of the published model of a run, each checked by its SHA-256.

    Raises CorruptFileError: names the damaged file; FormatError: a model of another kind, or a
    checkpoint; RunDirectoryError: not a run, or it has no published model.
    """
    require_run(path, kind)
    run, what = RunDirectory(path), _OPENED_BY[kind][0]
    if not run.has_published():
        raise RunDirectoryError(
            f"{path} has no model yet: training ended before its first evaluation; continue it"
            " with `resume=True`"
        )
    manifest, files = run.read_published(names)
    if TRAINER_FILE in manifest.files:
        raise FormatError(
            f"{path} is a checkpoint of {what}, which only `resume=True` continues from; give its"
            f" run, {run.path.absolute().parent}"
        )
    for name in names:
        if name not in files:
            raise FormatError(f"{run.path / MANIFEST} lists no {name}, expected {what}")
    return files


def _training(wanted: Kind | None, source: str | None = None, run: str | None = None) -> str:
    """Returns the command or call that trains a run."""
    if wanted == "sequence":
        return (
            f"`fastlstm.SequenceRegressor().fit(X, y, out={'RUN' if run is None else repr(run)})`"
        )
    if wanted == "forecaster":
        return f"`fastlstm train {source or 'DATA'} --horizon N --out {run or 'RUN'}`"
    return f"`fastlstm train {source or 'SOURCE'} --out {run or 'RUN'}`"


def _is_run(directory: Path) -> bool:
    run = RunDirectory(directory)
    return run.has_published() or run.model_path.exists() or bool(run.checkpoints())


def _runs_in(directory: Path) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in entries if _is_run(Path(entry.path)))
    except (OSError, StorageError):
        return []
