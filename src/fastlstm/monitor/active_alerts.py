"""The alerts of the runs that train at present, for the page of `fastlstm monitor`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from fastlstm.monitor.alerts import Alert
from fastlstm.monitor.followed_run import FollowedRun
from fastlstm.runs.lock_holder import held_locks, lock_holder
from fastlstm.system.machine_counters import TOGETHER_S, MachineCounters

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastlstm.monitor.run_summary import RunSummary

_LOOK_EVERY_S = 15.0
_READ_BYTES = 4_000_000
"""Of a longer metrics.jsonl the rules see only the end: hours of it."""
_FORGOTTEN_S = 24 * 3600.0


class ActiveAlerts:
    """Evaluates every rule of `fastlstm watch` over the runs that a process writes."""

    def __init__(self) -> None:
        self._followed: dict[Path, FollowedRun] = {}
        self._machine = MachineCounters(max_age_s=TOGETHER_S)
        self._looked_at = -_LOOK_EVERY_S

    def update(self, runs: Mapping[Path, RunSummary]) -> bool:
        """Takes what the last update of the runs added; returns whether an alert came or went."""
        changes = list[Alert]()
        for path, followed in self._followed.items():
            if path in runs:
                changes += self._read(followed, runs[path])
        if time.monotonic() - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = time.monotonic()
            changes += self._look(runs)
        return bool(changes)

    def _read(self, followed: FollowedRun, run: RunSummary) -> list[Alert]:
        if run.added is not None:
            return followed.take(run.added)
        start = {"event": "start", **run.start}
        return followed.begin_again() + followed.take([start, *run.newest_events(_READ_BYTES)])

    def _look(self, runs: Mapping[Path, RunSummary]) -> list[Alert]:
        """Chooses the runs that are followed, and looks at their processes."""
        now, held = time.time(), held_locks()
        kept, changes = dict[Path, FollowedRun](), list[Alert]()
        for path, run in runs.items():
            if run.end is not None or now - run.changed_at > _FORGOTTEN_S:
                continue
            if not lock_holder(path / ".lock", held)[0]:
                continue
            if path in self._followed:
                kept[path] = self._followed[path]
            else:
                kept[path] = FollowedRun(path, None, self._machine)
                start = {"event": "start", **run.start}
                changes += kept[path].take([start, *run.newest_events(_READ_BYTES)])
            changes += kept[path].look(held)
        self._followed = kept
        return changes

    def of(self, path: Path) -> list[Alert]:
        """Returns the alerts of a run that are not over."""
        followed = self._followed.get(path)
        return [] if followed is None else followed.alerts.active
