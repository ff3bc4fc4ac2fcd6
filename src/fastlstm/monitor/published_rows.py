"""The metrics of a run as rows, one for each step, as trackers and tables take them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastlstm.report.events import number

if TYPE_CHECKING:
    from fastlstm.runs.events import Event

_KINDS = ("step", "eval", "sample")
_MAX_STEP = 1 << 53
"""Above it a float no longer holds every whole number."""
_MAX_TIME = 253_402_300_000.0
"""The end of the year 9999, as Unix time: the last that a date can have."""


@dataclass
class PublishedRow:
    """What was recorded at one step.

    Attributes:
        step: optimizer steps so far.
        elapsed_s: seconds of training when the first of it was recorded.
        time: the same as Unix seconds; 0 until it is known.
        values: "train/loss", "valid/loss" and so on to their finite numbers.
        sample: a text written then, or None.
    """

    step: int
    elapsed_s: float = 0.0
    time: float = 0.0
    values: dict[str, float] = field(default_factory=dict)
    sample: str | None = None


class RowQueue:
    """Makes rows of events; of a step that is repeated after a resume, the newer one.

    A row is complete when a later step begins: an evaluation comes after the figures of training
    at the same step. Values that are not finite numbers are left out.

    Attributes:
        is_ended: whether the last start of the run has ended.
        has_steps: whether any row was ever begun.
        resumed_from: the step that training went back to since `take`, or None.
    """

    def __init__(self) -> None:
        self._rows: dict[int, PublishedRow] = {}
        self._untimed: list[PublishedRow] = []
        self._offset_s: float | None = None
        self._elapsed_s = self._last_time = 0.0
        self.is_ended = False
        self.has_steps = False
        self.resumed_from: int | None = None

    def add(self, event: Event) -> None:
        """Adds the next event of the run."""
        kind = event.get("event")
        if kind == "start":
            self._begin(event)
        self.is_ended = kind == "end" or (self.is_ended and kind != "start")
        elapsed, now = number(event, "elapsed_s"), number(event, "time")
        self._elapsed_s = self._elapsed_s if elapsed is None else elapsed
        if kind == "machine" and now is not None and elapsed is not None:
            self._offset_s = now - elapsed
            self._set_times(self._offset_s)
        step = number(event, "step")
        if kind in _KINDS and step is not None and 0 <= step <= _MAX_STEP and step.is_integer():
            self._add_to_row(int(step), event)

    def rows(self, written: float) -> list[PublishedRow]:
        """Returns all rows so far, by step.

        Args:
            written: Unix time of the last event, for runs that have not told it.
        """
        if self._offset_s is None:
            self._offset_s = written - self._elapsed_s
        self._set_times(self._offset_s)
        return [self._rows[step] for step in sorted(self._rows)]

    def take(self, written: float, with_newest: bool) -> list[PublishedRow]:
        """Returns and forgets the rows that are complete, by step.

        Args:
            written: as in `rows`.
            with_newest: also the newest row; nothing more is expected for it.
        """
        rows = self.rows(written)
        rows = rows if with_newest else rows[:-1]
        for row in rows:
            del self._rows[row.step]
        self.resumed_from = None
        return rows

    def _begin(self, event: Event) -> None:
        """Drops what the run will do again; of times, a new start has its own."""
        resumed_from = number(event, "resumed_from")
        kept = -1 if resumed_from is None else int(resumed_from)
        self._rows = {step: row for step, row in self._rows.items() if step <= kept}
        if self._offset_s is not None:
            self._set_times(self._offset_s)
            self._offset_s = None
        if resumed_from is not None:
            self.resumed_from = kept

    def _set_times(self, offset_s: float) -> None:
        for row in self._untimed:
            seconds = round(bounded_time(row.elapsed_s + offset_s), 3)
            row.time = self._last_time = max(self._last_time, seconds)
        self._untimed.clear()

    def _add_to_row(self, step: int, event: Event) -> None:
        row = self._rows.get(step)
        if row is None:
            row = self._rows[step] = PublishedRow(step, self._elapsed_s)
            self._untimed.append(row)
            self.has_steps = True
        if event["event"] == "sample":
            text = event.get("text")
            row.sample = _encodable(text) if isinstance(text, str) else row.sample
            return
        group = "train" if event["event"] == "step" else str(event.get("split", "valid"))
        for key in event:
            value = number(event, key)
            if key != "step" and value is not None:
                row.values[_encodable(f"{group}/{key}")] = value


def bounded_time(seconds: float) -> float:
    """Returns a Unix time that a date can have: a damaged file may hold any number."""
    return min(max(seconds, 0.0), _MAX_TIME)


def _encodable(text: str) -> str:
    """Returns a text that UTF-8 holds: half a surrogate pair becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")
