"""Training batches of a text, prefetched by a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fastlstm.errors import Stopped
from fastlstm.system.prefetch import Prefetcher
from fastlstm.text.data.lanes import Batch, Batches


class TextLoader:
    """Hands out lanes or windows; the prefetching thread starts with the first batch.

    It owns the batches from now on, and polls `should_stop` while waiting. `num_lanes` is B; of
    several processes, the lanes of this one.
    """

    def __init__(self, batches: Batches, should_stop: Callable[[], bool] | None = None) -> None:
        self._batches, self._should_stop = batches, should_stop
        self._ahead: Prefetcher[Batch] | None = None
        self._waited_s = 0.0
        self.steps_per_epoch = batches.steps_per_epoch
        self.ids, self.num_lanes = batches.ids, batches.lanes.stop - batches.lanes.start
        self.is_in_order = batches.is_in_order

    @property
    def wait_s(self) -> float:
        """Seconds that `next` has waited in total."""
        return self._waited_s + (0.0 if self._ahead is None else self._ahead.wait_s)

    def next(self) -> Batch:
        """Returns the next batch; raises Stopped where `should_stop` returned True."""
        if self._ahead is None:
            self._ahead = Prefetcher(self._batches, should_stop=self._should_stop)
        return self._ahead.next()

    def first_epoch(self) -> Iterator[Batch]:
        """Yields the batches of the first epoch, beside `next`; raises Stopped as `next` does."""
        batches = self._batches.from_start()
        for _ in range(self.steps_per_epoch):
            if self._should_stop is not None and self._should_stop():
                raise Stopped("stopped while reading the first epoch again")
            yield next(batches)

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
