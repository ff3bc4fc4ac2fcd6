"""The processes that train one model together, over `torch.distributed`.

Every process runs the same program on its own rows. Only rank 0 reads clocks, shows progress and
writes; it broadcasts its decisions. Objects travel as JSON and safetensors, never as pickles.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from fastlstm.errors import Dismissed, FastLSTMError, LostProcessError, UsageError
from fastlstm.system import hardware
from fastlstm.system.tensors import encode_tensors

DEADLINE = timedelta(minutes=5)
"""A process that does not answer for so long is lost."""
PATIENCE = timedelta(days=7)
"""The same limit for rank 0 before and after training."""
_ERROR_SAID_S = 2.0
_SETTLED, _SLOW = 30, 1.4
"""Least steps before a rank counts as slow, and its least time over the median of all ranks."""
_TRANSPORT = ("gloo", "NCCL", "onnection", "imed out")
"""Every error of the transport contains one of these."""


@dataclass(frozen=True)
class Share:
    """Consecutive rows of every batch: part `rank`, from 0, of `size` nearly equal ones."""

    rank: int = 0
    size: int = 1

    def rows(self, num_rows: int) -> slice:
        """Returns this part's rows in a batch of `num_rows`; there may be none in a small batch."""
        return slice(num_rows * self.rank // self.size, num_rows * (self.rank + 1) // self.size)


class World:
    """The processes of a run; by default one.

    Attributes:
        rank: number of this process, from 0.
        size: number of processes.
        attempt: how often the processes were restarted.
        num_machines: number of machines.
        threads: default number of threads: this process's part of the machine's cores.
        names: machine and process number of each rank.
        seconds: running means of the time of a step's passes on each rank.
    """

    def __init__(self, rank: int = 0, size: int = 1, attempt: int = 0) -> None:
        self.rank, self.size, self.attempt = rank, size, attempt
        self.num_machines = self.threads = 1
        self.names = ["this process"]
        self.seconds, self._num_heard = [0.0] * size, 0
        self.store: Store | None = None
        self.patient: dist.ProcessGroup | None = None

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @property
    def share(self) -> Share:
        return Share(self.rank, self.size)

    def default_threads(self) -> int:
        """Returns the default threads of this process, not torchrun's OMP_NUM_THREADS=1."""
        return hardware.default_threads() if self.size == 1 else self.threads

    def decided(self, *numbers: float) -> list[float]:
        """Returns the numbers of rank 0 in every process."""
        if self.size == 1:
            return list(numbers)
        told = torch.tensor(numbers, dtype=torch.float64)
        with self.naming():
            dist.broadcast(told, 0)
        return told.tolist()

    def summed(self, numbers: Tensor) -> Tensor:
        """Adds a tensor over all processes, in place."""
        if self.size > 1:
            with self.naming():
                dist.all_reduce(numbers)
        return numbers

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Gives all processes the tensors of rank 0, in place."""
        if self.size > 1:
            with self.naming():
                for tensor in tensors:
                    dist.broadcast(tensor.detach(), 0)

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Moves tensors to their mean over all processes, in place."""
        from torch.distributed.algorithms.model_averaging.utils import average_parameters

        with self.naming():
            average_parameters(iter(tensors), None)  # type: ignore[arg-type]

    def heard(self, seconds: Tensor) -> None:
        """Records the seconds of a step's passes on each rank."""
        passed = zip(self.seconds, seconds.tolist(), strict=True)
        self.seconds = [0.98 * before + 0.02 * now if before else now for before, now in passed]
        self._num_heard += 1

    def straggler(self) -> str | None:
        """Returns a message about the rank that the others wait for, or None."""
        usual, slowest = statistics.median(self.seconds), max(self.seconds)
        if self._num_heard < _SETTLED or self.size == 1 or slowest < _SLOW * usual:
            return None
        name = self.name_of(self.seconds.index(slowest))
        return f"{name} takes {slowest / usual:.1f} times as long as the others: all wait for it"

    def told(self, value: Any = None) -> Any:
        """Returns the JSON value of rank 0 in every process."""
        return value if self.size == 1 else json.loads(self._broadcast(json.dumps(value).encode()))

    def told_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors of rank 0 in every process, on the CPU."""
        if self.size == 1:
            return dict(tensors)
        own = encode_tensors(tensors) if self.is_leader else b""
        return safetensors.torch.load(self._broadcast(own))

    def gathered(self, value: Any) -> list[Any]:
        """Returns the JSON values of all ranks in every process."""
        if self.size == 1:
            return [value]
        return [json.loads(part) for part in self._gather(json.dumps(value).encode())]

    def gathered_tensors(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Returns the tensors of all ranks in every process, on the CPU."""
        if self.size == 1:
            return [dict(tensors)]
        return [safetensors.torch.load(part) for part in self._gather(encode_tensors(tensors))]

    def _broadcast(self, data: bytes) -> bytes:
        """Returns the bytes of rank 0, however long it works before."""
        with self.naming():
            length = torch.tensor([len(data)])
            dist.broadcast(length, 0, self.patient)
            own = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
            told = own if self.is_leader else torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(told, 0, self.patient)
        return told.numpy().tobytes()

    def _gather(self, data: bytes) -> list[bytes]:
        with self.naming():
            lengths = torch.zeros(self.size, dtype=torch.int64)
            lengths[self.rank] = len(data)
            dist.all_reduce(lengths, group=self.patient)
            own = torch.zeros(int(lengths.max()), dtype=torch.uint8)
            own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            parts = [torch.empty_like(own) for _ in range(self.size)]
            dist.all_gather(parts, own, self.patient)
        return [part[:n].numpy().tobytes() for part, n in zip(parts, lengths.tolist(), strict=True)]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Runs the block in rank 0, then in the others; if one fails, all stop. Rank 0 raises its
        own FastLSTMError, or the first one of the others; these raise Dismissed."""
        failure: FastLSTMError | None = None
        if not self.is_leader:  # rank 0 first: it fills the cache
            self._require_none([self.told()])
        try:
            yield
        except FastLSTMError as error:
            if self.size == 1:
                raise
            failure = error
        told = None if failure is None else [self.rank, str(failure), failure.exit_code]
        if self.is_leader and self.told(told) is not None and failure is not None:
            raise failure
        self._require_none(self.gathered(told))

    def _require_none(self, told: list[Any]) -> None:
        """Raises the first of the errors, each None or (rank, text, exit code)."""
        for rank, text, code in filter(None, told):
            if not self.is_leader:
                raise Dismissed(code)
            raise UsageError(f"{self.name_of(rank)}: {text}")

    @contextmanager
    def saying_errors(self) -> Iterator[None]:
        """Has one process report the error that ends the run, preferably rank 0; the others raise
        Dismissed."""
        try:
            yield
        except Dismissed:
            raise
        except FastLSTMError as error:
            is_lost = isinstance(error, LostProcessError)
            code = self._said(0.0 if self.is_leader else _ERROR_SAID_S)
            if code is not None and (is_lost or not self.is_leader):
                raise Dismissed(code) from error
            if not is_lost and self.store is not None:
                self.store.set("error", str(error.exit_code))
            error.is_of_one_rank = not self.is_leader
            raise

    def _said(self, seconds: float) -> int | None:
        """Returns the exit code of the error that a process reports within the seconds, or None."""
        try:
            if self.store is None or (seconds == 0.0 and not self.store.check(["error"])):
                return None
            self.store.wait(["error"], timedelta(seconds=max(seconds, 0.1)))
            return int(self.store.get("error"))
        except RuntimeError:  # none, or the store is gone
            return None

    def name_of(self, rank: int) -> str:
        return f"rank {rank} ({self.names[rank]})"

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Turns errors of the transport into LostProcessError."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not any(word in str(error) for word in _TRANSPORT):
                raise
            name = self.name_of(1 - self.rank) if self.size == 2 else "another process"
            is_silent = "imed out" in str(error)
            what = f"has not answered for {DEADLINE.seconds} s" if is_silent else "exited"
            raise LostProcessError(
                f"{name} {what}, reported by rank {self.rank}; all processes stop here. fastlstm"
                " train --nproc restarts them, torchrun as often as --max-restarts allows; else the"
                " same command with --resume continues the run"
            ) from error
