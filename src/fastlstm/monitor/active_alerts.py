"""The alerts of the runs that train at present, for the page of `fastlstm monitor`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fastlstm.monitor.event_tail import EventTail
from fastlstm.monitor.watcher import FollowedRun
from fastlstm.runs.lock_holder import lock_holder
from fastlstm.runs.run_directory import RunDirectory

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from fastlstm.monitor.alerts import Alert
    from fastlstm.monitor.run_summary import RunSummary

_LOOK_EVERY_S = 15.0
"""A look at a process costs half a millisecond: fifty of them, 0.2 % of a core."""
_READ_BYTES = 4_000_000
"""Of a longer metrics.jsonl the rules see only the end: hours of it."""
_FORGOTTEN_S = 24 * 3600.0


class ActiveAlerts:
    """Evaluates every rule of `fastlstm watch` over the runs that a process writes."""

    def __init__(self) -> None:
        self._followed: dict[Path, FollowedRun] = {}
        self._looked_at = -_LOOK_EVERY_S

    def update(self, runs: Mapping[Path, RunSummary]) -> bool:
        """Reads what was added to the runs; returns whether an alert came or went."""
        is_look = time.monotonic() - self._looked_at >= _LOOK_EVERY_S
        if is_look:
            self._looked_at = time.monotonic()
            self._choose(runs)
        changes = [
            change
            for followed in self._followed.values()
            for change in (followed.update() if is_look else followed.read())
        ]
        return bool(changes)

    def _choose(self, runs: Mapping[Path, RunSummary]) -> None:
        now = time.time()
        kept: dict[Path, FollowedRun] = {}
        for path, run in runs.items():
            if run.end is not None or now - run.changed_at > _FORGOTTEN_S:
                continue
            if lock_holder(path / ".lock")[0]:
                kept[path] = self._followed.get(path) or self._follow(path, run)
        self._followed = kept

    def _follow(self, path: Path, run: RunSummary) -> FollowedRun:
        tail = EventTail.near_end(RunDirectory(path).metrics_path, _READ_BYTES)
        followed = FollowedRun(path, None, tail)
        followed.alerts.update({"event": "start", **run.start})
        return followed

    def of(self, path: Path) -> list[Alert]:
        """Returns the alerts of a run that are not over."""
        followed = self._followed.get(path)
        return [] if followed is None else followed.alerts.active
