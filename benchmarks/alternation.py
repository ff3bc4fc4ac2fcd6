"""Candidates that take turns, each in its own process: whatever disturbs the machine hits all.

The worker's side (`required`, `serve`) needs nothing but Python: peers may have an interpreter of
their own.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_LIMIT_S = 600.0
"""The longest start, and the longest answer."""


@contextmanager
def required(name: str) -> Iterator[None]:
    """The worker's side: a library that a candidate needs and is missing ends it with one line."""
    try:
        yield
    except ImportError as error:
        sys.exit(f"{name}: {error}")


def serve(step: Callable[[], object]) -> None:
    """The worker's side: says "ready", then times as many steps as each line of stdin asks for."""
    print("ready", flush=True)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        print(json.dumps(seconds), flush=True)


class Worker:
    """A candidate in a process of its own, which steps on demand."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name, self.command = name, command
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> bool:
        """Starts the process in this folder; returns whether it got ready."""
        self._process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=Path(__file__).parent,
        )  # fmt: skip
        is_ready = self._answer() == "ready"
        if not is_ready:
            self.close()
            print(f"left out, it did not start: {self.name}", file=sys.stderr)
        return is_ready

    def run(self, steps: int) -> list[float]:
        """Returns the seconds of so many steps."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        answer = self._answer()
        if not answer:
            sys.exit(f"{self.name} ended with status {self._process.wait()}")
        seconds: list[float] = json.loads(answer)
        return seconds

    def close(self) -> None:
        """Ends the process: its input ends."""
        if self._process is not None:
            self._process.communicate()
            self._process = None

    def _answer(self) -> str:
        """Returns the next line of the process; a process that hangs is killed."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        timer = threading.Timer(_LIMIT_S, process.kill)
        timer.start()
        line = process.stdout.readline().strip()
        timer.cancel()
        return line


def alternate(workers: Iterable[Worker], rounds: int, steps: int) -> dict[str, list[float]]:
    """Lets each candidate run `steps` steps per round in turn; returns the seconds of all by name.

    Prints the ratio of each to the first one with its interval.
    """
    from fastlstm.tuning.turns import estimate

    ready = [worker for worker in workers if worker.start()]
    seconds: dict[str, list[list[float]]] = {worker.name: [] for worker in ready}
    for number in range(rounds):
        first = number % max(1, len(ready))
        for worker in ready[first:] + ready[:first]:
            seconds[worker.name].append(worker.run(steps))
    for worker in ready:
        worker.close()
    turns = {name: [statistics.median(t) for t in found] for name, found in seconds.items()}
    for worker in ready[1:]:
        base = ready[0].name
        found = estimate(turns[base], turns[worker.name])
        shown = f"{found.ratio:.3f} ({found.low:.3f} to {found.high:.3f})"
        print(f"  time of {worker.name} over {base}: {shown}")
    return {name: [s for turn in found for s in turn] for name, found in seconds.items()}
