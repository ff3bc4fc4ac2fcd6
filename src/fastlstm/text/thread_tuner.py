"""`ThreadTuner`: how many threads a call of the decoder runs on."""

from __future__ import annotations

import time


class ThreadTuner:
    """Chooses one thread or `limit`, whichever was faster, and tries the other now and then.

    The threads of NumPy's BLAS spin for 0.1 s after a model was prepared, and threads that have
    slept take some ms to get a core: a token on two threads takes 10 times as long then. So a
    change lasts some calls, and more threads that have lost are tried again soon, then less and
    less often.
    """

    TRY_S = 0.01
    FIRST_RETRY_S, RETRY_S = 0.1, 1.0
    """Age of an estimate from which it is measured again: of more threads at first, then twice as
    long each time; at most, and of one thread, `RETRY_S` times the other's speed over its own."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seconds: dict[int, float] = {}
        self._tried_s: dict[int, float] = {}
        self._trying, self._until_s, self._is_new = 0, 0.0, False
        self._best, self._retry_s = 0, self.FIRST_RETRY_S

    def choose(self) -> int:
        """Returns the threads of the next call."""
        if self._limit == 1:
            return 1
        now_s = time.perf_counter()
        if now_s < self._until_s:
            return self._trying
        for threads in (self._limit, 1):
            if threads not in self._seconds:
                return self._try(threads, now_s)
        best = min(self._seconds, key=self._seconds.__getitem__)
        if best != self._best:
            self._best, self._retry_s = best, self.FIRST_RETRY_S
        other = 1 if best == self._limit else self._limit
        most_s = self.RETRY_S * min(10.0, self._seconds[other] / self._seconds[best])
        wait_s = most_s if other == 1 else min(self._retry_s, most_s)
        if now_s - self._tried_s[other] <= wait_s:
            return best if best == self._trying else self._try(best, now_s)
        self._retry_s *= 2.0
        return self._try(other, now_s)

    def _try(self, threads: int, now_s: float) -> int:
        self._trying, self._until_s, self._is_new = threads, now_s + self.TRY_S, True
        return threads

    def record(self, threads: int, seconds: float) -> None:
        """Records the time of a token."""
        before = seconds if self._is_new else self._seconds.get(threads, seconds)
        self._seconds[threads] = 0.7 * before + 0.3 * seconds if seconds > before else seconds
        self._tried_s[threads] = time.perf_counter()
        self._is_new = False
