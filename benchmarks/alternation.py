"""Candidates that take turns, each in its own process: whatever disturbs the machine hits all.

The worker's side (`required`, `serve`) needs nothing but Python: peers may have an interpreter of
their own.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastlstm.tuning.turns import TurnWorker


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


def worker_of(name: str, command: list[str]) -> TurnWorker:
    """A candidate whose command runs in this folder."""
    from fastlstm.tuning.turns import TurnWorker

    return TurnWorker(name, command, Path(__file__).parent, limit_s=600.0)


def started(worker: TurnWorker) -> bool:
    """Returns whether a candidate got ready; one that did not is named on stderr."""
    from fastlstm.errors import CommandError

    try:
        worker.ready()
    except CommandError as error:
        worker.close()
        print(f"left out, it did not start: {error}", file=sys.stderr)
        return False
    return True


def alternate(workers: Iterable[TurnWorker], rounds: int, steps: int) -> dict[str, list[float]]:
    """Lets each candidate run `steps` steps per round in turn; returns the seconds of all by name.

    Prints the ratio of each to the first one with its interval.
    """
    from fastlstm.tuning.turns import estimate

    ready = list(filter(started, workers))
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
