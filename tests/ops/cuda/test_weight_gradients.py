"""The order of streams: what is read, formed and added when. No GPU: streams are recorded."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fastlstm.ops.cuda import weight_gradients
from fastlstm.ops.cuda.weight_gradients import WeightGradients, active_for

GPU = torch.device("cuda", 0)


class Stream:
    def __init__(self, name: str, done: list[str]) -> None:
        self.name, self._done = name, done

    def wait_stream(self, other: Stream) -> None:
        self._done.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened, in its order."""
    found: list[str] = []
    main, own = Stream("main", found), Stream("own", found)

    @contextmanager
    def on(stream: Stream) -> Any:
        found.append(f"on {stream.name}")
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(weight_gradients, "_stream", lambda device: own)
    return found


def test_a_gradient_is_there_after_add_and_adds_up(done: list[str]) -> None:
    first, second = (torch.zeros(2, requires_grad=True) for _ in range(2))
    with WeightGradients(GPU) as gradients:
        assert active_for([first, second]) is gradients
        gradients.form([first, second], lambda: [torch.ones(2), None], [])
        assert first.grad is None
        gradients.add()
        assert done == ["own waits for main", "on own", "main waits for own"]
        gradients.form([first], lambda: [torch.full((2,), 2.0)], [])
        gradients.add()
        gradients.add()
    assert first.grad is not None
    assert first.grad.tolist() == [3.0, 3.0]
    assert second.grad is None
    assert len(done) == 6


def test_what_is_read_lives_until_it_is_added(done: list[str]) -> None:
    read, before = [torch.zeros(1)], len(done)
    with WeightGradients(GPU) as gradients:
        gradients.form([torch.zeros(1, requires_grad=True)], lambda: [torch.ones(1)], read)
        assert any(kept is read for kept in gradients._read)
        gradients.add()
        assert gradients._read == []
    assert len(done) > before


def test_only_leaves_of_the_thread_within_the_block(done: list[str]) -> None:
    leaf = torch.zeros(2, requires_grad=True)
    seen: list[Any] = []
    with WeightGradients(GPU) as gradients:
        thread = threading.Thread(target=lambda: seen.append(active_for([leaf])))
        thread.start()
        thread.join()
        assert active_for([leaf * 1.0]) is None
        assert active_for([leaf.detach()]) is None
        assert gradients.is_open
    assert seen == [None]
    assert active_for([leaf]) is None
    assert not gradients.is_open
    with WeightGradients(torch.device("cpu")):
        assert active_for([leaf]) is None
