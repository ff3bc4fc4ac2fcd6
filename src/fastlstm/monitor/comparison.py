"""`fastlstm compare`: runs side by side at equal seconds or characters, and how they differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fastlstm.errors import ConfigError, RunDirectoryError
from fastlstm.monitor.run_summary import RunSummary
from fastlstm.report.events import number, text_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fastlstm.report.events import Event

By = Literal["seconds", "chars"]
_NOT_SETTINGS = frozenset(
    (
        *("event", "time", "run", "resumed_from", "resumed_s", "precision_why"),
        *("flop_per_unit", "num_units", "unit", "task", "kernels", "device"),
        *("ceiling_gflops", "ceiling_how"),
    )
)
_CEILING_RATIO = 1.25
"""Ceilings that differ by more are not of one quiet machine."""
_MOST_OF_CEILING = 1.1
"""Above this share a ceiling was measured too low."""


@dataclass(frozen=True)
class RunComparison:
    """Runs side by side.

    Attributes:
        runs: their summaries, in the order given.
        at: the point at which they are compared, by seconds and by chars; None where a run has no
            evaluation.
        differences: settings, kernels and machine that differ: name -> one value per run.
        notes: what to know before trusting the figures.
    """

    runs: list[RunSummary]
    at: dict[str, float | None]
    differences: dict[str, list[Any]]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Returns the comparison as a JSON value."""
        return {
            "at": self.at,
            "runs": [self._facts(run) for run in self.runs],
            "differences": self.differences,
            "notes": self.notes,
        }

    def figure(self, run: RunSummary, by: str) -> float | None:
        """Returns the best validation of a run at the common point."""
        limit = self.at[by]
        return None if limit is None else run.best_until(limit, by)

    def _facts(self, run: RunSummary) -> dict[str, Any]:
        return {
            "run": str(run.path),
            "state": run.state,
            "measure": run.measure.key,
            "best": run.best,
            **{f"at_equal_{by}": self.figure(run, by) for by in self.at},
            "seconds": run.seconds,
            "units": run.last.get("units"),
            "unit": run.unit,
            "units_per_s": run.rate,
            "ceiling_share": run.last.get("ceiling_share"),
        }


def compare_runs(paths: Sequence[Path]) -> RunComparison:
    """Reads runs and compares them.

    Raises:
        ConfigError: fewer than two runs.
        RunDirectoryError: a path has no events of a run.
    """
    if len(paths) < 2:
        raise ConfigError("compare takes two runs or more; name another run")
    runs = [_summary(path) for path in paths]
    at = {by: _common(runs, by) for by in ("seconds", "chars")}
    return RunComparison(runs, at, differences(runs), _notes(runs))


def _summary(path: Path) -> RunSummary:
    run = RunSummary(path)
    run.update()
    if not run.start and not run.training and not run.validation:
        raise RunDirectoryError(
            f"{path}: has no events of a run (metrics.jsonl is missing, empty or damaged); name the"
            " directory that a training wrote"
        )
    return run


def _common(runs: Sequence[RunSummary], by: str) -> float | None:
    """Returns how far all runs have got, None where one has no evaluation."""
    reached = [run.reach(by) for run in runs]
    known = [value for value in reached if value is not None]
    return min(known) if len(known) == len(reached) else None


def differences(runs: Sequence[RunSummary]) -> dict[str, list[Any]]:
    """Returns what is not the same in all runs: name -> one value per run.

    Of runs of different tasks only the settings that all of them have are compared.
    """
    flat = [_settings(run.start) for run in runs]
    names = dict.fromkeys(name for settings in flat for name in settings)
    if len({text_of(run.start, "task") or "text" for run in runs}) > 1:
        names = {name: None for name in names if all(name in settings for settings in flat)}
    rows = {name: [settings.get(name) for settings in flat] for name in names}
    return {name: values for name, values in rows.items() if any(v != values[0] for v in values)}


def _settings(start: Event) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for key, value in start.items():
        if isinstance(value, dict) and key not in _NOT_SETTINGS:
            settings |= {f"{key}.{name}": part for name, part in value.items()}
        elif key not in _NOT_SETTINGS:
            settings[key] = value
    kernels = text_of(start, "kernels")
    return {**settings, "device": text_of(start, "device"), "kernels": kernels}


def _notes(runs: Sequence[RunSummary]) -> list[str]:
    notes = []
    if len({text_of(run.start, "task") or "text" for run in runs}) > 1:
        notes.append("the runs are of different tasks: their figures cannot be compared")
    if len({text_of(run.start, "source") for run in runs}) > 1:
        notes.append("the runs read different sources: their figures are of different data")
    ceilings = [number(run.start, "ceiling_gflops") for run in runs]
    known = [ceiling for ceiling in ceilings if ceiling]
    devices = {text_of(run.start, "device") for run in runs}
    # Of one machine too, each number of threads and each precision has a ceiling of its own.
    settings = {f"{run.start.get('threads')} {run.start.get('precision')}" for run in runs}
    differ = len(settings) == 1 and known and max(known) > _CEILING_RATIO * min(known)
    if len(devices) > 1 or differ:
        shown = ", ".join("unknown" if not c else f"{c:,.0f} GFLOP/s" for c in ceilings)
        notes.append(
            f"different machines, or one that was busy (ceilings: {shown}): seconds and rates say"
            " more about them than about the settings; compare at equal chars"
        )
    for run in runs:
        share = number(run.last, "ceiling_share")
        if share is not None and share > _MOST_OF_CEILING:
            notes.append(
                f"{run.path} reached {100 * share:.0f} % of its ceiling: other processes slowed the"
                " measurement of the ceiling"
            )
        if run.state in ("running", "dead", "stopped"):
            notes.append(f"{run.path} is {run.state}: its figures are not those of a finished run")
        if run.best is None:
            notes.append(f"{run.path} has no evaluation yet")
    return notes
