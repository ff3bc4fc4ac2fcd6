"""A language model whose layers are divided among processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastlstm.distributed.share import Share
from fastlstm.distributed.world import World
from fastlstm.errors import ConfigError, Setting
from fastlstm.runs.events import Event
from fastlstm.text.config import ModelConfig, TrainConfig
from fastlstm.text.data.lanes import Batch
from fastlstm.text.model import reset_state
from fastlstm.text.task import TextTask
from fastlstm.training.precision import autocast


@dataclass(eq=False)
class PipelinedTextTask(TextTask):
    """The layers of one process; a `Stage` of `Pipeline`.

    Attributes:
        world: the processes.
    """

    is_pipelined = True
    world: World = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        config, self.num_parts = self.model.config, self.config.pipeline
        self._layers = layers_of(config, self.world.size)[self.world.rank]
        # Kernels give bf16 only where nothing follows them.
        is_wide = config.output_norm or (config.residual and config.embed_size == config.rnn_size)
        is_bf16 = self.config.precision == "bf16" and not is_wide
        self._dtype = torch.bfloat16 if is_bf16 else torch.float32
        self._ends = list[list[tuple[Tensor, Tensor]]]()
        self._begin = self._state

    def owner(self, name: str) -> int:
        kind, _, rest = name.partition(".")
        if kind not in ("layers", "norms"):
            return 0 if kind == "embedding" else self.world.size - 1
        return _owner(int(rest.partition(".")[0]), self.model.config, self.world.size)

    def boundary(self, batch: Batch, part: slice) -> Tensor:
        shape = (len(batch.x), part.stop - part.start, self.model.config.rnn_size)
        return torch.empty(shape, dtype=self._dtype)

    def forward(self, batch: Batch, part: slice, received: Tensor | None) -> Tensor:
        if not self._ends:
            self._begin = reset_state(self._state, batch.reset)
        hidden, cell = (tensor[:, part].contiguous() for tensor in self._begin)
        x, ends = batch.x[:, part] if received is None else received, []
        with autocast(self.config.precision, self.device):
            for k in self._layers:
                x, h, c = self.model.run_layer(k, x, hidden[k], cell[k])
                ends.append((h.detach(), c.detach()))
            self._ends.append(ends)
            if self._layers.stop < self.model.config.num_layers:
                return x.to(self._dtype)
            loss = self.model.features_loss(self.model.projected(x), batch.y[:, part])
            return loss / batch.y.numel()

    def end_passes(self) -> None:
        for place, k in enumerate(self._layers):
            for axis, whole in enumerate(self._state):
                whole[k] = torch.cat([ends[place][axis] for ends in self._ends])
        self._ends.clear()

    def gather_carried(self) -> None:
        for whole in self._state:
            for k, of_layer in enumerate(whole):
                dist.broadcast(of_layer, _owner(k, self.model.config, self.world.size))


def layers_of(config: ModelConfig, num_stages: int) -> list[range]:
    """Returns the layers of each process, nearly equal numbers."""
    layers = range(config.num_layers)
    return [layers[Share(rank, num_stages).rows(config.num_layers)] for rank in range(num_stages)]


def _owner(layer: int, config: ModelConfig, num_stages: int) -> int:
    return next(r for r, layers in enumerate(layers_of(config, num_stages)) if layer in layers)


def text_task(world: World, config: TrainConfig, **parts: Any) -> TextTask:
    """Returns what a process trains; `parts` are the other fields of `TextTask`."""
    if config.pipeline and world.size > 1:
        return PipelinedTextTask(config=config, world=world, **parts)
    return TextTask(config=config, **parts)


def check_pipeline(
    config: TrainConfig, num_layers: int, device: torch.device, num_processes: int
) -> None:
    """Raises ConfigError where this device, batch or number of processes has no pipeline."""
    if not config.pipeline:
        return
    if device.type != "cpu":
        raise ConfigError(
            Setting("pipeline", config.pipeline), f": runs on CPUs, not on {device}; give ",
            Setting("device", "cpu"),
        )  # fmt: skip
    if num_layers < num_processes:
        raise ConfigError(
            Setting("pipeline", config.pipeline), f": {num_processes} processes need at least"
            f" {num_processes} layers, the model has {num_layers}; give ",
            Setting("num_layers", num_processes), " or more, or start fewer processes",
        )  # fmt: skip
    if config.batch_size < config.pipeline:
        raise ConfigError(
            Setting("pipeline", config.pipeline), f": a batch of {config.batch_size} rows cannot be"
            f" cut into {config.pipeline} parts; give ",
            Setting("pipeline", config.batch_size), " or less",
        )  # fmt: skip


def pipeline_notes(config: TrainConfig, world: World) -> tuple[str, ...]:
    """Returns a note about what dividing the layers costs."""
    if not config.pipeline:
        return ()
    if world.size == 1:
        return ("pipeline: it has no effect with one process",)
    stages, parts = world.size, config.pipeline
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
