"""The processes that train one model together, over `torch.distributed`.

Every process runs the same program on its own rows. Rank 0 alone reads clocks, shows progress and
writes; what it decides by them it broadcasts. Objects travel as JSON and safetensors: nothing that
another process sent is unpickled.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from fastlstm.distributed.share import Share
from fastlstm.errors import Dismissed, FastLSTMError, LostProcessError, UsageError
from fastlstm.system import hardware

DEADLINE = timedelta(minutes=5)
"""A process that does not answer for so long is lost."""
PATIENCE = timedelta(days=7)
"""With rank 0 before and after training."""
_ERROR_SAID_S = 2.0
_SETTLED, _SLOW = 30, 1.4
"""Steps before a rank is said to be slow; times the median of the ranks, from which it is."""
_TRANSPORT = ("gloo", "NCCL", "onnection", "imed out")
"""One of these words is in every error of the transport."""


class World:
    """The processes of a run; one process alone by default.

    Attributes:
        rank: of this process, from 0.
        size: number of processes.
        attempt: how often the processes were started again.
        num_machines: on which they are.
        threads: of each process by default: its part of the cores of its machine.
        names: machine and process number of each rank.
        seconds: of the passes of a step on each rank, running means.
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
        """The rows of this process."""
        return Share(self.rank, self.size)

    def default_threads(self) -> int:
        """Returns the threads of this process if nothing else is asked for.

        In several processes the OMP_NUM_THREADS of 1 that torchrun sets would leave cores idle.
        """
        return hardware.default_threads() if self.size == 1 else self.threads

    # numbers and tensors ------------------------------------------------------------------------

    def decided(self, *numbers: float) -> list[float]:
        """Returns the numbers of rank 0, in every process."""
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
        """Takes in the seconds of the passes of a step on each rank."""
        passed = zip(self.seconds, seconds.tolist(), strict=True)
        self.seconds = [0.98 * before + 0.02 * now if before else now for before, now in passed]
        self._num_heard += 1

    def straggler(self) -> str | None:
        """Returns a line about the rank that the others wait for, if there is one."""
        usual, slowest = statistics.median(self.seconds), max(self.seconds)
        if self._num_heard < _SETTLED or self.size == 1 or slowest < _SLOW * usual:
            return None
        name = self.name_of(self.seconds.index(slowest))
        return f"{name} takes {slowest / usual:.1f} times as long as the others: all wait for it"

    # objects ------------------------------------------------------------------------------------

    def told(self, value: Any = None) -> Any:
        """Returns the value of rank 0, which JSON can hold, in every process."""
        return value if self.size == 1 else json.loads(self._broadcast(json.dumps(value).encode()))

    def told_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors of rank 0, on the CPU, in every process."""
        if self.size == 1:
            return dict(tensors)
        return safetensors.torch.load(self._broadcast(_packed(tensors) if self.is_leader else b""))

    def gathered(self, value: Any) -> list[Any]:
        """Returns the value of every rank, which JSON can hold, in every process."""
        if self.size == 1:
            return [value]
        return [json.loads(part) for part in self._gather(json.dumps(value).encode())]

    def gathered_tensors(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Returns the tensors of every rank, on the CPU, in every process."""
        if self.size == 1:
            return [dict(tensors)]
        return [safetensors.torch.load(part) for part in self._gather(_packed(tensors))]

    def _broadcast(self, data: bytes) -> bytes:
        """Returns the bytes of rank 0; waits for it as long as it is there."""
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
        sizes = lengths.tolist()
        return [part[:n].numpy().tobytes() for part, n in zip(parts, sizes, strict=True)]

    # errors -------------------------------------------------------------------------------------

    @contextmanager
    def together(self) -> Iterator[None]:
        """Runs the block in rank 0, then in the others; where it fails in one, none goes on.

        Raises:
            FastLSTMError: in rank 0, its own error or the first other rank's.
            Dismissed: in the others.
        """
        failure: FastLSTMError | None = None
        if not self.is_leader:  # what rank 0 has prepared is in the cache then
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
        """Raises the first error that was told."""
        for rank, text, code in filter(None, told):
            if not self.is_leader:
                raise Dismissed(code)
            raise UsageError(f"{self.name_of(rank)}: {text}")

    @contextmanager
    def saying_errors(self) -> Iterator[None]:
        """Has one process say the error that ends the run, rank 0 where it has it too.

        Raises:
            Dismissed: another process says it.
        """
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
        """Returns the exit code of the error that a process says in so many seconds, or None."""
        try:
            if self.store is None or (seconds == 0.0 and not self.store.check(["error"])):
                return None
            self.store.wait(["error"], timedelta(seconds=max(seconds, 0.1)))
            return int(self.store.get("error"))
        except RuntimeError:  # nobody, or the store is gone
            return None

    def name_of(self, rank: int) -> str:
        return f"rank {rank} ({self.names[rank]})"

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Turns errors of the transport into one that says what to do."""
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


def _packed(tensors: Mapping[str, Tensor]) -> bytes:
    own = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    data: bytes = safetensors.torch.save(own)
    return data
