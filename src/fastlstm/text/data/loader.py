"""Training batches of a text, prefetched by a thread."""

from __future__ import annotations

from collections.abc import Callable

from fastlstm.system.prefetch import Prefetcher
from fastlstm.text.data.lanes import Batch, Batches


class TextLoader:
    """Hands out lanes or windows; the prefetching thread starts with the first batch.

    It owns the batches from now on, and polls `should_stop` while waiting.
    """

    def __init__(self, batches: Batches, should_stop: Callable[[], bool] | None = None) -> None:
        self._batches, self._should_stop = batches, should_stop
        self._ahead: Prefetcher[Batch] | None = None
        self._waited_s = 0.0
        self.steps_per_epoch = batches.steps_per_epoch

    @property
    def wait_s(self) -> float:
        """Seconds that `next` has waited in total."""
        return self._waited_s + (0.0 if self._ahead is None else self._ahead.wait_s)

    def next(self) -> Batch:
        """Returns the next batch; raises Stopped where `should_stop` returned True."""
        if self._ahead is None:
            self._ahead = Prefetcher(self._batches, should_stop=self._should_stop)
        return self._ahead.next()

    def state_dict(self) -> dict[str, int]:
        """Returns the position after the last batch handed out."""
        return (self._batches if self._ahead is None else self._ahead).state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues at a position of `state_dict`; raises CorruptFileError for an invalid one."""
        self.close()
        self._batches.load_state_dict(state)

    def close(self) -> None:
        """Ends the thread; a later `next` continues from the position of `state_dict`."""
        if self._ahead is not None:
            position, self._waited_s = self._ahead.state_dict(), self.wait_s
            self._ahead.close()
            self._ahead = None
            self._batches.load_state_dict(position)
