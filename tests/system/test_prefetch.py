"""Prefetching keeps the batches and their position, and measures its waits."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest
import torch

from fastlstm.errors import Stopped
from fastlstm.system.prefetch import Prefetcher
from fastlstm.text.data.lanes import Batch, TextLoader


def lanes() -> TextLoader:
    return TextLoader(np.arange(500, dtype=np.uint16), 3, 7, seed=2, lane_reset=0.2)


class Made(Iterator[Batch]):
    """Batches from a function of their number."""

    def __init__(self, make: Callable[[int], Batch]) -> None:
        self.make = make
        self.index = 0

    def __next__(self) -> Batch:
        batch = self.make(self.index)
        self.index += 1
        return batch


def blank(index: int) -> Batch:
    zero = torch.zeros(1, 1, dtype=torch.int64)
    return Batch(zero, zero, torch.zeros(1, dtype=torch.bool), zero[0], 0, index)


def test_batches_come_in_order_and_the_position_follows_them():
    plain = lanes().batches(0, 0)
    with closing(lanes()) as loader:
        for _ in range(60):
            position, ours, wanted = loader.state_dict(), loader.next(), next(plain)
            assert position == {"epoch": wanted.epoch, "index": wanted.index}
            assert torch.equal(ours.x, wanted.x)
            assert torch.equal(ours.reset, wanted.reset)
        wanted = next(plain)
        assert loader.state_dict() == {"epoch": wanted.epoch, "index": wanted.index}


def test_a_position_in_mid_epoch_is_gone_to_and_closing_keeps_it():
    plain, steps = lanes().batches(0, 0), 2 * lanes().steps_per_epoch + 5
    wanted = [next(plain) for _ in range(steps + 6)][steps:]
    with closing(lanes()) as loader:
        loader.next()
        loader.load_state_dict({"epoch": wanted[0].epoch, "index": wanted[0].index})
        for number, batch in enumerate(wanted):
            assert torch.equal(loader.next().x, batch.x)
            if number == 2:
                loader.close()


def test_exceptions_pass_through_and_stay():
    def broken(index: int) -> Batch:
        if index == 2:
            raise RuntimeError("disk gone")
        return blank(index)

    with closing(Prefetcher(Made(broken))) as loader:
        assert [loader.next().index, loader.next().index] == [0, 1]
        for _ in range(2):
            with pytest.raises(RuntimeError, match="disk gone"):
                loader.next()


def test_waiting_is_measured_and_should_stop_ends_it():
    gate = threading.Event()

    def slow(index: int) -> Batch:
        gate.wait()
        return blank(index)

    asked = []
    loader = Prefetcher(Made(slow), should_stop=lambda: asked.append(1) or len(asked) > 1)
    with pytest.raises(Stopped, match="while waiting for a batch"):
        loader.next()
    assert len(asked) == 2
    threading.Timer(0.2, gate.set).start()
    assert loader.wait_s == 0.0
    loader._should_stop = None
    loader.next()
    assert loader.wait_s > 0.1
    loader.close()


def test_close_ends_a_waiting_thread_and_may_be_repeated():
    loader = Prefetcher(Made(blank), depth=1)
    while not loader._queue.full():
        time.sleep(0.001)
    loader.close()
    loader.close()
    assert not loader._thread.is_alive()
    with pytest.raises(ValueError, match="closed"):
        loader.next()


def test_depth_limits_the_batches_made_ahead():
    made = Made(blank)
    with closing(Prefetcher(made, depth=3)) as loader:
        for _ in range(10):
            loader.next()
        time.sleep(0.05)
        assert made.index <= 10 + 3 + 1
