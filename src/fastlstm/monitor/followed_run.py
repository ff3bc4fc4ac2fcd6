"""A run whose alerts are kept up to date."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastlstm.monitor.alerts import Alert, RunAlerts
from fastlstm.monitor.run_process import RunProcess

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from fastlstm.report.events import Event
    from fastlstm.system.machine_counters import MachineCounters


class FollowedRun:
    """The alerts of a run; each method returns what it has raised or cleared.

    Args:
        path: the run directory.
        values: thresholds by the names of rules; None is every rule.
        machine: counters that all runs share.
    """

    def __init__(
        self, path: Path, values: Mapping[str, float | None] | None, machine: MachineCounters
    ) -> None:
        self._path, self._values = path, values
        self._process = RunProcess(path, machine)
        self.alerts = RunAlerts(values)

    def take(self, events: Iterable[Event]) -> list[Alert]:
        """Takes new events of the run."""
        return [change for event in events for change in self.alerts.update(event)]

    def begin_again(self) -> list[Alert]:
        """Forgets the events so far: they will come again."""
        changes = self.alerts.update({"event": "end"})
        self.alerts = RunAlerts(self._values)
        return changes

    def look(self, held: Mapping[int, int]) -> list[Alert]:
        """Looks at the process of the run; `held` is as in `lock_holder`."""
        if self.alerts.is_ended:
            return []
        is_there = self._path.is_dir()  # of a run that was removed nothing is wrong any more
        return self.alerts.update(self._process.look(held) if is_there else {"event": "end"})
