"""Runs that are followed, found in directories while they appear."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fastlstm.monitor.alerts import Alert
from fastlstm.monitor.event_tail import EventTail
from fastlstm.monitor.followed_run import FollowedRun
from fastlstm.runs.lock_holder import held_locks
from fastlstm.system.machine_counters import TOGETHER_S, MachineCounters

_FORGOTTEN_S = 24 * 3600.0
_FIND_EVERY_S = 2.0


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
        self._tails: dict[Path, EventTail] = {}
        self._machine = MachineCounters(max_age_s=TOGETHER_S)
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
        held, changes = held_locks(), list[tuple[Path, Alert]]()
        for path, run in self._runs.items():
            found = self._read(self._tails[path], run) + run.look(held)
            changes += [(path, change) for change in found]
        return changes

    @staticmethod
    def _read(tail: EventTail, run: FollowedRun) -> list[Alert]:
        """Returns what was raised or cleared by new events."""
        changes = list[Alert]()
        is_behind = True
        while is_behind:
            num_replaced, events = tail.num_replaced, tail.read()
            if tail.num_replaced != num_replaced:
                changes += run.begin_again()
            changes += run.take(events)
            is_behind = tail.has_more
        return changes

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
            self._runs[path] = FollowedRun(path, self._values, self._machine)
            self._tails[path] = EventTail(path / "metrics.jsonl")
