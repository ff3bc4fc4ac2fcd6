"""Alerts as a callback: NaN, a late end, a stall."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

from fastlstm.report.events import Event, number, text_of
from fastlstm.report.lines import skip_text
from fastlstm.report.terminal import clock, percent
from fastlstm.system.environment import with_variables
from fastlstm.system.redaction import redacted
from fastlstm.training.callbacks import Callback

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer

_COMMAND_S = 30.0
"""Limit for one command, and for all together at the end of a run."""
_GOOD_STEPS = 30
_SLIP, _SLIP_S = 0.2, 45.0
_STALL_S, _STALL_TIMES, _LOOK_S = 60.0, 10.0, 1.0
"""Least pause without events, its least ratio to the longest before, and time between checks."""

Rule = Callable[[Event], str | None]
"""Returns what is wrong, an empty text if all is well again, None if it cannot tell."""


class Alerts(Callback):
    """Warns once if something is wrong with a run, and again if the problem returns.

    `nan`: a step was skipped because of NaN or Inf. `slip`: the run will take 20 % longer than
    first predicted. `stall`: no event has come for a minute and for ten times the longest earlier
    pause.

    Args:
        command: run by `sh -c` for each alert, with FASTLSTM_ALERT_RULE, _TEXT, _ADVICE, _RUN and
            _STEP in its environment, for at most 30 s. Training does not wait for it.

    Example:
        ```python
        fastlstm.train("book.txt", callbacks=[fastlstm.Alerts('notify "$FASTLSTM_ALERT_TEXT"')])
        ```
    """

    def __init__(self, command: str | None = None) -> None:
        self._command = command
        self._thread: threading.Thread | None = None

    def on_begin(self, trainer: Trainer) -> None:
        self._rules: dict[str, tuple[Rule, str]] = {
            "nan": (not_finite(), "lower the learning rate or grad_clip"),
            "slip": (slip(), "fastlstm profile finds what holds the run back"),
        }
        self._active, self._step, self._run = set[str](), 0, trainer.run_path or ""
        self._said, self._alerts = queue.SimpleQueue[str](), queue.Queue[dict[str, str] | None]()
        self._beat_s: float | None = None
        self._longest_s = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._work, name="alerts", daemon=True)
        self._thread.start()

    def on_event(self, trainer: Trainer, event: Event) -> None:
        if self._thread is None or event.get("event") == "message":  # such as an alert
            return
        self._step = int(number(event, "step") or self._step)
        self._beat(event)
        for name, (rule, advice) in self._rules.items():
            self._note(name, rule(event), advice)
        self._say(trainer)

    def on_end(self, trainer: Trainer) -> None:
        if self._thread is None:
            return
        self._alerts.put(None)
        self._thread.join(_COMMAND_S)
        if self._thread.is_alive():
            self._said.put("not every alert was delivered")
            _kill(self._process)
        self._thread = None
        self._say(trainer)

    def _beat(self, event: Event) -> None:
        """Notes an event; a run can stall from its first `step` event on."""
        now = time.monotonic()
        if self._beat_s is not None:
            self._longest_s = max(self._longest_s, now - self._beat_s)
            self._active.discard("stall")
        if self._beat_s is not None or event.get("event") == "step":
            self._beat_s = now

    def _say(self, trainer: Trainer) -> None:
        while not self._said.empty():
            trainer.say("warning", self._said.get())

    def _note(self, rule: str, text: str | None, advice: str) -> None:
        if text == "":
            self._active.discard(rule)
        if not text or rule in self._active:
            return
        self._active.add(rule)
        text = redacted(text)
        self._said.put(f"alert ({rule}): {text}; {advice}")
        about = {"rule": rule, "text": text, "advice": advice, "run": self._run}
        self._alerts.put({**about, "step": str(self._step)})

    def _work(self) -> None:
        while True:
            try:
                alert = self._alerts.get(timeout=_LOOK_S)
            except queue.Empty:
                self._look()
                continue
            if alert is None:
                return
            if self._command is not None:
                self._execute(self._command, alert)

    def _look(self) -> None:
        silent_s = 0.0 if self._beat_s is None else time.monotonic() - self._beat_s
        if silent_s > max(_STALL_S, _STALL_TIMES * self._longest_s):
            text = f"no event for {silent_s:.0f} s, before at most {self._longest_s:.0f} s"
            self._note("stall", text, "py-spy dump --pid PID shows where the process waits")

    def _execute(self, command: str, alert: dict[str, str]) -> None:
        values = {f"FASTLSTM_ALERT_{k.upper()}": v.replace("\0", "") for k, v in alert.items()}
        try:
            self._process = process = subprocess.Popen(
                ["/bin/sh", "-c", command],
                env=with_variables(values),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # to end its children with it
            )
            code = process.wait(_COMMAND_S)
            failed = f"ended with exit status {code}" if code else ""
        except subprocess.TimeoutExpired:
            _kill(process)
            failed = f"was ended: it took more than {_COMMAND_S:g} s"
        except (OSError, ValueError) as error:
            failed = f"failed: {type(error).__name__}"
        if failed:
            self._said.put(f"the command of an alert {failed}")


def _kill(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def not_finite() -> Rule:
    """Skipped steps, until 30 good `step` events."""
    good = 0

    def update(event: Event) -> str | None:
        nonlocal good
        kind = event.get("event")
        if kind == "skip":
            good = 0
            return skip_text(event)
        if kind != "step":
            return None
        if number(event, "loss") is None:
            good = 0
            return f"step {text_of(event, 'step')}: the loss is NaN or Inf"
        good += 1
        return "" if good >= _GOOD_STEPS else None

    return update


def slip() -> Rule:
    """A predicted length of the run (median over 45 s) that has grown."""
    totals: deque[tuple[float, float]] = deque(maxlen=200)
    first: float | None = None

    def update(event: Event) -> str | None:
        nonlocal first
        now, left = number(event, "elapsed_s"), number(event, "eta_s")
        if event.get("event") != "step" or now is None or left is None:
            return None
        totals.append((now, now + left))
        while totals[0][0] < now - _SLIP_S:
            totals.popleft()
        if len(totals) < 8 or now - totals[0][0] < _SLIP_S / 2:
            return None
        total = median(total for _, total in totals)
        first = total if first is None else first
        first += 0.05 * min(total - first, 0.0)  # slowly down: one fast minute is no promise
        share = total / max(first, 1.0) - 1.0
        if share > _SLIP:
            told = f"{clock(total)} in all, predicted {clock(first)} at first"
            return f"the run will take {percent(share)} longer: {told}"
        return "" if share < _SLIP / 2 else None

    return update
