"""Trials of a search: complete short runs, each a run directory; DIR/tune.json keeps them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastlstm.errors import (
    BudgetError,
    FormatError,
    NonFiniteError,
    RunDirectoryError,
    Setting,
    UsageError,
)
from fastlstm.runs.same_start import require_same_start
from fastlstm.system import storage
from fastlstm.tuning.job import Default

TUNE_FILE = "tune.json"
TRIALS = "trials"
LOCK = ".lock"
_FORMAT = 1
_NAMED = ("optimizer", "normalize")
"""Axes whose values are names; those of others are numbers."""


@dataclass(frozen=True)
class Trial:
    """A complete short run.

    Attributes:
        name: of its directory.
        label: what differs from the default.
        options: of the run, by field.
        seconds: its budget.
        seed: of the run.
        bits: validation bits/char that it ended at, of a table its validation loss; None where it
            failed.
        expected: what the whole run is expected to end at; None where it failed.
        why: why it failed.
    """

    name: str
    label: str
    options: dict[str, Any]
    seconds: float
    seed: int
    bits: float | None
    expected: float | None
    why: str | None = None


class TrialStore:
    """The directory of a search.

    Args:
        path: the directory, locked as a run directory.
        about: what the search was asked for, plain JSON values; a search is continued with the
            same only.
        resume: continue the search that is there.

    Raises:
        UsageError: a search is there and is not to be continued, or was asked for something else.
        RunDirectoryError: the directory holds something else.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], resume: bool) -> None:
        self.path = path
        self.content: dict[str, Any] = {"format": _FORMAT, "about": dict(about), "trials": []}
        if (path / TUNE_FILE).exists():
            self._continue(about, resume)
        elif any(entry.name != LOCK for entry in path.iterdir()):
            raise RunDirectoryError(
                f"'{path}' holds something else, expected an empty or new directory; give another ",
                Setting("out"),
            )  # fmt: skip
        try:
            self.trials = [Trial(**trial) for trial in self.content["trials"]]
        except (KeyError, TypeError):
            raise self._foreign() from None
        if not all(map(_is_trial, self.trials)):
            raise self._foreign()

    def _continue(self, about: Mapping[str, Any], resume: bool) -> None:
        if not resume:
            raise UsageError(
                f"'{self.path}' holds a search; continue it with ", Setting("resume", True),
                ", or give another ", Setting("out"),
            )  # fmt: skip
        stored = storage.read_json(self.path / TUNE_FILE)
        if not isinstance(stored, dict) or stored.get("format") != _FORMAT:
            raise self._foreign()
        before = stored.get("about")
        if not isinstance(before, dict):
            raise self._foreign()
        require_same_start(self.path, before, _as_json(dict(about)))
        self.content = stored

    def _foreign(self) -> FormatError:
        return FormatError(
            f"{self.path / TUNE_FILE} was not written by this fastlstm, or is damaged; give"
            " another ", Setting("out"),
        )  # fmt: skip

    def default(self) -> Default | None:
        """Returns the default that was measured when the search was started, if it is there."""
        if "default" not in self.content:
            return None
        try:
            default = Default(**self.content["default"])
        except TypeError:
            raise self._foreign() from None
        if not _is_default(default, self.content["about"].get("axes", ())):
            raise self._foreign()
        return default

    def keep(self, **values: Any) -> None:
        """Stores results by name."""
        self.content |= values
        with storage.storage_errors(self.path, "create trials"):
            (self.path / TRIALS).mkdir(exist_ok=True)
        storage.write_json(self.path / TUNE_FILE, storage.finite(self.content))

    def run(
        self, key: Mapping[str, Any], label: str, train: Callable[[Path], tuple[float, float]]
    ) -> tuple[Trial, bool]:
        """Returns the trial with these options, seconds and seed, and whether it is a new one.

        Args:
            key: `options`, `seconds` and `seed` of the trial.
            label: what differs from the default.
            train: trains a run in a directory and returns `bits` and `expected`.
        """
        for trial in self.trials:
            if all(_as_json(getattr(trial, name)) == _as_json(key[name]) for name in key):
                return trial, False
        name = f"{len(self.trials) + 1:03d}"
        out = self.path / TRIALS / name
        if out.exists():  # of a search that was stopped within this trial
            with storage.storage_errors(out, "remove an unfinished run"):
                shutil.rmtree(out)
        bits = expected = why = None
        try:
            bits, expected = train(out)
        except (NonFiniteError, BudgetError) as error:
            why = error.lines()[0]
        trial = Trial(name=name, label=label, bits=bits, expected=expected, why=why, **key)
        self.trials.append(trial)
        self.keep(trials=[asdict(each) for each in self.trials])
        return trial, True


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_trial(trial: Trial) -> bool:
    """Whether a trial that was read has what a trial has."""
    results, texts = (trial.bits, trial.expected), (trial.name, trial.label, trial.why or "")
    return (
        all(isinstance(text, str) for text in texts)
        and isinstance(trial.options, dict)
        and all(map(_is_number, (trial.seconds, trial.seed)))
        and (results == (None, None) or all(map(_is_number, results)))
    )


def _is_default(default: Default, axes: Collection[str]) -> bool:
    """Whether a default that was read has what a default has."""
    parts = (default.changes, default.rates, default.speeds, default.sizes)
    is_sound = isinstance(default.options, dict) and all(
        isinstance(part, list) and all(isinstance(each, dict) for each in part) for part in parts
    )
    return (
        is_sound
        and _is_number(default.units_per_s)
        and all(
            _is_change(n, v, axes)
            for change in (*default.changes, *default.rates)
            for n, v in change.items()
        )
        and all(
            _is_number(size.get(name))
            for size in default.sizes
            for name in ("latency_s", "num_bytes")
        )
    )


def _is_change(axis: str, value: Any, axes: Collection[str]) -> bool:
    is_value = isinstance(value, str) if axis in _NAMED else _is_number(value)
    return axis in axes and is_value


def _as_json(value: Any) -> Any:
    """Returns a value as it is read back from JSON."""
    if isinstance(value, Mapping):
        return {str(name): _as_json(each) for name, each in value.items()}
    return [_as_json(each) for each in value] if isinstance(value, (tuple, list)) else value
