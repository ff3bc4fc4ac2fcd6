"""The metrics of a run as rows, one for each step, as trackers and tables take them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastlstm.report.events import number
from fastlstm.report.history import read_events

if TYPE_CHECKING:
    from pathlib import Path

    from fastlstm.runs.events import Event

_KINDS = ("step", "eval", "sample")


@dataclass
class PublishedRow:
    """What was recorded at one step.

    Attributes:
        step: optimizer steps so far.
        values: "train/loss", "valid/loss" and so on to their numbers.
        sample: a text written then, or None.
    """

    step: int
    values: dict[str, float] = field(default_factory=dict)
    sample: str | None = None


def published_rows(path: Path) -> list[PublishedRow]:
    """Returns the rows of metrics.jsonl by step; of a step repeated after a resume, the newer.

    Lines that are damaged, and values that are no finite numbers, are left out.
    """
    rows: dict[int, PublishedRow] = {}
    for event, _ in read_events(path):
        kind = event.get("event")
        if kind == "start":
            kept = number(event, "resumed_from") or 0.0
            rows = {step: row for step, row in rows.items() if step <= kept}
        step = number(event, "step")
        if kind in _KINDS and step is not None and step == math.floor(step) >= 0:
            row = rows.setdefault(int(step), PublishedRow(int(step)))
            _add(row, event)
    return [rows[step] for step in sorted(rows)]


def _add(row: PublishedRow, event: Event) -> None:
    """Adds the numbers of a step or an evaluation, or the text of a sample."""
    if event["event"] == "sample":
        text = event.get("text")
        row.sample = text if isinstance(text, str) else row.sample
        return
    group = "train" if event["event"] == "step" else str(event.get("split", "valid"))
    for key in event:
        value = number(event, key)
        if key != "step" and value is not None:
            row.values[f"{group}/{key}"] = value
