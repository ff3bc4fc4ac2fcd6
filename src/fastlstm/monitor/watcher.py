"""Runs that are followed, found in directories while they appear."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fastlstm.monitor.alerts import Alert, RunAlerts
from fastlstm.monitor.event_tail import EventTail
from fastlstm.monitor.run_process import RunProcess

_FORGOTTEN_S = 24 * 3600.0
_FIND_EVERY_S = 2.0


class FollowedRun:
    """The alerts of a run, kept up to date.

    Args:
        path: the run directory.
        values: thresholds by the names of rules; None is every rule.
        tail: where to read from; by default the beginning of metrics.jsonl.
    """

    def __init__(
        self, path: Path, values: Mapping[str, float | None] | None, tail: EventTail | None = None
    ) -> None:
        self._tail = EventTail(path / "metrics.jsonl") if tail is None else tail
        self._path, self._process = path, RunProcess(path)
        self._values, self._num_replaced = values, 0
        self.alerts = RunAlerts(values)

    def update(self) -> list[Alert]:
        """Returns what was raised or cleared by new events and a look at the process."""
        changes = self.read()
        if not self.alerts.is_ended:
            is_there = self._path.is_dir()  # of a run that was removed nothing is wrong any more
            changes += self.alerts.update(self._process.look() if is_there else {"event": "end"})
        return changes

    def read(self) -> list[Alert]:
        """Returns what was raised or cleared by new events."""
        changes = list[Alert]()
        is_behind = True
        while is_behind:
            events = self._tail.read()
            if self._tail.num_replaced != self._num_replaced:  # resumed: its past comes again
                self._num_replaced = self._tail.num_replaced
                changes += self.alerts.update({"event": "end"})
                self.alerts = RunAlerts(self._values)
            changes += [change for event in events for change in self.alerts.update(event)]
            is_behind = self._tail.has_more
        return changes


class Watcher:
    """Follows every run in some directories, at any depth up to three.

    Runs that were silent for a day when they are found are left out.

    Args:
        paths: run directories, or directories of them.
        values: thresholds by the names of rules.
    """

    def __init__(self, paths: Sequence[Path], values: Mapping[str, float | None]) -> None:
        self._paths, self._values = list(paths), values
        self._runs: dict[Path, FollowedRun] = {}
        self._found_s = float("-inf")

    @property
    def runs(self) -> list[Path]:
        """The runs that are followed."""
        return list(self._runs)

    @property
    def active(self) -> list[tuple[Path, Alert]]:
        """All alerts that are not over."""
        return [(path, alert) for path, run in self._runs.items() for alert in run.alerts.active]

    @property
    def is_over(self) -> bool:
        """Whether only single runs were given, and all of them have ended."""
        runs = [self._runs.get(path) for path in self._paths]
        return all(run is not None and run.alerts.is_ended for run in runs)

    def update(self) -> list[tuple[Path, Alert]]:
        """Returns what has been raised or cleared since the last call."""
        if time.monotonic() - self._found_s >= _FIND_EVERY_S:
            self._found_s = time.monotonic()
            self._find()
        return [(path, change) for path, run in self._runs.items() for change in run.update()]

    def _find(self) -> None:
        for top in self._paths:
            for pattern in ("", "*/", "*/*/", "*/*/*/"):
                with suppress(OSError):  # a directory was removed, such as an old checkpoint
                    for file in top.glob(f"{pattern}metrics.jsonl"):
                        self._follow(file.parent)

    def _follow(self, path: Path) -> None:
        if path in self._runs:
            return
        try:
            silent_s = time.time() - (path / "metrics.jsonl").stat().st_mtime
        except OSError:
            return
        if silent_s < _FORGOTTEN_S:
            self._runs[path] = FollowedRun(path, self._values)
