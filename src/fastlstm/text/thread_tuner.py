"""`ThreadTuner`: how many threads a call of the decoder runs on."""

from __future__ import annotations

import time


class ThreadTuner:
    """Chooses one thread or `limit`, whichever was faster, and tries the other now and then.

    Both are tried twice at first: the first call after a pause reads weights from memory and wakes
    threads, so its time says little.

    Args:
        limit: threads that a call may use.
    """

    RETRY_S = 1.0
    """An estimate older than this is measured again, if the other was not far better."""
    FIRST_TRIES = 2

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seconds: dict[int, float] = {}
        self._tried_s: dict[int, float] = {}
        self._tries: dict[int, int] = {}

    def choose(self) -> int:
        """Returns the threads of the next call."""
        if self._limit == 1:
            return 1
        least = min((self._limit, 1), key=lambda threads: self._tries.get(threads, 0))
        if self._tries.get(least, 0) < self.FIRST_TRIES:
            return least
        best = min(self._seconds, key=self._seconds.__getitem__)
        other = 1 if best == self._limit else self._limit
        wait_s = self.RETRY_S * min(10.0, self._seconds[other] / self._seconds[best])
        return other if time.perf_counter() - self._tried_s[other] > wait_s else best

    def record(self, threads: int, seconds: float) -> None:
        """Records the time of a token."""
        before = self._seconds.get(threads, seconds)
        self._seconds[threads] = 0.7 * before + 0.3 * seconds if seconds > before else seconds
        self._tried_s[threads] = time.perf_counter()
        self._tries[threads] = self._tries.get(threads, 0) + 1
