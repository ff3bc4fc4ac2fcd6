"""The directory of a fan-out: fanout.json, the tables of its groups, a run directory of each."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastlstm.errors import FormatError, RunDirectoryError, Setting
from fastlstm.fanout.groups import Group
from fastlstm.fanout.job import Job, Outcome, figures, finished_run
from fastlstm.runs.same_start import require_same_start
from fastlstm.system import storage

FANOUT_FILE = "fanout.json"
TABLES = ".tables"
CONFIG = "config.yaml"
_LOCK = ".lock"
_FORMAT = 1


@dataclass
class Entry:
    """A group and what became of it.

    Attributes:
        name: value of the column.
        directory: of its run.
        rows: of its table.
        state: waiting, running, done, failed, or stopped with its state saved.
        seconds: that its run took, over all starts.
        loss: the best on validation data.
        mae: its mean absolute error on the test part.
        naive_mae: that of seasonal naive forecasts.
        reason: why it failed.
    """

    name: str
    directory: str
    rows: int
    state: str = "waiting"
    seconds: float = 0.0
    loss: float | None = None
    mae: float | None = None
    naive_mae: float | None = None
    reason: str | None = None


class FanoutStore:
    """The groups of a fan-out, kept in DIR/fanout.json.

    Args:
        path: the directory, locked.
        about: what was asked for, plain JSON values; a fan-out is continued with the same only.
        divide: writes the tables of all groups to a directory and returns the groups; called where
            the directory is new.

    Attributes:
        entries: the groups, in order of first appearance.

    Raises:
        UsageError: the directory was started with something else.
        RunDirectoryError: it holds something else.
        FormatError: fanout.json is damaged.
    """

    def __init__(
        self, path: Path, about: Mapping[str, Any], divide: Callable[[Path], Sequence[Group]]
    ) -> None:
        self.path, self._about = path, json.loads(json.dumps(about))
        self.entries: list[Entry] = []
        if (path / FANOUT_FILE).exists():
            self._read()
        else:
            self._begin(divide)
        for entry in self.entries:
            self._look(entry)

    def _begin(self, divide: Callable[[Path], Sequence[Group]]) -> None:
        tables = self.path / TABLES
        if any(entry.name not in (_LOCK, TABLES) for entry in self.path.iterdir()):
            raise RunDirectoryError(
                f"'{self.path}' holds something else, expected an empty or new directory, or one"
                " of a fan-out; give another ", Setting("out"),
            )  # fmt: skip
        with storage.storage_errors(tables, "remove an unfinished one"):
            shutil.rmtree(tables, ignore_errors=True)
        try:
            groups = divide(tables)
            self.entries = [Entry(**asdict(group)) for group in groups]
            self.write()
        except BaseException:
            shutil.rmtree(tables, ignore_errors=True)
            raise

    def _read(self) -> None:
        stored = storage.read_json(self.path / FANOUT_FILE)
        try:
            before, entries = stored["about"], [Entry(**entry) for entry in stored["groups"]]
            is_known = stored["format"] == _FORMAT and isinstance(before, dict)
            is_known &= all(isinstance(entry.directory, str) for entry in entries)
        except (KeyError, TypeError):
            is_known = False
        if not is_known:
            raise FormatError(
                f"{self.path / FANOUT_FILE} was not written by this fastlstm, or is damaged; give"
                " another ", Setting("out"),
            )  # fmt: skip
        require_same_start(self.path, before, self._about)
        self.entries = entries

    def _look(self, entry: Entry) -> None:
        """Takes the state of a group from its run directory."""
        history = finished_run(self.path / entry.directory)
        if history is not None:
            entry.state, entry.reason = "done", None
            entry.seconds = history.elapsed_s or entry.seconds
            for name, value in figures(history).items():
                setattr(entry, name, value)
        elif entry.state == "done":  # its run was removed
            entry.state = "waiting"

    def waiting(self) -> list[Entry]:
        """Returns the groups that are not finished: those that failed are tried again."""
        return [entry for entry in self.entries if entry.state != "done"]

    def job(self, entry: Entry) -> Job:
        """Returns the job of a group."""
        place = self.path.absolute()
        tables = place / TABLES
        return Job(tables / entry.directory, place / entry.directory, tables / CONFIG)

    def ended(self, entry: Entry, outcome: Outcome) -> None:
        """Takes in how the job of a group ended."""
        entry.state, entry.reason = outcome.state, outcome.reason
        entry.seconds = outcome.seconds
        if outcome.state == "done":
            self._look(entry)
            if entry.state != "done":
                entry.state, entry.reason = "failed", "the run ended without a model"

    def counts(self) -> Counter[str]:
        """Returns how many groups there are of each state."""
        return Counter(entry.state for entry in self.entries)

    def facts(self) -> dict[str, Any]:
        """Returns the content of fanout.json."""
        return {
            "format": _FORMAT, "about": self._about, "counts": dict(self.counts()),
            "groups": [asdict(entry) for entry in self.entries],
        }  # fmt: skip

    def write(self) -> None:
        """Writes fanout.json."""
        storage.write_json(self.path / FANOUT_FILE, storage.finite(self.facts()))
