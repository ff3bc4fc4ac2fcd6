"""A pipeline over processes: each has some layers, and parts of the rows pass through them (GPipe).

The stages of `torch.distributed.pipelining` exchange pickled descriptions and need parts of one
size; these sends and receives do not.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fastlstm.training.data_parallel import draw_anew
from fastlstm.training.task import even_parts

if TYPE_CHECKING:
    from fastlstm.training.state import Tensors
    from fastlstm.training.trainer import Trainer


class Stage(Protocol):
    """The task of one process of a pipeline: consecutive layers, of which it has the state.

    Attributes:
        num_parts: of the rows of a batch.
    """

    num_parts: int

    def owner(self, name: str) -> int:
        """Returns the rank that trains the parameter of this name."""
        ...

    def boundary(self, batch: Any, part: slice) -> Tensor:
        """Returns an empty tensor for what some rows pass from stage to stage."""
        ...

    def forward(self, batch: Any, part: slice, received: Tensor | None) -> Tensor:
        """Runs some rows; returns what the next stage receives, in the last one the loss."""
        ...

    def end_passes(self) -> None:
        """Moves the carried state on."""
        ...

    def gather_carried(self) -> None:
        """Brings the carried state of all layers to every process."""
        ...


class Pipeline:
    """Runs the steps of a model whose layers are divided among processes.

    Weights, gradients and the state of the optimizer are where their layer is; they are gathered to
    evaluate and to save.

    Args:
        trainer: whose task is a `Stage`.

    Attributes:
        norm: of the gradients of all stages, in the newest step.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._world = trainer, trainer.world
        task: Any = trainer.task
        self._stage: Stage = task
        self.norm, self._is_apart = torch.tensor(0.0), False

    def passes(self, batch: Any) -> float:
        """Leaves the gradient of the mean loss in the parameters; returns the mean loss."""
        started, world, trainer = time.perf_counter(), self._world, self._trainer
        draw_anew(trainer)
        parts = even_parts(trainer.task.num_rows(batch), self._stage.num_parts)
        runs, works, waited_s, loss = list[tuple[Tensor | None, Tensor]](), [], 0.0, 0.0
        before, after = world.rank - 1, world.rank + 1
        with world.naming():
            for part in parts:
                received = None
                if before >= 0:
                    received, seconds = _received(self._stage.boundary(batch, part), before)
                    received.requires_grad_()
                    waited_s += seconds
                output = self._stage.forward(batch, part, received)
                if after < world.size:
                    works.append(_sent(output.detach(), after))
                else:
                    loss += float(output.detach())
                runs.append((received, output))
            for part, (received, output) in zip(parts, runs, strict=True):
                gradient = None
                if after < world.size:
                    gradient, seconds = _received(self._stage.boundary(batch, part), after)
                    waited_s += seconds
                output.backward(gradient)
                if received is not None and received.grad is not None:
                    works.append(_sent(received.grad, before))
            for work, _ in works:
                work.wait()
        self._stage.end_passes()
        self._is_apart = True
        return self._told(loss, time.perf_counter() - started - waited_s)

    def _told(self, loss: float, seconds: float) -> float:
        """Tells the others what this process found; returns the loss, and sets the norm."""
        world = self._world
        own = [p.grad for p in self._trainer.model.parameters() if p.grad is not None]
        told = torch.zeros(2 + world.size, dtype=torch.float64)
        told[0], told[1] = loss, torch.nn.utils.get_total_norm(own).double() ** 2
        told[2 + world.rank] = seconds
        world.heard(world.summed(told)[2:])
        self.norm = told[1].sqrt().float()
        return float(told[0])

    def gather(self) -> None:
        """Brings the weights of all stages, their averages and the carried state to every process,
        where a step was taken since."""
        if not self._is_apart:
            return
        self._is_apart, average = False, self._trainer.state.average
        averages = {} if average is None else average.tensors()
        with self._world.naming():
            for name, parameter in self._trainer.model.named_parameters():
                for tensor in (parameter, averages.get(name)):
                    if tensor is not None:
                        dist.broadcast(tensor.detach(), self._stage.owner(name))
            self._stage.gather_carried()

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Returns the state of the optimizers of all stages."""
        every: Tensors = {"own": self._trainer.optimizers.tensors()}
        own = {
            name: tensor
            for name, tensor in every["own"].items()
            if self._stage.owner(name.partition(":")[0]) == self._world.rank
        }
        parts = self._world.gathered_tensors(own)
        return {name: tensor for part in parts for name, tensor in part.items()}


def _sent(tensor: Tensor, rank: int) -> tuple[dist.Work, Tensor]:
    """Begins to send a tensor, which is kept until then."""
    kept = tensor.contiguous()
    work = dist.isend(kept, rank)
    assert work is not None
    return work, kept


def _received(into: Tensor, rank: int) -> tuple[Tensor, float]:
    """Waits for a tensor; returns it, and the seconds."""
    started = time.perf_counter()
    dist.recv(into, rank)
    return into, time.perf_counter() - started
