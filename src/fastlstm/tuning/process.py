"""Processes that are measured: whole commands, and workers that step on demand."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fastlstm.errors import CommandError
from fastlstm.system.environment import with_variables
from fastlstm.system.signal_handlers import STOP_SIGNALS, handling, is_not_ignored
from fastlstm.tuning.command import Command

_TAIL_LINES, _TAIL_BYTES = 8, 4_000
_TAIL_S = 0.5
"""The end of standard error may be late when another process has it too."""
_MARK = "FASTLSTM_AB", f"{os.getpid()}.{time.time_ns()}"
"""In the environment of all that is started here."""
_EXIT_S = 5.0
_started = set["MeasuredProcess"]()
"""Not stopped yet: a signal may arrive before the caller has what it started."""


def stop_all() -> None:
    """Ends every process that was started here and was not stopped; they end at the same time."""
    for process in list(_started):
        process.close_pipes()
    for process in list(_started):
        process.stop()


def still_running() -> list[str]:
    """Returns "name (pid 9)" of each process that outlives the command that started it: one in a
    session of its own."""
    found, own = list[str](), {process.pid for process in _started}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{'='.join(_MARK)}\0".encode() not in (place / "environ").read_bytes():
                continue
            if int(place.name) not in own:
                name = (place / "comm").read_bytes().decode(errors="replace").strip()
                found.append(f"{name} (pid {place.name})")
    return found


@contextmanager
def _signals_held() -> Iterator[None]:
    """Has Ctrl-C, SIGTERM and SIGHUP wait for the end of the block."""
    seen = list[int]()
    held = dict.fromkeys(STOP_SIGNALS, lambda number, _: seen.append(number))
    try:
        with handling(held, is_not_ignored):
            yield
    finally:
        if seen:
            signal.raise_signal(seen[0])


class MeasuredProcess:
    """A command in a session of its own, so that all its processes end with it.

    Args:
        command: whose name errors have.
        argv: what to execute.
        limit_s: how long it may take to end, or a worker to answer.
        is_worker: it talks by pipes; else standard input is empty and output is discarded.

    Raises:
        CommandError: it cannot be started.
    """

    def __init__(
        self, command: Command, argv: Sequence[str], limit_s: float, *, is_worker: bool = False
    ) -> None:
        self._command, self._limit_s, self._is_late = command, limit_s, False
        self._tail = b""
        pipe = subprocess.PIPE if is_worker else subprocess.DEVNULL
        try:
            with _signals_held():
                self._process = subprocess.Popen(
                    argv, stdin=pipe, stdout=pipe, stderr=subprocess.PIPE, start_new_session=True,
                    env=with_variables(dict([_MARK])),
                )  # fmt: skip
                _started.add(self)
        except OSError as error:
            raise CommandError(f"{command.name} cannot be started: {error}") from None
        self._reader = threading.Thread(target=self._keep_tail, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of the process that was started."""
        return self._process.pid

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Kills the process when the block takes longer than its limit."""
        timer = threading.Timer(self._limit_s, self._kill_late)
        timer.daemon = True  # a signal while it starts must not have the interpreter wait for it
        try:
            timer.start()
            yield
        finally:
            timer.cancel()

    def wait(self) -> None:
        """Waits for the end.

        Raises:
            CommandError: it failed, was killed or took too long.
        """
        with self.limited():
            status = self._process.wait()
        if status != 0:
            raise self.error()

    def ask(self, line: str = "") -> str:
        """Sends a line to a worker, unless it is empty, and returns its next line.

        Raises:
            CommandError: it ended, or took too long.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self.limited():
            if line:
                with contextlib.suppress(BrokenPipeError):
                    self._process.stdin.write(f"{line}\n".encode())
                    self._process.stdin.flush()
            answer = self._process.stdout.readline().decode().strip()
            if not answer:
                self._process.wait()
        if not answer:
            raise self.error()
        return answer

    def error(self) -> CommandError:
        """Returns what to say of a process that ended other than it should."""
        status, name = self._process.wait(), self._command.name
        if self._is_late:
            what = f"took longer than {self._limit_s:.4g} s and was stopped"
        elif status < 0:
            what = f"was killed by {_signal_name(-status)}"
        else:
            what = f"failed with exit status {status}"
        return CommandError(f"{name} {what}: {self._command.text}", *self._last_lines())

    def close_pipes(self) -> None:
        """Has a worker end, without waiting for it."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def stop(self) -> None:
        """Ends the process and all it started; a worker ends when its input does."""
        self.close_pipes()
        if self._process.stdin is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_S)
        self._kill()
        self._process.wait()
        _started.discard(self)

    def _kill_late(self) -> None:
        self._is_late = True
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _keep_tail(self) -> None:
        """Reads standard error to its end: a command may write gigabytes."""
        assert self._process.stderr is not None
        with self._process.stderr as errors:
            while data := os.read(errors.fileno(), 1 << 16):
                self._tail = (self._tail + data)[-_TAIL_BYTES:]

    def _last_lines(self) -> list[str]:
        self._reader.join(_TAIL_S)
        lines = self._tail.decode(errors="replace").splitlines()
        return [line.rstrip() for line in lines if line.strip()][-_TAIL_LINES:]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


def run_whole(command: Command, limit_s: float) -> float:
    """Runs a command to its end and returns the seconds of wall clock.

    Raises:
        CommandError: it failed, was killed or took longer than `limit_s`.
    """
    started = time.perf_counter()
    process = MeasuredProcess(command, command.argv, limit_s)
    try:
        process.wait()
        return time.perf_counter() - started
    finally:
        process.stop()


class StepWorker:
    """A training run that is set up once and steps on demand.

    The worker says "ready" with the unit that it counts, then answers each number of steps with
    one JSON object: `seconds` and `units` of these steps (`tuning/step_server.py`).

    Args:
        command: a training command.
        folder: an empty directory for what it writes.
        limit_s: how long setting up, or one answer, may take.
    """

    def __init__(self, command: Command, folder: str, limit_s: float) -> None:
        assert command.training is not None
        self._command = command
        argv = with_run_directory(command.training, os.path.join(folder, "run"))
        self._process = MeasuredProcess(command, argv, limit_s, is_worker=True)

    def ready(self) -> str:
        """Waits until the run is set up; returns its unit, such as "tokens"."""
        word, _, unit = self._process.ask().partition(" ")
        if word != "ready":
            raise CommandError(f"{self._command.name} answered {word!r} for 'ready'")
        return unit

    def step(self, count: int) -> list[tuple[float, int]]:
        """Has it take steps; returns seconds and units of each, without steps that were skipped.

        Raises:
            CommandError: it ended, or no loss was finite.
        """
        answer = json.loads(self._process.ask(str(count)))
        steps = list(zip(answer["seconds"], answer["units"], strict=True))
        taken = [(seconds, units) for seconds, units in steps if units > 0]
        if not taken:
            raise CommandError(f"{self._command.name}: no step had a finite loss")
        return taken

    def stop(self) -> None:
        """Ends the worker."""
        self._process.stop()


def with_run_directory(words: Sequence[str], path: str) -> list[str]:
    """Returns a training command that writes to `path`: the last `--out` counts."""
    place = words.index("--") if "--" in words else len(words)
    return [*words[:place], "--out", path, *words[place:]]
