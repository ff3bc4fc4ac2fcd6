"""The processes that train one model together, as torchrun starts them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from signal import Signals
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fastlstm.distributed.messages import Messages
from fastlstm.distributed.neighbour import NeighbourCopy
from fastlstm.distributed.pulse import Pulse
from fastlstm.distributed.reduction import LostPeer, TreeReduction
from fastlstm.distributed.step_report import StepReport
from fastlstm.errors import (
    Dismissed,
    DistributedError,
    FastLSTMError,
    LostProcessError,
    Stopped,
    UsageError,
)
from fastlstm.system import hardware

DEADLINE_S = 60.0
"""A process that does not answer for so long is lost."""
_SETTLED = 30
"""Steps before a rank is said to be slow."""
_SLOW = 1.4
"""Times the median of the ranks, from which one is said to be slow."""

_NUMBERS = 4
"""Places for numbers in an order."""
_COLLECTED = (1 << 20) + 2
"""Tag of what ranks `give`, beside those of sums and of `NeighbourCopy`."""
_LOOK_EVERY = timedelta(seconds=1)
"""Whether rank 0 still lives."""


class Order(IntEnum):
    """What rank 0 has all processes do next."""

    STEP = 1
    CAPTURE = 2
    RESTORE = 3
    RESET = 4
    SHARE = 5
    NOTE = 6
    GATHER = 7
    ROUND = 8
    EVALUATE = 9
    END = 10
    ABANDON = 11


class Reduction(Protocol):
    """Adds a vector and a few numbers over all processes."""

    def __call__(self, about: Tensor, deadline_s: float = ...) -> None: ...


class World:
    """The processes of a run; of one process alone where nothing else is said.

    Rank 0 leads: it makes every choice that depends on time or files, shows progress and writes.
    The others are told what to do next (`Order`).

    Attributes:
        rank: of this process, from 0.
        size: number of processes.
        num_machines: on which they are.
        machine_size: the most processes on any machine.
        threads: of each process of several, if nothing else is asked for: the cores that it may
            use, divided among the processes that may use the same.
        attempt: how often the processes were started again.
        names: machine and process number of each rank.
        messages: how objects travel.
        gpus: what tells the GPU of each rank from all others; empty where it has none.
        seconds: that the passes of a step take on each rank, a running mean.
        signal: number of the one that is to stop the run, of a process that is not rank 0; else 0.
        stopped_by: what rank 0 has heard of such signals.
    """

    def __init__(self, rank: int = 0, size: int = 1, attempt: int = 0) -> None:
        self.rank, self.size = rank, size
        self.num_machines = self.machine_size = self.threads = 1
        self.names, self.gpus = ["this process"], [""] * size
        self.seconds, self._num_heard = [0.0] * size, 0
        self.orders: dist.ProcessGroup | None = None
        self.pulse: Pulse | None = None
        self.messages = Messages(b"")
        self.attempt, self.is_over = attempt, False
        self.signal = 0
        self.stopped_by: str | None = None

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def default_threads(self) -> int:
        """Returns the threads of this process if nothing else is asked for.

        In several processes the OMP_NUM_THREADS of 1 that torchrun sets would leave cores idle.
        """
        return hardware.default_threads() if self.size == 1 else self.threads

    def order(self, order: Order, *numbers: float) -> None:
        """Tells the others what to do next, with the numbers that belong to it."""
        if self.size > 1:
            told = [float(order), *numbers, *[0.0] * (_NUMBERS - len(numbers))]
            self._tell(torch.tensor(told, dtype=torch.float64))

    def next_order(self) -> tuple[Order, list[float]]:
        """Waits for what rank 0 says; raises Dismissed where it has ended the run by an error."""
        told, *numbers = self._tell(torch.zeros(1 + _NUMBERS, dtype=torch.float64)).tolist()
        if (order := Order(int(told))) == Order.ABANDON:
            if numbers[0] == Stopped.exit_code:
                self.gathered(None)
            raise Dismissed(int(numbers[0]))
        return order, numbers

    def abandon(self, error: FastLSTMError) -> None:
        """Tells the others that an error ends the run.

        Raises:
            LostProcessError: it was a stop, and a process is lost: then it was its agent that sent
                the signal, and the run is to be started again.
        """
        self.order(Order.ABANDON, error.exit_code)
        if isinstance(error, Stopped):
            self.gathered(None)

    def _tell(self, numbers: Tensor) -> Tensor:
        with self.naming(None if self.is_leader else 0):
            work = dist.broadcast(numbers, 0, self.orders, async_op=True)
            assert work is not None
            if self.is_leader or self.pulse is None:
                work.wait()
            else:
                _wait_for_leader(work, self.pulse)
        return numbers

    def shared(self, value: Any = None) -> Any:
        """Returns what rank 0 gives; in the others the argument is not looked at."""
        if self.size == 1:
            return value
        if self.is_leader:
            self.order(Order.SHARE)
        elif (order := self.next_order()[0]) != Order.SHARE:
            raise AssertionError(f"rank 0 says {order.name}, expected a value")
        with self.naming():
            return self.messages.broadcast(value, self.is_leader)

    def gathered(self, value: Any) -> list[Any]:
        """Returns the value of every rank, in rank 0; an empty list in the others."""
        if self.size == 1:
            return [value]
        with self.naming():
            return self.messages.gathered(value, in_all=False)

    def all_gathered(self, own: Tensor, lengths: list[int]) -> list[Tensor]:
        """Returns the vectors of all ranks, 1-d, of the lengths that all know."""
        padded = own.new_zeros(max(lengths))
        padded[: len(own)] = own
        pieces = own.new_empty(self.size * len(padded)).split(len(padded))
        with self.naming():
            # As bytes: gloo need not know the type.
            dist.all_gather([p.view(torch.uint8) for p in pieces], padded.view(torch.uint8))
        return [piece[:length] for piece, length in zip(pieces, lengths, strict=True)]

    def expect(self, parts: list[Tensor]) -> Callable[[float], None]:
        """Begins to receive what the other ranks `give`, in order of rank, into `parts`, which have
        the sizes of that.

        Call it before a long computation: gloo sends a message only when the receiver has asked for
        it, and until then its sender would wait.

        Returns:
            Waits for all of it, so many seconds for each rank.
        """
        works = list[tuple[int, dist.Work]]()
        for rank, part in enumerate(parts, start=1):
            with self.naming(rank):
                work = dist.irecv(part, tag=_COLLECTED, src=rank)
                assert work is not None
                works.append((rank, work))

        def collect(deadline_s: float) -> None:
            for rank, work in works:
                with self.naming(rank, deadline_s):
                    work.wait(timedelta(seconds=deadline_s))

        return collect

    def give(self, part: Tensor) -> None:
        """Sends a tensor to rank 0, which expects it."""
        with self.naming(0):
            work = dist.isend(part, tag=_COLLECTED, dst=0)
            assert work is not None
            work.wait()  # a shorter limit would close all connections when it is over

    def summed(self, numbers: Tensor) -> Tensor:
        """Adds numbers over all processes, in place: exact where all but one of them are zero."""
        if self.size > 1:
            with self.naming():
                dist.all_reduce(numbers)
        return numbers

    def report(self, num_shards: int) -> StepReport:
        """Returns a vector for what is told with the gradients."""
        return StepReport.empty(num_shards, self.rank, self.size)

    def received(self, report: StepReport) -> None:
        """Takes in what all processes told.

        Raises:
            DistributedError: they have different weights.
        """
        passed = zip(self.seconds, report.seconds.tolist(), strict=True)
        self.seconds = [0.98 * before + 0.02 * now if before else now for before, now in passed]
        self._num_heard += 1
        self.heard(report.signals.tolist())
        checks = report.checks.tolist()
        usual, count = Counter(checks).most_common(1)[0]
        if count < self.size:
            others = [self.name_of(rank) for rank, check in enumerate(checks) if check != usual]
            raise DistributedError(
                f"{', '.join(others)} has other weights than the rest: a fault of its memory or"
                " processor, or code that changes weights in one process only; all processes end"
                " here, and the same command with --resume continues from the last checkpoint"
            )

    def heard(self, signals: Sequence[float]) -> None:
        """Notes the number of the signal, 0 without one, that each rank has got."""
        for rank, number in enumerate(signals):
            if number and self.stopped_by is None:
                self.stopped_by = f"{Signals(int(number)).name} to {self.name_of(rank)}"

    def straggler(self) -> str | None:
        """Returns a line about the rank that the others wait for, if there is one."""
        usual, slowest = statistics.median(self.seconds), max(self.seconds)
        if self._num_heard < _SETTLED or self.size == 1 or slowest < _SLOW * usual:
            return None
        name = self.name_of(self.seconds.index(slowest))
        return f"{name} takes {slowest / usual:.1f} times as long as the others: all wait for it"

    def reduction(self, flat: Tensor, wire: torch.dtype = torch.float32) -> Reduction:
        """Returns what adds `flat`, 1-d float32, over all processes in place.

        It takes a few numbers that are added too, and for how many seconds to wait for another
        process.
        """
        if self.size == 1:
            return lambda about, deadline_s=DEADLINE_S: None
        reduce = TreeReduction(flat, wire)

        def named(about: Tensor, deadline_s: float = DEADLINE_S) -> None:
            with self.naming(deadline_s=deadline_s):
                reduce(about, timedelta(seconds=deadline_s))

        return named

    def begin_copy(self, data: bytes) -> None:
        """Begins to send `data` to the same process of the next machine, or to the next rank."""
        with self.naming():
            self._copy = NeighbourCopy(data, self.machine_size % self.size or 1)

    def finish_copy(self) -> tuple[int, bytes]:
        """Returns the rank that sends to this one, and what it has sent."""
        with self.naming():
            return self._copy.source, self._copy.received()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Runs the block in all processes; where it fails in one, none goes on.

        Raises:
            FastLSTMError: in rank 0, its own error or that of the first rank that has one.
            Dismissed: in the others.
        """
        failure: FastLSTMError | None = None
        try:
            yield
        except FastLSTMError as error:
            failure = error
        if self.size == 1:
            if failure is not None:
                raise failure
            return
        told = None if failure is None else (str(failure), failure.exit_code)
        with self.naming():  # reading may take long
            all_told = self.messages.gathered(told, in_all=True, group=self.orders)
        first = next((rank for rank, one in enumerate(all_told) if one is not None), None)
        if first is None:
            return
        self.is_over = True
        if not self.is_leader:
            raise Dismissed(all_told[first][1])
        if failure is not None:
            raise failure
        raise UsageError(f"{self.name_of(first)}: {all_told[first][0]}")

    def name_of(self, rank: int) -> str:
        return f"rank {rank} ({self.names[rank]})"

    @contextmanager
    def naming(self, peer: int | None = None, deadline_s: float = DEADLINE_S) -> Iterator[None]:
        """Turns errors of the transport into one that says what to do.

        Args:
            peer: the rank that is waited for, where it is one.
            deadline_s: for how long.
        """
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, LostPeer):
                peer = error.peer
            elif self.size == 2:
                peer = 1 - self.rank
            name = "another process" if peer is None else self.name_of(peer)
            is_silent = "imed out" in str(error)
            what = f"has not answered for {deadline_s:.0f} s" if is_silent else "exited"
            raise LostProcessError(
                f"{name} {what}, reported by rank {self.rank}; all processes stop here. fastlstm"
                " train --nproc restarts them, torchrun as often as --max-restarts allows; else the"
                " same command with --resume continues the run"
            ) from error


def _wait_for_leader(work: dist.Work, pulse: Pulse) -> None:
    """Waits for rank 0 as long as it lives; raises RuntimeError where it does not."""
    while True:
        was_silent = pulse.is_silent  # where it is gone, the transport says so soon
        try:
            work.wait(_LOOK_EVERY)
        except RuntimeError:
            if work.is_completed():
                raise
        if work.is_completed():
            return
        if was_silent:
            raise RuntimeError("timed out: rank 0 is silent")
