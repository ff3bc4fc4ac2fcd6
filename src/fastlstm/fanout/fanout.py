"""Trains one forecaster for each group of a table."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fastlstm.errors import Stopped
from fastlstm.fanout.job import Job, Outcome
from fastlstm.fanout.store import Entry, FanoutStore

_SHOW_EVERY_S = 1.0
_WRITE_EVERY_S = 1.0


class Jobs(Protocol):
    """Where jobs run.

    Attributes:
        slots: how many run at a time.
        room: how many more may be started.
    """

    @property
    def slots(self) -> int: ...

    @property
    def room(self) -> int: ...

    def start(self, job: Job) -> None:
        """Starts a job."""

    def poll(self) -> list[tuple[Job, Outcome]]:
        """Returns the jobs that ended, after a short wait."""

    def stop(self) -> None:
        """Has all jobs save their state and end."""


@dataclass(frozen=True)
class Progress:
    """How far a fan-out is.

    Attributes:
        done: finished groups.
        running: groups that train.
        failed: groups that failed in this start.
        left: groups that wait.
        eta_s: expected seconds to the end; None before there is anything to go by.
    """

    done: int
    running: int
    failed: int
    left: int
    eta_s: float | None


def fan_out(
    store: FanoutStore,
    jobs: Jobs,
    budget_s: float | None,
    stop: Callable[[], bool],
    on_end: Callable[[Entry], None],
    on_progress: Callable[[Progress], None],
) -> None:
    """Trains the groups that are not finished.

    Args:
        store: the groups.
        jobs: where they are trained.
        budget_s: of each job, None where it ends by steps.
        stop: polled; when set, all jobs save their state and Stopped is raised.
        on_end: called with every group that ended.
        on_progress: called about once a second.

    Raises:
        Stopped: `stop` returned True.
    """
    waiting = store.waiting()
    for entry in waiting:
        entry.state, entry.reason = "waiting", None
    running = dict[Job, Entry]()
    times, shown, is_stopping = list[float](), 0.0, False
    while running or (waiting and not is_stopping):
        if stop() and not is_stopping:
            is_stopping = True
            jobs.stop()
        while waiting and jobs.room > 0 and not is_stopping:
            entry = waiting.pop(0)
            job = store.job(entry)
            entry.state, running[job] = "running", entry
            jobs.start(job)
        ended = jobs.poll()
        for job, outcome in ended:
            entry = running.pop(job)
            store.ended(entry, outcome)
            times += [outcome.seconds] if outcome.state == "done" else []
            on_end(entry)
        if ended or time.monotonic() - shown > _SHOW_EVERY_S:
            shown = time.monotonic()
            store.write()
            each = sum(times) / len(times) if times else budget_s
            on_progress(_progress(store, len(running), len(waiting), jobs.slots, each))
    store.write()
    if is_stopping:
        raise Stopped(
            f"stopped; {store.counts()['done']} of {len(store.entries)} groups are finished, the"
            f" states of the others are saved in {store.path}; the same command continues"
        )


def _progress(
    store: FanoutStore, running: int, waiting: int, slots: int, each_s: float | None
) -> Progress:
    """Returns how far it is; a job takes `each_s`, and those that run are half through."""
    counts, training = store.counts(), min(running, slots)
    left = waiting + running - training
    eta_s = None
    if each_s is not None:
        eta_s = each_s * (left + training / 2) / max(1, min(slots, left + training))
    return Progress(counts["done"], training, counts["failed"], left, eta_s)
