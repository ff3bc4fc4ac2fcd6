"""Jobs as processes on this machine."""

from __future__ import annotations

import time

from fastlstm.fanout.job import Job, Outcome, TrainProcess

_POLL_S = 0.1


class LocalJobs:
    """Runs up to `slots` jobs at a time; they end with this process."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._running = dict[Job, TrainProcess]()

    @property
    def room(self) -> int:
        """How many more jobs may be started."""
        return self.slots - len(self._running)

    def start(self, job: Job) -> None:
        """Starts a job; call it in the main thread, with which it ends."""
        self._running[job] = TrainProcess(job.words())

    def poll(self) -> list[tuple[Job, Outcome]]:
        """Returns the jobs that ended, after a short wait."""
        time.sleep(_POLL_S)
        polled = [(job, process.poll()) for job, process in self._running.items()]
        ended = [(job, outcome) for job, outcome in polled if outcome is not None]
        for job, _ in ended:
            del self._running[job]
        return ended

    def stop(self) -> None:
        """Has all jobs save their state and end."""
        for process in self._running.values():
            process.stop()
