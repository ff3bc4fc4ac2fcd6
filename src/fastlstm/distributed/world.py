"""The processes that train one model together, as torchrun starts them."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastlstm.distributed.launch import is_started_by_torchrun
from fastlstm.distributed.reduction import TreeReduction
from fastlstm.errors import Dismissed, DistributedError, FastLSTMError, UsageError
from fastlstm.system import hardware

DEADLINE_S = 60.0
"""A process that does not answer for so long is lost."""
_PATIENCE = timedelta(days=7)
"""With rank 0 while it evaluates and writes."""
_PR_SET_PDEATHSIG = 1


class Order(IntEnum):
    """What rank 0 has all processes do next."""

    STEP = 1
    CAPTURE = 2
    RESTORE = 3
    RESET = 4
    SHARE = 5
    END = 6
    ABANDON = 7


@dataclass
class About:
    """What processes tell each other with the gradients of a step, in one vector of float64.

    Attributes:
        numbers: the vector; every place is written by one process and zero in the others.
        losses: of the shards, shape ``(S,)``.
        targets: that each process has, shape ``(W,)``.
        seconds: that its passes took, shape ``(W,)``.
    """

    numbers: Tensor
    losses: Tensor
    targets: Tensor
    seconds: Tensor
    rank: int

    @classmethod
    def empty(cls, num_shards: int, rank: int, size: int) -> About:
        numbers = torch.zeros(num_shards + 2 * size, dtype=torch.float64)
        return cls(numbers, *numbers.split([num_shards, size, size]), rank)

    def set_own(self, num_targets: int, seconds: float) -> None:
        self.targets[self.rank], self.seconds[self.rank] = num_targets, seconds

    @property
    def loss(self) -> float:
        """Sum over the shards, in their order."""
        return sum(self.losses.tolist())

    @property
    def num_targets(self) -> float:
        return sum(self.targets.tolist())


class World:
    """The processes of a run; of one process alone where nothing else is said.

    Rank 0 leads: it makes every choice that depends on time or files, shows progress and writes.
    The others are told what to do next (`Order`).

    Attributes:
        rank: of this process, from 0.
        size: number of processes.
        local_size: those on this machine.
        names: machine and process number of each rank.
        seconds: that the passes of the last step took on each rank.
    """

    def __init__(self, rank: int = 0, size: int = 1, local_size: int = 1) -> None:
        self.rank, self.size, self.local_size = rank, size, local_size
        self.names = ["this process"]
        self.seconds = [0.0] * size
        self.orders: dist.ProcessGroup | None = None

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def default_threads(self) -> int:
        """Returns the threads of each process: the cores of the machine, divided evenly."""
        return max(1, hardware.default_threads() // self.local_size)

    def order(self, order: Order, number: float = 0.0) -> None:
        """Tells the others what to do next, with a number that belongs to it."""
        if self.size > 1:
            self._tell(torch.tensor([float(order), number], dtype=torch.float64))

    def next_order(self) -> tuple[Order, float]:
        """Waits for what rank 0 says; raises Dismissed where it has ended the run by an error."""
        told, number = self._tell(torch.zeros(2, dtype=torch.float64)).tolist()
        if (order := Order(int(told))) == Order.ABANDON:
            raise Dismissed(int(number))
        return order, number

    def _tell(self, numbers: Tensor) -> Tensor:
        with self._named():
            dist.broadcast(numbers, 0, self.orders)
        return numbers

    def shared(self, value: Any = None) -> Any:
        """Returns what rank 0 gives; in the others the argument is not looked at."""
        if self.size == 1:
            return value
        if self.is_leader:
            self.order(Order.SHARE)
        elif (order := self.next_order()[0]) != Order.SHARE:
            raise AssertionError(f"rank 0 says {order.name}, expected a value")
        values = [value]
        with self._named():
            dist.broadcast_object_list(values, 0)
        return values[0]

    def gathered(self, value: Any) -> list[Any]:
        """Returns the value of every rank, in rank 0; an empty list in the others."""
        if self.size == 1:
            return [value]
        values = [None] * self.size if self.is_leader else None
        with self._named():
            dist.gather_object(value, values, 0)
        return list(values or ())

    def all_gathered(self, own: Tensor, lengths: list[int]) -> list[Tensor]:
        """Returns the vectors of all ranks, 1-d, of the lengths that all know."""
        padded = own.new_zeros(max(lengths))
        padded[: len(own)] = own
        whole = own.new_empty(self.size * len(padded))
        with self._named():
            # As bytes: gloo need not know the type.
            dist.all_gather_into_tensor(whole.view(torch.uint8), padded.view(torch.uint8))
        pieces = whole.split(len(padded))
        return [piece[:length] for piece, length in zip(pieces, lengths, strict=True)]

    def about(self, num_shards: int) -> About:
        """Returns a vector for what is told with the gradients."""
        return About.empty(num_shards, self.rank, self.size)

    def heard(self, about: About) -> None:
        """Takes in what all processes told."""
        self.seconds = about.seconds.tolist()

    def reduction(self, flat: Tensor) -> Callable[[Tensor], None]:
        """Returns what adds `flat`, 1-d float32, over all processes in place."""
        if self.size == 1:
            return lambda _: None
        reduce = TreeReduction(flat)

        def named(about: Tensor) -> None:
            with self._named():
                reduce(about)

        return named

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
        told = None if failure is None else (type(failure).__name__, str(failure), failure.exit_code)
        all_told: list[Any] = [None] * self.size
        with self._named():
            dist.all_gather_object(all_told, told)
        first = next((rank for rank, one in enumerate(all_told) if one is not None), None)
        if first is None:
            return
        if not self.is_leader:
            raise Dismissed(all_told[first][2])
        if failure is not None:
            raise failure
        raise UsageError(f"{self._name(first)}: {all_told[first][1]}")

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self.names[rank]})"

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Turns errors of the transport into one that says what to do."""
        try:
            yield
        except RuntimeError as error:
            raise DistributedError(
                f"rank {self.rank} lost the connection to another process"
                f" ({str(error).splitlines()[0][:200]}); torchrun starts all of them again where"
                " --max-restarts allows it, and the same command with --resume continues the run"
            ) from error


@contextmanager
def joined() -> Iterator[World]:
    """Joins the processes that torchrun started, for the length of the block."""
    if not is_started_by_torchrun() or dist.is_initialized():
        yield World()
        return
    die_with_parent()
    environment = {name: int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")}
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        timeout=timedelta(seconds=DEADLINE_S),
    )
    try:
        world = World(environment["RANK"], environment["WORLD_SIZE"], local_size)
        names: list[Any] = [None] * world.size
        dist.all_gather_object(names, f"{socket.gethostname()}, process {os.getpid()}")
        world.names = names
        world.orders = dist.new_group(timeout=_PATIENCE, backend="gloo")
        try:
            yield world
        except FastLSTMError as error:
            if world.is_leader and not isinstance(error, DistributedError):
                world.order(Order.ABANDON, error.exit_code)
            raise
    finally:
        dist.destroy_process_group()


def die_with_parent() -> None:
    """Has Linux kill this process when the agent that started it dies: none steps on alone."""
    if os.name == "posix" and hasattr(signal, "SIGKILL"):
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        except (OSError, AttributeError):
            return
        if os.getppid() == 1:  # it was dead before
            os._exit(128 + signal.SIGKILL)
