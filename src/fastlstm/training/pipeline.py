"""A pipeline over processes: the passes of a step, chunk of time by chunk, stage by stage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from fastlstm.distributed.channel import Channel
from fastlstm.distributed.stages import bubble, bubble_of
from fastlstm.distributed.world import Order, World
from fastlstm.runs.events import Event

if TYPE_CHECKING:
    from fastlstm.training.state import Tensors, TrainingState


class Stage(Protocol):
    """What one process computes of a step: consecutive layers, of which it has the state.

    Attributes:
        num_chunks: K, of a step.
        boundary_dtype: of what passes from stage to stage.
    """

    num_chunks: int

    @property
    def boundary_dtype(self) -> torch.dtype: ...

    def owns(self, name: str) -> bool:
        """Returns whether the parameter of this name belongs to a layer of this stage."""
        ...

    def begin(self, batch: Any, step: int) -> Sequence[Sequence[int]]:
        """Begins a step; returns the shape of each chunk that passes from stage to stage."""
        ...

    def forward(self, chunk: int, received: Tensor | None) -> Tensor | None:
        """Runs a chunk; returns what the next stage receives, None in the last one."""
        ...

    def backward(self, chunk: int, gradient: Tensor | None) -> Tensor | None:
        """Returns the gradient of what `forward` received; that of weights is added to theirs."""
        ...

    def end(self) -> float:
        """Moves the carried state on; returns the mean loss, in the last stage."""
        ...


class Pipeline:
    """Runs the steps of a model whose layers are divided among processes.

    Every process runs the chunks of a step one after the other, each as soon as the stage before
    has sent it, and back in the opposite order. Only boundaries travel, and a few numbers for the
    norm of all gradients. Weights, gradients and the state of the optimizer are where their layer
    is; rank 0 gathers them to evaluate and to save.

    Args:
        stage: of this process.
        model: whole in every process; only the layers of the stage are kept up.
        world: the processes, one for each stage.

    Attributes:
        norm: of the gradients of all stages, in the newest step.
    """

    def __init__(self, stage: Stage, model: nn.Module, world: World) -> None:
        self._stage, self._model, self._world = stage, model, world
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._parameters = [p if stage.owns(name) else None for name, p in named]
        self._activations, self._gradients = Channel(world, 1), Channel(world, -1)
        self.norm = torch.tensor(0.0)
        self._is_apart = False
        self._last = (0.0, 0.0, 0)  # of this process's last step: seconds, of them waiting, bytes
        self._busy_s, self._wait_s = torch.zeros(2, world.size, dtype=torch.float64)
        self._num_steps, self._num_bytes = 0, 0.0

    def passes(self, batch: Any, step: int) -> float:
        """Leaves the gradient of the mean loss in the parameters; returns the mean loss."""
        started, waited = time.perf_counter(), self._waited()
        sent = self._sent()
        stage, forth, back = self._stage, self._activations, self._gradients
        shapes, dtype = stage.begin(batch, step), stage.boundary_dtype
        forth.expect(shapes, dtype)
        back.expect(shapes, dtype)
        for k in range(stage.num_chunks):
            if (passed := stage.forward(k, forth.received(k))) is not None:
                forth.send(k, passed)
        for k in reversed(range(stage.num_chunks)):
            if (passed := stage.backward(k, back.received(k))) is not None:
                back.send(k, passed)
        loss = stage.end()
        forth.flush()
        back.flush()
        wait_s = self._waited() - waited
        passed_s = time.perf_counter() - started
        loss = self._exchanged(loss, passed_s - wait_s)
        seconds = time.perf_counter() - started
        self._last = (seconds, seconds - passed_s + wait_s, self._sent() - sent)
        return loss

    def _waited(self) -> float:
        return self._activations.wait_s + self._gradients.wait_s

    def _sent(self) -> int:
        return self._activations.sent_bytes + self._gradients.sent_bytes

    def _exchanged(self, loss: float, busy_s: float) -> float:
        """Tells the others what this process found; returns the loss, and sets the norm.

        Every number is one process's and zero in the others, so sums round nothing. What a process
        waits here is told with the next step.
        """
        rank, size, report = self._world.rank, self._world.size, self._world.report(1)
        report.losses[0] = loss
        report.set_own(0, busy_s, 0, self._world.signal)
        norms = torch.zeros(len(self._parameters), dtype=torch.float64)
        own = [
            (place, p.grad)
            for place, p in enumerate(self._parameters)
            if p is not None and p.grad is not None
        ]
        lengths = torch._foreach_norm([gradient for _, gradient in own])
        norms[[place for place, _ in own]] = torch.stack(lengths).double()
        last = torch.zeros(3, size, dtype=torch.float64)
        last[:, rank] = torch.tensor(self._last)
        numbers = torch.cat([report.numbers, norms, last.flatten()])
        self._world.summed(numbers)
        told, norms, last = numbers.split([len(report.numbers), len(norms), 3 * size])
        report.numbers.copy_(told)
        self._world.received(report)
        self._count(last.view(3, size))
        self.norm = torch.linalg.vector_norm(norms.float())
        self._is_apart = True
        return report.loss

    def _count(self, last: Tensor) -> None:
        """Counts the step before this one, if it was not the first, which connects."""
        self._num_steps += 1
        if self._num_steps > 2:
            seconds, wait_s, sent = last
            self._busy_s += seconds - wait_s
            self._wait_s += wait_s
            self._num_bytes += float(sent.sum())

    # what is known of it ------------------------------------------------------------------------

    def idle(self) -> list[float]:
        """Returns the share of the passes that each rank has waited so far."""
        passes_s = (self._busy_s + self._wait_s).clamp(min=1e-9)
        return [float(share) for share in self._wait_s / passes_s]

    def summary(self) -> Event:
        """Returns how long processes waited, the mean of all, beside what was to be expected."""
        size, num_chunks = self._world.size, self._stage.num_chunks
        idle = self.idle()
        return {
            "chunks": num_chunks,
            "rank_idle": idle,
            "idle": sum(idle) / size,
            "idle_of_equal_stages": bubble(size, num_chunks),
            "idle_of_these_stages": bubble_of(self._busy_s.tolist(), num_chunks),
            "step_bytes": self._num_bytes / max(self._num_steps - 2, 1),
        }

    # weights ------------------------------------------------------------------------------------

    def gather(self, state: TrainingState) -> None:
        """Brings the weights, their averages and the optimizer's state to rank 0.

        Rank 0 calls it and tells the others to. It does nothing where no step was taken since.
        """
        if self._world.size == 1:
            return
        if self._world.is_leader:
            if not self._is_apart:
                return
            self._world.order(Order.GATHER)
        self._is_apart = False
        gathered = self._world.gathered(None if self._world.is_leader else self._own(state))
        self._take(gathered[1:], state)

    def _own(self, state: TrainingState) -> Tensors:
        groups: Tensors = {
            "model": dict(self._model.named_parameters()),
            "optimizer": state.optimizers.tensors(),
            "average": {} if state.average is None else state.average.tensors(),
        }
        return {
            stem: {
                name: tensor.detach()
                for name, tensor in group.items()
                if self._stage.owns(name.partition(":")[0])
            }
            for stem, group in groups.items()
        }

    @torch.no_grad()
    def _take(self, stages: Sequence[Tensors], state: TrainingState) -> None:
        """Takes in what the other stages have."""
        if not stages:
            return
        parameters = dict(self._model.named_parameters())
        optimizer: dict[str, Tensor] = state.optimizers.tensors()
        for tensors in stages:
            for name, value in tensors["model"].items():
                parameters[name].copy_(value)
            optimizer |= tensors["optimizer"]
            if state.average is not None:
                state.average.load(tensors["average"], state.average.updates)
        state.optimizers.load(optimizer)
