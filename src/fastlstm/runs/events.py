"""Events of a run, and their files: metrics.jsonl and TensorBoard's."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from fastlstm.errors import ConfigError, kind_of_value
from fastlstm.system.storage import finite, open_lines

Event = dict[str, Any]
Observer = Callable[[Event], None]

SPELLING: ContextVar[Callable[[str], str]] = ContextVar("spelling", default=str)
"""Spells the settings in messages of a run: flags where a command has started it."""
NOT_STORED = frozenset({"prepare", "progress"})
_SCALARS = {
    "step": (
        *("loss", "bits_per_char", "lr", "grad_norm"),
        *("units_per_s", "ceiling_share", "input_wait_share"),
    ),
    "eval": ("loss", "bits_per_char", "bits_per_byte", "perplexity"),
}


def checked_observers(observers: Any) -> list[Observer]:
    """Returns observers as a list; raises ConfigError unless they are functions."""
    if not isinstance(observers, Sequence) or not all(map(callable, observers)):
        kind = kind_of_value(observers)
        raise ConfigError(f"observers is {kind}, expected a list of functions that take an event")
    return list(observers)


def event_line(event: Event) -> str:
    """Returns an event as one line of strict JSON; NaN and Inf become null.

    What UTF-8 cannot hold, such as bytes of the name of a file, is escaped.
    """
    line = json.dumps(finite(event), ensure_ascii=False, separators=(",", ":")) + "\n"
    return line.encode("utf-8", "backslashreplace").decode()


class MetricsFile:
    """Appends events to metrics.jsonl, one flushed line each."""

    def __init__(self, path: Path) -> None:
        self._file = open_lines(path)

    def __call__(self, event: Event) -> None:
        if event["event"] not in NOT_STORED:
            self._file.write(event_line(event))
            self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardWriter:
    """Writes `step` and `eval` events as TensorBoard scalars, samples as text.

    Hides the steps of earlier starts after `first_step`. Writes in the calling thread:
    tensorboardX's thread dies silently on a full disk and then blocks.
    """

    def __init__(self, directory: Path, first_step: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event as Record
        from tensorboardX.proto.event_pb2 import SessionLog
        from tensorboardX.summary import scalar, text

        self._record, self._scalar, self._text = Record, scalar, text
        directory.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(directory / "events"))
        if first_step:
            self._write(first_step, session_log=SessionLog(status=SessionLog.START))

    def __call__(self, event: Event) -> None:
        kind = event["event"]
        group = "train" if kind == "step" else event.get("split", "valid")
        for name in _SCALARS.get(kind, ()):
            value = event.get(name)
            if value is not None:
                summary = self._scalar(f"{group}/{name}", value, display_name="")
                self._write(event["step"], summary=summary)
        if kind == "sample":
            self._write(event["step"], summary=self._text("sample", event["text"]))
        if kind != "step":
            self._writer.flush()

    def _write(self, step: int, **content: Any) -> None:
        self._writer.write_event(self._record(wall_time=time.time(), step=step, **content))

    def close(self) -> None:
        self._writer.close()
