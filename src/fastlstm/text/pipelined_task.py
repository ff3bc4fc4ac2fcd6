"""A language model in a pipeline: the layers of one process, chunk of time by chunk."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlstm.distributed.shards import shard_seed
from fastlstm.distributed.stages import boundary_bytes, bubble, divided
from fastlstm.distributed.world import World
from fastlstm.errors import ConfigError
from fastlstm.runs.events import Event
from fastlstm.text.config import ModelConfig, TrainConfig
from fastlstm.text.data.lanes import Batch
from fastlstm.text.model import reset_state
from fastlstm.text.task import TextTask
from fastlstm.text.token_cost import layer_flop_per_token, output_flop_per_token
from fastlstm.training.pipeline import Pipeline
from fastlstm.training.precision import autocast
from fastlstm.training.trainer import Trainer


class _Chunk(NamedTuple):
    """What the backward pass of a chunk needs.

    Attributes:
        x: tokens, or what was received.
        begins: h and c of every layer before it, each `(B, H)`.
        output: what was sent, or the loss.
        ends: h and c of every layer after it.
    """

    x: Tensor
    begins: list[Tensor]
    output: Tensor
    ends: list[Tensor]


@dataclass(eq=False)
class PipelinedTextTask(TextTask):
    """A language model of which this process trains some layers (`training.pipeline.Stage`).

    A step's sequence is cut into chunks of time. The state goes from chunk to chunk, its gradient
    back; weights add the gradients of all chunks, the last one first. The random numbers of a layer
    follow from the seed, the step and its number, so that a sequence has one dropout mask, whoever
    runs it.

    Attributes:
        world: the processes, one for each stage.
        layers: those of this process.
    """

    world: World = field(default_factory=World)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_chunks = self.config.pipeline
        self.step_units /= self.world.size  # scored by one process, trained by all
        self.layers = stages_of(self.model.config, self.world.size)[self.world.rank]
        self._is_first = self.world.is_leader
        self._is_last = self.world.rank == self.world.size - 1
        self.row_axis = {"h": 0, "c": 0}  # type: ignore[misc]  # ranks have layers, not rows
        self.pipeline = Pipeline(self, self.model, self.world)
        self._chunks = list[_Chunk]()
        self._new_state = self._state

    @property
    def boundary_dtype(self) -> torch.dtype:
        return boundary_dtype(self.model.config, self.config.precision)

    def owns(self, name: str) -> bool:
        part, _, rest = name.partition(".")
        if part in ("layers", "norms"):
            return int(rest.partition(".")[0]) in self.layers
        return self._is_first if part == "embedding" else self._is_last

    # one step -----------------------------------------------------------------------------------

    def begin(self, batch: Batch, step: int) -> list[tuple[int, ...]]:
        self._step, self._loss, self._count = step, 0.0, batch.y.numel()
        self._tokens = batch.x.tensor_split(self.num_chunks)
        self._targets = batch.y.tensor_split(self.num_chunks)
        self._new_state = reset_state(self._state, batch.reset)
        self._ends = list(
            itertools.chain(*((self._new_state[0][k], self._new_state[1][k]) for k in self.layers))
        )
        self._chunks, self._end_gradients = [], list[Tensor | None]()
        H = self.model.config.rnn_size
        return [(*tokens.shape, H) for tokens in self._tokens]

    def forward(self, chunk: int, received: Tensor | None) -> Tensor | None:
        x = self._tokens[chunk] if received is None else received.requires_grad_()
        begins = [t.detach().requires_grad_(chunk > 0) for t in self._ends]
        y, ends = x, list[Tensor]()
        with autocast(self.config.precision, self.device):
            for place, k in enumerate(self.layers):
                # The same in every chunk: a mask belongs to the sequence.
                torch.default_generator.manual_seed(shard_seed(self.config.seed, self._step, k))
                y, h, c = self.model.run_layer(k, y, begins[2 * place], begins[2 * place + 1])
                ends += [h, c]
            if self._is_last:
                loss = self.model.features_loss(self.model.projected(y), self._targets[chunk])
                y = loss / self._count
                self._loss += float(y.detach())
        self._ends = [t.float() for t in ends]
        self._chunks.append(_Chunk(x, begins, y, self._ends))
        return None if self._is_last else y

    def backward(self, chunk: int, gradient: Tensor | None) -> Tensor | None:
        done = self._chunks.pop()
        outputs, gradients = [done.output], [gradient]
        if self._end_gradients:
            outputs += done.ends
            gradients += self._end_gradients
        torch.autograd.backward(outputs, gradients)
        self._end_gradients = [t.grad for t in done.begins]
        return done.x.grad

    def end(self) -> float:
        for axis, whole in enumerate(self._new_state):
            for place, k in enumerate(self.layers):
                whole[k] = self._ends[2 * place + axis].detach()
        self._state = self._new_state
        self._ends.clear()
        return self._loss

    # state --------------------------------------------------------------------------------------

    def carried(self) -> dict[str, Tensor]:
        """Returns the state of the own layers."""
        return {name: self._of_own(tensor) for name, tensor in super().carried().items()}

    def restore_carried(self, carried: Mapping[str, Tensor]) -> None:
        """Puts the own layers' part of the state of all layers back."""
        super().restore_carried({name: self._of_own(tensor) for name, tensor in carried.items()})

    def _of_own(self, tensor: Tensor) -> Tensor:
        return tensor[self.layers.start : self.layers.stop]

    # what is told of it -------------------------------------------------------------------------

    def step_metrics(self, loss: float) -> Event:
        assert self.pipeline is not None
        idle = {"rank_idle": self.pipeline.idle()} if self.world.size > 1 else {}
        return {**super().step_metrics(loss), **idle}

    def finish(self, trainer: Trainer) -> Event:
        assert self.pipeline is not None
        summary = self.pipeline.summary()
        if self.world.size > 1:
            boundaries = self.world.size - 1
            trainer.say(
                "info",
                f"pipeline: processes waited {summary['idle']:.1%} of the passes (expected:"
                f" {summary['idle_of_these_stages']:.1%} with these stages,"
                f" {summary['idle_of_equal_stages']:.1%} with equal ones) and sent"
                f" {_traffic(summary['step_bytes'] / boundaries, self.world.size)}",
            )
        return {**super().finish(trainer), "pipeline": summary}


def _traffic(boundary_bytes: float, num_stages: int) -> str:
    """Returns ``1.0 MB a step over each boundary (3.1 MB in all)``; of one boundary without it."""
    each, total = boundary_bytes / 1e6, boundary_bytes * (num_stages - 1) / 1e6
    boundary = "each boundary" if num_stages > 2 else "the boundary"
    text = f"{each:,.1f} MB a step over {boundary}"
    return f"{text} ({total:,.1f} MB in all)" if num_stages > 2 else text


def text_task(world: World, config: TrainConfig, **parts: Any) -> TextTask:
    """Returns what a process trains; `parts` are the other fields of `TextTask`."""
    if config.pipeline:
        return PipelinedTextTask(config=config, world=world, **parts)
    return TextTask(config=config, **parts)


def stages_of(config: ModelConfig, num_stages: int) -> list[range]:
    """Returns the layers of each process."""
    costs = [layer_flop_per_token(config, k) for k in range(config.num_layers)]
    costs[-1] += output_flop_per_token(config)
    return divided(costs, num_stages)


def boundary_dtype(config: ModelConfig, precision: str) -> torch.dtype:
    """Returns the dtype of a layer's output: that of the kernels, unless something follows them."""
    is_wide = config.output_norm or (config.residual and config.embed_size == config.rnn_size)
    return torch.bfloat16 if precision == "bf16" and not is_wide else torch.float32


def check_pipeline(
    config: TrainConfig, num_layers: int, device: torch.device, num_processes: int
) -> None:
    """Raises ConfigError where this device, length or number of processes has no pipeline."""
    if not config.pipeline:
        return
    assert config.seq_length is not None
    if device.type != "cpu":
        raise ConfigError(
            f"`pipeline={config.pipeline!r}`: runs on CPUs, not on {device}; give `device='cpu'`"
        )
    if num_layers < num_processes:
        raise ConfigError(
            f"`pipeline={config.pipeline!r}`: {num_processes} processes need at least"
            f" {num_processes} layers, the model has {num_layers}; give"
            f" `num_layers={num_processes!r}` or more, or start fewer processes"
        )
    if config.seq_length < config.pipeline:
        raise ConfigError(
            f"`pipeline={config.pipeline!r}`: a sequence of {config.seq_length} tokens cannot be"
            f" split into {config.pipeline} chunks; give `pipeline={config.seq_length!r}` or less"
        )


def stage_names(config: TrainConfig, model: ModelConfig, world: World) -> Event:
    """Returns the `stages` of a start event: the layers of each process, if it is a pipeline."""
    if not config.pipeline or world.size == 1:
        return {}
    stages = [(s.start + 1, s.stop) for s in stages_of(model, world.size)]
    return {"stages": [f"{a}" if a == b else f"{a}-{b}" for a, b in stages]}


def pipeline_notes(config: TrainConfig, model: ModelConfig, world: World) -> tuple[str, ...]:
    """Returns a note about what dividing the layers will cost, if they are divided."""
    if not config.pipeline:
        return ()
    if world.size == 1:
        return (f"pipeline: one process runs the {config.pipeline} chunks of a step in turn",)
    assert config.seq_length is not None
    size = boundary_dtype(model, config.precision).itemsize
    num_bytes = boundary_bytes(config.batch_size * config.seq_length, model.rnn_size, size)
    return (
        f"pipeline: {config.pipeline} chunks of about"
        f" {config.seq_length / config.pipeline:.0f} tokens: if stages are equal, processes wait"
        f" {bubble(world.size, config.pipeline):.1%} of the passes and send"
        f" {_traffic(num_bytes, world.size)}",
    )
