"""Candidates that take turns, each in its own process: whatever disturbs the machine hits all."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Worker:
    """A process that waits for a number of steps and answers with their seconds."""

    name: str
    command: list[str]
    seconds: list[float] = field(default_factory=list)
    _process: subprocess.Popen[str] | None = None

    def start(self) -> bool:
        """Starts the process; returns whether it got ready."""
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent,
        )
        return self._read() == "ready"

    def run(self, steps: int) -> None:
        """Lets it run `steps` steps and keeps their seconds."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        self.seconds += json.loads(self._read())

    def stop(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait(timeout=60)

    def _read(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


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


def alternate(workers: Iterable[Worker], rounds: int, steps: int) -> dict[str, list[float]]:
    """Starts all workers, lets each run `steps` steps per round in turn, returns their seconds.

    A worker that does not get ready is left out and named on stderr.
    """
    ready = []
    for worker in workers:
        if worker.start():
            ready.append(worker)
        else:
            print(f"left out, it did not start: {worker.name}", file=sys.stderr)
    for number in range(rounds):
        for worker in ready[number % max(1, len(ready)) :] + ready[: number % max(1, len(ready))]:
            worker.run(steps)
    for worker in ready:
        worker.stop()
    return {worker.name: worker.seconds for worker in ready}
