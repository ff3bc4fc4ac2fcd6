"""Processes of a run as threads of one: what they tell each other goes from hand to hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastlstm.distributed.world import DEADLINE_S, Order, World


class Hub:
    """Where `size` threads meet."""

    def __init__(self, size: int) -> None:
        self.size, self._given = size, [None] * size
        self._barrier = threading.Barrier(size, timeout=20)

    def exchanged(self, rank: int, value: Any) -> list[Any]:
        self._given[rank] = value
        self._barrier.wait()
        values = list(self._given)
        self._barrier.wait()
        return values

    def give_up(self) -> None:
        self._barrier.abort()


class ThreadWorld(World):
    """A rank of the threads that meet at a hub.

    Attributes:
        orders_heard: what rank 0 has said.
    """

    def __init__(self, rank: int, hub: Hub) -> None:
        super().__init__(rank, hub.size)
        self.names = [f"thread {number}" for number in range(hub.size)]
        self._hub, self.orders_heard = hub, list[Order]()

    def _tell(self, numbers: Tensor) -> Tensor:
        told: Tensor = self._hub.exchanged(self.rank, numbers)[0]
        self.orders_heard.append(Order(int(told[0])))
        return told

    def shared(self, value: Any = None) -> Any:
        if self.is_leader:
            self.order(Order.SHARE)
        else:
            self.next_order()
        return self._hub.exchanged(self.rank, value)[0]

    def gathered(self, value: Any) -> list[Any]:
        values = self._hub.exchanged(self.rank, value)
        return values if self.is_leader else []

    def expect(self, parts: list[Tensor]) -> Callable[[float], None]:
        def collect(deadline_s: float) -> None:
            for part, given in zip(parts, self._hub.exchanged(0, None)[1:], strict=True):
                part.copy_(given)

        return collect

    def give(self, part: Tensor) -> None:
        self._hub.exchanged(self.rank, part)

    def reduction(self, flat: Tensor, wire: torch.dtype = torch.float32) -> Any:
        def add(about: Tensor, deadline_s: float = DEADLINE_S) -> None:
            sent = flat.to(wire, copy=True).float()
            parts = self._hub.exchanged(self.rank, (sent, about.clone()))
            flat.copy_(torch.stack([own for own, _ in parts]).sum(0))
            about.copy_(torch.stack([told for _, told in parts]).sum(0))

        return add


def in_threads(runs: Sequence[Callable[[], None]], hub: Hub) -> None:
    """Calls each function in a thread of its own; raises what the first of them has raised."""
    errors = list[BaseException]()

    def caught(run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)
            hub.give_up()

    threads = [threading.Thread(target=caught, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
