"""A language model whose layers are divided among processes, as in GPipe.

Unlike the stages of `torch.distributed.pipelining`, these processes exchange no pickled
descriptions, and the parts of a batch may differ in size.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from fastlstm.distributed.world import Share, World
from fastlstm.errors import ConfigError
from fastlstm.runs.events import Event
from fastlstm.text.config import ModelConfig, TrainConfig
from fastlstm.text.data.lanes import Batch
from fastlstm.text.model import State, reset_state
from fastlstm.text.task import TextTask
from fastlstm.training.precision import autocast
from fastlstm.training.stepper import draw_anew
from fastlstm.training.task import even_parts

if TYPE_CHECKING:
    from fastlstm.training.plan import TrainingPlan
    from fastlstm.training.state import TrainingState


@dataclass(eq=False)
class PipelinedTextTask(TextTask):
    """The layers of one process; parts of a batch's rows pass through the layers of all processes.

    Weights, gradients and optimizer state are in the process of their layer; they are gathered to
    evaluate and to save. `norm` is the gradient norm over all processes in the newest step.
    """

    is_pipelined = True
    world: World = field(kw_only=True)
    norm: Tensor = field(default_factory=lambda: torch.tensor(0.0), init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        config = self.model.config
        self._layers = layers_of(config, self.world.size)[self.world.rank]
        # Kernels give bf16 only where nothing follows them.
        is_wide = config.output_norm or (config.residual and config.embed_size == config.rnn_size)
        is_bf16 = self.config.precision == "bf16" and not is_wide
        self._dtype, self._is_apart = torch.bfloat16 if is_bf16 else torch.float32, False

    def passes(self, batch: Batch, plan: TrainingPlan, step: int) -> float:
        """Leaves the gradient of the mean loss in the parameters; returns the mean loss."""
        started, world = time.perf_counter(), self.world
        begin = reset_state(self._state, batch.reset)
        draw_anew(plan, step)
        parts, works, waited_s, loss = [], [], 0.0, 0.0
        with world.naming():
            for rows in even_parts(self.num_rows(batch), self.config.pipeline):
                received = None
                if world.rank > 0:
                    received, seconds = self._received(batch, rows, world.rank - 1)
                    received.requires_grad_()
                    waited_s += seconds
                output, ends = self._forward(batch, rows, begin, received)
                if world.rank + 1 < world.size:
                    works.append(_sent(output.detach(), world.rank + 1))
                else:
                    loss += float(output.detach())
                parts.append((rows, received, output, ends))
            for rows, received, output, _ in parts:
                gradient = None
                if world.rank + 1 < world.size:
                    gradient, seconds = self._received(batch, rows, world.rank + 1)
                    waited_s += seconds
                output.backward(gradient)
                if received is not None and received.grad is not None:
                    works.append(_sent(received.grad, world.rank - 1))
            for work, _ in works:
                work.wait()
        for place, k in enumerate(self._layers):
            for axis, whole in enumerate(self._state):
                whole[k] = torch.cat([ends[place][axis] for *_, ends in parts])
        self._is_apart = True
        return self._told(loss, time.perf_counter() - started - waited_s)

    def _forward(
        self, batch: Batch, rows: slice, begin: State, received: Tensor | None
    ) -> tuple[Tensor, list[State]]:
        """Returns what the next process receives (the loss in the last process), and new states."""
        hidden, cell = (tensor[:, rows].contiguous() for tensor in begin)
        x, ends = batch.x[:, rows] if received is None else received, list[State]()
        with autocast(self.config.precision, self.device):
            for k in self._layers:
                x, h, c = self.model.run_layer(k, x, hidden[k], cell[k])
                ends.append((h.detach(), c.detach()))
            if self._layers.stop < self.model.config.num_layers:
                return x.to(self._dtype), ends
            loss = self.model.features_loss(self.model.projected(x), batch.y[:, rows])
            return loss / batch.y.numel(), ends

    def _received(self, batch: Batch, rows: slice, rank: int) -> tuple[Tensor, float]:
        """Waits for what a rank sends for some rows; returns that and the seconds waited."""
        shape = (len(batch.x), rows.stop - rows.start, self.model.config.rnn_size)
        into, started = torch.empty(shape, dtype=self._dtype), time.perf_counter()
        dist.recv(into, rank)
        return into, time.perf_counter() - started

    def _told(self, loss: float, seconds: float) -> float:
        """Tells the others what this process found; returns the loss, and sets the norm."""
        own = [p.grad for p in self.model.parameters() if p.grad is not None]
        told = torch.zeros(2 + self.world.size, dtype=torch.float64)
        told[0], told[1] = loss, torch.nn.utils.get_total_norm(own).double() ** 2
        told[2 + self.world.rank] = seconds
        self.world.heard(self.world.summed(told)[2:])
        self.norm = told[1].sqrt().float()
        return float(told[0])

    def gather(self, state: TrainingState) -> None:
        """Brings all weights, their averages and the carried state to every process, if a step was
        taken since the last time."""
        if not self._is_apart:
            return
        self._is_apart, average = False, state.average
        averages = {} if average is None else average.tensors()
        with self.world.naming():
            for name, parameter in self.model.named_parameters():
                for tensor in (parameter, averages.get(name)):
                    if tensor is not None:
                        dist.broadcast(tensor.detach(), self._owner(name))
            for whole in self._state:
                for k, of_layer in enumerate(whole):
                    dist.broadcast(of_layer, self._owner(f"layers.{k}"))

    def optimizer_tensors(self, state: TrainingState) -> dict[str, Tensor]:
        own = {
            name: tensor
            for name, tensor in state.optimizers.tensors().items()
            if self._owner(name.partition(":")[0]) == self.world.rank
        }
        parts = self.world.gathered_tensors(own)
        return {name: tensor for part in parts for name, tensor in part.items()}

    def _owner(self, name: str) -> int:
        """Returns the rank that trains the parameter of this name."""
        kind, _, rest = name.partition(".")
        if kind not in ("layers", "norms"):
            return 0 if kind == "embedding" else self.world.size - 1
        layer, stages = int(rest.partition(".")[0]), layers_of(self.model.config, self.world.size)
        return next(rank for rank, layers in enumerate(stages) if layer in layers)


def _sent(tensor: Tensor, rank: int) -> tuple[dist.Work, Tensor]:
    """Begins to send a tensor; returns the tensor too, to keep it until it is sent."""
    kept = tensor.contiguous()
    work = dist.isend(kept, rank)
    assert work is not None
    return work, kept


def layers_of(config: ModelConfig, num_stages: int) -> list[range]:
    """Returns the layers of each process, in nearly equal numbers."""
    layers = range(config.num_layers)
    return [layers[Share(rank, num_stages).rows(config.num_layers)] for rank in range(num_stages)]


def check_pipeline(
    config: TrainConfig, num_layers: int, device: torch.device, world: World
) -> tuple[str, ...]:
    """Returns a note on the cost of splitting the layers over processes; raises ConfigError if a
    pipeline cannot use this device, batch or number of processes."""
    if not config.pipeline:
        return ()
    stages, parts, rows, why = world.size, config.pipeline, config.batch_size, ""
    if device.type != "cpu":
        why = f"runs on CPUs, not on {device}; give `device='cpu'`"
    elif num_layers < stages:
        why = (
            f"{stages} processes need at least {stages} layers, the model has {num_layers}; give"
            f" `num_layers={stages!r}` or more, or start fewer processes"
        )
    elif rows < parts:
        why = f"a batch of {rows} rows cannot be cut into {parts} parts; give `pipeline={rows!r}`"
        why += " or less"
    if why:
        raise ConfigError(f"`pipeline={parts!r}`: {why}")
    if stages == 1:
        return ("pipeline: it has no effect with one process",)
    return (
        f"pipeline: {parts} parts of a batch: if stages are equal, processes wait"
        f" {(stages - 1) / (parts + stages - 1):.1%} of the passes",
    )


def stage_names(config: TrainConfig, model: ModelConfig, world: World) -> Event:
    """Returns the `stages` of a start event: the layers of each process, if it is a pipeline."""
    if not config.pipeline or world.size == 1:
        return {}
    stages = [(s.start + 1, s.stop) for s in layers_of(model, world.size)]
    return {"stages": [f"{a}" if a == b else f"{a}-{b}" for a, b in stages]}
