"""A job: one `fastlstm train` of a group, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastlstm.errors import EXIT_OK, EXIT_STOPPED
from fastlstm.report.events import number
from fastlstm.report.history import History, read_history
from fastlstm.report.lines import is_unfinished
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.system import environment

_TAIL_BYTES = 4_000
_ERROR = "fastlstm: error: "
_MAX_REASON = 300


@dataclass(frozen=True)
class Job:
    """What is trained, and where.

    Attributes:
        table: directory with the rows of the group.
        run: its run directory.
        config: file of the options of training.
    """

    table: Path
    run: Path
    config: Path

    def words(self) -> list[str]:
        """Returns the words of `fastlstm train`."""
        return [str(self.table), "--out", str(self.run), "--config", str(self.config), "--resume"]


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        state: of its group; refused where nothing can run there, so that all jobs would fail.
        seconds: that this start took.
        reason: one line about a failure.
    """

    state: Literal["done", "failed", "stopped", "refused"]
    seconds: float = 0.0
    reason: str | None = None


class TrainProcess:
    """A process of `fastlstm train`; it ends with the process, and the thread, that starts it.

    It is in a session of its own: Ctrl-C in a terminal reaches it through `stop` only.

    Args:
        words: that follow `fastlstm train`.
        variables: of its environment, beside those of this process.

    Attributes:
        code: that it ended with, None while it runs; minus the signal that killed it.
    """

    def __init__(self, words: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        self._started = time.monotonic()
        self.code: int | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `poll`
        own = {**(variables or {}), environment.PARENT: str(os.getpid())}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fastlstm", "train", *words], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=self._errors,
            env=environment.with_variables(own), start_new_session=True,
        )  # fmt: skip

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self._started

    def poll(self) -> Outcome | None:
        """Returns how it ended, None while it runs."""
        self.code = code = self._process.poll()
        if code is None:
            return None
        with self._errors:
            end = self._errors.seek(0, 2)
            self._errors.seek(max(0, end - _TAIL_BYTES))
            text = self._errors.read().decode("utf-8", "replace")
        if code == EXIT_OK:
            return Outcome("done", self.seconds)
        if code == EXIT_STOPPED:
            return Outcome("stopped", self.seconds)
        return Outcome("failed", self.seconds, _reason(code, text))

    def stop(self) -> None:
        """Has it save its state and end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()


def _reason(code: int, text: str) -> str:
    """Returns one line on why a process ended with this code."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    lines = text.splitlines()
    first = max((n for n, line in enumerate(lines) if line.startswith(_ERROR)), default=None)
    if first is None:
        told = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return told[:_MAX_REASON] or f"ended with exit code {code}"
    details = [line.strip() for line in lines[first + 1 :] if line.startswith(" ")]
    return " ".join([lines[first].removeprefix(_ERROR), *details])[:_MAX_REASON]


def finished_run(path: Path) -> History | None:
    """Returns the events of a run that ended by itself and has a model, else None."""
    run = RunDirectory(path)
    if not run.has_published():
        return None
    history = read_history(run.metrics_path)
    if history.end is None or is_unfinished(history.end) or not history.end.get("has_model", True):
        return None
    return history


def figures(history: History) -> dict[str, float | None]:
    """Returns the validation loss of a run, and its errors beside those of naive forecasts."""
    scores = (history.test or {}).get("scores")
    parts = scores if isinstance(scores, dict) else {}

    def mae(who: str) -> float | None:
        errors = parts.get(who)
        return number(errors, "mae") if isinstance(errors, dict) else None

    ours, naive = mae("forecaster"), mae("seasonal_naive")
    return {"loss": number(history.end or {}, "best_loss"), "mae": ours, "naive_mae": naive}
