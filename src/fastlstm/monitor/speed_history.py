"""Speed of runs of the same model on the same machine, by date: has it become slower?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from fastlstm.monitor.overlay import COLOURS, overlay
from fastlstm.report.events import number, text_of
from fastlstm.report.markup import clipped, to_html

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastlstm.monitor.run_summary import RunSummary

_MIN_RUNS = 3
_MAX_GROUPS = 4
_ALIKE = (
    *("task", "device", "machine", "model", "num_parameters", "threads", "precision"),
    *("batch_size", "seq_length", "optimizer"),
)
_DAY_S = 86400.0
_MAX_DAYS = 36500.0


def speed_history(runs: Sequence[RunSummary]) -> str:
    """Returns a chart of units per second by date; empty where no three runs are alike.

    Runs are alike where machine, model, threads, precision and sizes of a batch are. The date is
    that of a run's newest `machine` event.
    """
    groups: dict[str, list[RunSummary]] = {}
    for run in runs:
        if run.rate and _time(run) is not None:
            groups.setdefault(_key(run), []).append(run)
    alike = [group for group in groups.values() if len(group) >= _MIN_RUNS]
    chosen = sorted(alike, key=len, reverse=True)[:_MAX_GROUPS]
    if not chosen:
        return ""
    newest = max(_time(run) or 0.0 for group in chosen for run in group)
    curves = []
    for group in chosen:
        points = [((_time(run) or 0.0) - newest, run.rate or 0.0) for run in group]
        curves.append(sorted((at / _DAY_S, rate) for at, rate in points))
    first = max(min(at for curve in curves for at, _ in curve), -_MAX_DAYS)
    curves = [[(at - first, rate) for at, rate in curve if at >= first] for curve in curves]
    svg = overlay(
        curves, "Units per second by date", "days since the first", "units/s", has_marks=True
    )
    key = "".join(
        f'<span><b style="background:{colour}"></b>{to_html(_told(group))}</span>'
        for group, colour in zip(chosen, COLOURS, strict=False)
    )
    return (
        f'<h2>Speed by date</h2>\n<p class="key">{key}</p><div class="charts"><figure>{svg}'
        "<figcaption><p>Runs of the"
        " same model and settings on the same machine, from the first to the newest.</p>"
        "</figcaption></figure></div>\n"
    )


def _time(run: RunSummary) -> float | None:
    return number(run.machine_event, "time")


def _key(run: RunSummary) -> str:
    return json.dumps([run.start.get(name) for name in _ALIKE], sort_keys=True, default=str)


def _told(group: Sequence[RunSummary]) -> str:
    start = group[0].start
    parameters = number(start, "num_parameters")
    machine = text_of(start, "machine") or text_of(start, "device")
    parts = [
        f"{len(group)} runs",
        machine,
        "" if parameters is None else f"{parameters:,.0f} parameters",
        text_of(start, "precision"),
    ]
    return clipped(", ".join(filter(None, parts)), 160)
