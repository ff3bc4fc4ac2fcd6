"""Trains a compressed text model: from the weights of the source, or a new student."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fastlstm.compression.options import TRAINING, CompressConfig
from fastlstm.compression.session import Result
from fastlstm.compression.text import (
    TextCompression,
    compressed_files,
    max_scored,
    name_of_text,
)
from fastlstm.errors import DataError
from fastlstm.nn.loss import CHUNK_ELEMENTS
from fastlstm.ops.call import torchs_dtype
from fastlstm.runs.events import Event
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.system.fields import built
from fastlstm.text.config import PARTS, ModelConfig, TrainConfig
from fastlstm.text.data.lanes import Batch, TextLoader
from fastlstm.text.data.sources import open_source
from fastlstm.text.data.text import UnknownPolicy
from fastlstm.text.held_out import RunText
from fastlstm.text.model import LanguageModel, State, reset_state
from fastlstm.text.stored_model import CONFIG_FILE
from fastlstm.text.task import FinalTest, TextTask
from fastlstm.text.train import TEXT_MAY_CHANGE, TextSession, stored_configs
from fastlstm.training.optimizer import DEFAULT_LEARNING_RATE
from fastlstm.training.plan import TrainingPlan
from fastlstm.training.precision import autocast
from fastlstm.training.session import locked_run
from fastlstm.training.task import Watch, even_parts
from fastlstm.training.trainer import Trainer

MEASURING_S = 4.0
"""Time of a budget kept for loading and for measuring speed."""
MAX_KEPT_BYTES = 2**30
"""Most memory for the logits of a teacher: 5 million characters of 100 kinds."""
_LARGEST = 65_504.0
"""The largest float16."""
_CHUNK = 1024
"""Tokens read at once outside the batches."""
_OF_MACHINE = ("memory_limit_gb", "strict_kernels")


def train_compressed(source: TextCompression) -> None:
    """Trains, measures and publishes."""
    with locked_run(source.out) as run:
        assert run is not None
        own = _Training(run, source)
        options = training_options(source, own.start_sizes)
        names = source.given & set(TRAINING)
        with own.start(options, names, source.resume, stored_configs, TEXT_MAY_CHANGE) as start:
            if source.loaded_teacher is not None:
                source.loaded_teacher.model.to(start.device).requires_grad_(False)
            own.notes += source.notes_on_start()
            name = source.stored.config.get("data", {}).get("source")
            if source.data is None and not name:
                raise DataError(f"{source.run} does not name its text; give it as `data`")
            try:
                text = open_source(name if source.data is None else source.data)
            except DataError as error:
                if source.data is not None:
                    raise
                raise DataError(
                    f"the text of {source.run} cannot be read ({error}); give it as `data`"
                ) from None
            own.train(text, start, source.all_callbacks())


class _Training(TextSession):
    unknown: UnknownPolicy = "count"
    needs_steps = False  # a resumed run with a larger max_loss may only publish

    def __init__(self, run: RunDirectory, source: TextCompression) -> None:
        super().__init__(run, list(source.observers), source.stop, source.started)
        self.path, self._source, self._config = run.path, source, source.config
        self._teacher, self.tokenizer = source.loaded_teacher, source.stored.tokenizer
        self._start_weights, self.start_sizes = source.start(self._config)

    def set_weights(self, model: LanguageModel, texts: RunText, config: TrainConfig) -> None:
        if self._config.is_new_student:
            super().set_weights(model, texts, config)
        else:
            model.load_state_dict(self._start_weights, strict=False)  # tied: one is stored

    def model_files(
        self, model: ModelConfig, config: TrainConfig, texts: RunText, first: TrainConfig
    ) -> dict[str, bytes]:
        """Returns the JSON files of checkpoints, which hold fp32 weights."""
        files = super().model_files(model, config, texts, first)
        return compressed_files(files, {**self._source.about(self._config), "weights": "fp32"})

    def make_task(self, **parts: Any) -> TextTask:
        config, models = self._config, (self._source.sizes, parts["model"].config)
        parts |= {
            "conclude": self._conclude,
            "num_scored": min(len(parts["valid_ids"]), max_scored(*models)),
        }
        if self._teacher is None:
            return CompressedTextTask(**parts)
        return TaughtTextTask(
            **parts, teacher_model=self._teacher.model, temperature=config.temperature,
            alpha=config.alpha,
            watch=self.watch("reading the text again with the teacher", "tokens"),
        )  # fmt: skip

    def final_test(self, texts: RunText, plan: TrainingPlan) -> FinalTest | None:
        return None  # source and result are compared on the validation text

    def _conclude(self, trainer: Trainer) -> Event:
        """Measures the best weights beside the source; publishes them within `max_loss`."""
        task, source = trainer.task, self._source
        assert isinstance(task, CompressedTextTask)
        source.ids = task.valid_ids
        source.about_ids = name_of_text(json.loads(task.model_files[CONFIG_FILE])["data"])

        def trained() -> Result:
            weights = {
                name: weight.detach().float().cpu().numpy()
                for name, weight in trainer.best.weights.items()
            }
            return source.result(weights, task.model.config, task.model_files)

        best = source.conclude(trainer, trained)
        if best is not None:
            assert self.run is not None
            self.run.publish({**best.files, **source.report_files()})
        return source.end_event()


def training_options(source: TextCompression, start: ModelConfig) -> TrainConfig:
    """Returns the options of training from the sizes `start`: those of the source, with changes."""
    config, stored = source.config, source.stored.config
    fields = {field.name for field in dataclasses.fields(TrainConfig)}
    values = {n: v for n, v in stored.get("train", {}).items() if n in fields}
    values |= {n: v for n, v in dataclasses.asdict(start).items() if n != "vocab_size"}
    values |= {name: getattr(TrainConfig, name) for name in ("ema", *_OF_MACHINE)}
    values |= config.training_options(TRAINING)
    is_less = config.is_new_student or (config.prune, config.output_rank) != (None, None)
    if is_less and config.dropout is None:
        values["dropout"] = 0.0  # fewer weights and the teacher prevent overfitting
    if config.learning_rate is None:
        rate = source.peak_rate
        rate = DEFAULT_LEARNING_RATE[values.get("optimizer", "muon")] if rate is None else rate
        values["learning_rate"] = None if config.is_new_student else _rate_share(config) * rate
    sizes = {n: getattr(config, n) for n in ("rnn_size", "embed_size", "num_layers", "output_rank")}
    values |= {name: size for name, size in sizes.items() if size is not None}
    if start.tie_weights and sizes["embed_size"] is None:
        values["embed_size"] = None  # as wide as the hidden units
    if source.data is not None:
        values |= dict.fromkeys(PARTS)
    return built(TrainConfig, values, "config.json")


def _rate_share(config: CompressConfig) -> float:
    """Returns the ratio of the peak learning rate to the rate of the source (benchmarks/log)."""
    if config.prune is not None:
        kept = 1.0 - config.prune  # a step of Muon is larger by its root
        return 1.0 if config.structured == "units" else min(kept**-0.5, 3.0)
    return 0.3 if config.to == "fp32" or config.output_rank is not None else 0.05


@dataclass(eq=False)
class CompressedTextTask(TextTask):
    """A language model under compression.

    `conclude` measures and publishes the best weights; source and result score `num_scored` tokens.
    """

    publishes_at_once = False

    conclude: Callable[[Trainer], Event] = field(kw_only=True)
    num_scored: int = field(kw_only=True)

    @property
    def teacher_s(self) -> float:
        """Seconds in the teacher, over all starts of the run."""
        return 0.0

    def publish(self, weights: Mapping[str, Tensor], trainer: Trainer) -> None:
        """Publishes nothing before `conclude`."""

    def finish_s(self, unit_s: float) -> float:
        return self.report_s + MEASURING_S + 2 * unit_s * self.num_scored

    def finish(self, trainer: Trainer) -> Event:
        return self.conclude(trainer)


@dataclass(eq=False)
class TaughtTextTask(CompressedTextTask):
    """A language model that also learns the predictions of a teacher.

    `temperature` divides the logits of both models; `alpha` is the teacher's share in the loss;
    `watch` shows how far the teacher of a resumed training has caught up.
    """

    teacher_model: LanguageModel = field(kw_only=True)
    temperature: float = field(kw_only=True)
    alpha: float = field(kw_only=True)
    watch: Watch | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._nats, self._num_nats = list[Tensor](), 1
        self.teacher = open_teacher(self.teacher_model, self.config.precision, self.loader)

    def losses(
        self, batch: Batch, parts: Sequence[slice], count: float | None = None
    ) -> Iterator[Tensor]:
        self._nats, self._num_nats = [], batch.y.numel()
        self.teacher.read(batch, parts)
        yield from super().losses(batch, parts, count)
        self.teacher.advance()

    def graph_inputs(self, batch: Batch) -> list[Tensor] | None:
        return None

    def part_loss(self, x: Tensor, y: Tensor, state: State, part: slice) -> tuple[Tensor, State]:
        taught = self.teacher.output(part)
        features, new_state = self.model.features(x[:, part], state)
        loss, nats = distillation_loss(
            OutputLayer(features.flatten(0, 1), self.model.output_weight, self.model.output.bias),
            taught, y[:, part].reshape(-1), self.temperature, self.alpha,
        )  # fmt: skip
        self._nats.append(nats)
        return loss, new_state

    @property
    def teacher_s(self) -> float:
        return self.teacher.seconds

    @teacher_s.setter
    def teacher_s(self, seconds: float) -> None:
        self.teacher.seconds = seconds

    def step_metrics(self, loss: float) -> Event:
        """Returns bits per character of the text, without the share of the teacher."""
        if self._nats:
            loss = float(torch.stack(self._nats).sum()) / self._num_nats
        return super().step_metrics(loss)

    def reset_state(self) -> None:
        super().reset_state()
        self.teacher.reset_state()

    def carried(self) -> dict[str, Tensor]:
        return super().carried() | self.teacher.carried()

    def restore_carried(self, carried: Mapping[str, Tensor]) -> None:
        super().restore_carried(carried)
        self.teacher.catch_up(self.loader, self.config.accumulate, self.watch)


class ReadingTeacher:
    """A teacher that reads every batch of a training, with its own carried state.

    Its model is in evaluation mode on the device of the student.

    A step calls `read`, then `output` once for each part of the lanes, then `advance`. A retried
    step starts with `read`. `seconds` is the time in the teacher.
    """

    def __init__(self, model: LanguageModel, precision: str, num_lanes: int) -> None:
        self._model, self._precision, self.seconds = model, precision, 0.0
        self._device = model.output.bias.device
        self._state = self._start = self._model.initial_state(num_lanes, device=self._device)
        self._x, self._ends = torch.empty(0), list[State]()

    def read(self, batch: Batch, parts: Sequence[slice]) -> None:
        """Starts a batch; `parts` are the lanes that fit into memory at once."""
        self._x, self._ends = batch.x.to(self._device), []
        self._start = reset_state(self._state, batch.reset)

    def output(self, part: slice) -> Logits | OutputLayer:
        """Returns the predictions for some lanes, N = T B rows in the order `(T, B)`."""
        with self._reading():
            features, end = self._model.features(self._x[:, part], lanes_of(self._start, part))
        self._ends.append(end)
        return OutputLayer(
            features.flatten(0, 1), self._model.output_weight, self._model.output.bias
        )

    def advance(self) -> None:
        """Ends the batch: the next one continues from its state."""
        self._state = joined(self._ends)

    def catch_up(self, loader: TextLoader, num_parts: int, watch: Watch | None) -> None:
        """Reads what a resumed training had read before the position of its loader."""

    def reset_state(self) -> None:
        for tensor in self._state:
            tensor.zero_()

    def carried(self) -> dict[str, Tensor]:
        return dict(zip(("teacher_h", "teacher_c"), self._state, strict=True))

    @contextmanager
    def _reading(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            with torch.no_grad(), autocast(self._precision, self._device):
                yield
        finally:
            self.seconds += time.perf_counter() - started


class RememberingTeacher(ReadingTeacher):
    """A teacher that reads the first epoch only, and keeps its logits for the epochs after.

    The logits are float16 in the memory of the CPU. Checkpoints do not hold them, so a resumed run
    reads the first epoch again, up to its position.
    """

    def __init__(self, model: LanguageModel, precision: str, loader: TextLoader) -> None:
        super().__init__(model, precision, loader.num_lanes)
        self._ids, self._num_batches, self._num_read = loader.ids, loader.steps_per_epoch, 0
        size = len(self._ids), self._model.config.vocab_size
        self._logits = torch.empty(size, dtype=torch.float16)
        self._positions = torch.empty(0, dtype=torch.int64)

    def read(self, batch: Batch, parts: Sequence[slice]) -> None:
        if batch.epoch == 0 and batch.index == self._num_read:
            self._read_next(batch, parts)
        self._positions = batch.positions()

    def output(self, part: slice) -> Logits | OutputLayer:
        return Logits(self._logits[self._positions[:, part].flatten()].to(self._device))

    def advance(self) -> None:
        """Does nothing: `read` moves on by itself."""

    reset_state = advance

    def carried(self) -> dict[str, Tensor]:
        return {}

    def catch_up(self, loader: TextLoader, num_parts: int, watch: Watch | None) -> None:
        position = loader.state_dict()
        needed = position["index"] if position["epoch"] == 0 else self._num_batches
        if self._num_read >= needed:
            return
        for batch in loader.first_epoch():
            if batch.index == needed:
                break
            if batch.index == self._num_read:
                self._read_next(batch, even_parts(len(batch.reset), num_parts))
            if watch is not None:
                size = batch.x.numel()
                watch((batch.index + 1) * size, needed * size)

    def _read_next(self, batch: Batch, parts: Sequence[slice]) -> None:
        """Reads the next batch of the first epoch, with the first and last batch also the tokens
        before and after all batches."""
        positions, ends = batch.positions(), list[State]()
        with self._reading():
            if batch.index == 0:
                self._read_rest(range(int(positions[0, 0])), self._model.initial_state(1))
            start = reset_state(self._state, batch.reset)
            for part in parts:
                ends.append(self._read_tokens(positions[:, part], lanes_of(start, part)))
            end = joined(ends)
            if batch.index + 1 == self._num_batches:
                rest = range(int(positions[-1, -1]) + 1, len(self._ids))
                self._read_rest(rest, lanes_of(end, slice(-1, None)))
        self._state, self._num_read = end, self._num_read + 1

    def _read_rest(self, positions: range, state: State) -> None:
        """Reads tokens outside the batches of the first epoch."""
        for rows in torch.tensor(positions, dtype=torch.int64).unsqueeze(1).split(_CHUNK):
            if len(rows):
                state = self._read_tokens(rows, state)

    def _read_tokens(self, positions: Tensor, state: State) -> State:
        """Keeps the logits of tokens at positions `(T, B)`; returns the state after them."""
        tokens = torch.from_numpy(self._ids[positions.numpy()].astype(np.int64)).to(self._device)
        h, c = (tensor.to(self._device) for tensor in state)
        features, end = self._model.features(tokens, (h, c))
        logits = self._model.logits(features).float().clamp_(-_LARGEST, _LARGEST)
        self._logits[positions] = logits.half().cpu()
        return end


def open_teacher(model: LanguageModel, precision: str, loader: TextLoader) -> ReadingTeacher:
    """Returns a teacher that keeps its logits, if batches follow the text and memory is enough."""
    num_bytes = 2 * len(loader.ids) * model.config.vocab_size
    if loader.is_in_order and num_bytes <= MAX_KEPT_BYTES:
        return RememberingTeacher(model, precision, loader)
    return ReadingTeacher(model, precision, loader.num_lanes)


def lanes_of(state: State, part: slice) -> State:
    """Returns the state `(L, B, H)` of some lanes."""
    return state[0][:, part].contiguous(), state[1][:, part].contiguous()


def joined(states: Sequence[State]) -> State:
    """Returns the state of all lanes in float32, from the states of their parts in order."""
    h, c = (torch.cat([state[k].float() for state in states], dim=1) for k in range(2))
    return h, c


class OutputLayer(NamedTuple):
    """An output layer with weight `(V, H)`, bias `(V,)` and input features `(N, H)`."""

    features: Tensor
    weight: Tensor
    bias: Tensor

    def logits(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Returns the logits of some rows, `(n, V)`, computed in `dtype`."""
        features, weight, bias = (t.to(dtype) for t in (self.features[rows], *self[1:]))
        return torch.addmm(bias, features, weight.t())


class Logits(NamedTuple):
    """The logits of an output layer, `(N, V)`."""

    values: Tensor

    def logits(self, rows: slice, dtype: torch.dtype) -> Tensor:
        return self.values[rows].to(dtype)


def distillation_loss(
    student: OutputLayer, teacher: Logits | OutputLayer, targets: Tensor, temperature: float,
    alpha: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the summed loss of all rows, and the nats of their targets.

    The loss of a row is ``alpha T^2 KL(teacher || student at temperature T) + (1 - alpha) nats``
    (Hinton et al. 2015): T^2 keeps the teacher's share of the gradient the same at any temperature.

    Logits of an `OutputLayer` are computed in chunks of rows, never all at once. Only the student
    gets gradients. Targets are `(N,)` int64. Both scalars are float32 (float64 for float64
    features). Under autocast the products run in its dtype, the rest in float32.
    """
    total, nats = _Distillation.apply(  # type: ignore[no-untyped-call]
        *student, type(teacher)(*(t.detach() for t in teacher)), targets, temperature, alpha
    )
    return total, nats


class _Distillation(torch.autograd.Function):
    """Computes all gradients in forward, chunk by chunk; backward scales them."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor, bias: Tensor,
        teacher: Logits | OutputLayer, targets: Tensor, temperature: float, alpha: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        student = OutputLayer(features, weight, bias)
        kind, dtype = features.device.type, torchs_dtype(features)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        gradients = [torch.zeros_like(t, dtype=wide) for t in student]
        total, nats = (torch.zeros((), dtype=wide, device=features.device) for _ in range(2))
        step = max(64, CHUNK_ELEMENTS // weight.shape[0])
        with torch.autocast(kind, enabled=False):
            for start in range(0, len(targets), step):
                rows = slice(start, start + step)
                own, other = (o.logits(rows, dtype).to(wide) for o in (student, teacher))
                d, loss, nats_of_rows = _chunk(own, other, targets[rows], temperature, alpha)
                total += loss
                nats += nats_of_rows
                gradients[2] += d.sum(0)
                d = d.to(dtype)
                gradients[0][rows] = d @ weight.to(dtype)
                gradients[1] += d.t() @ features[rows].to(dtype)
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [t.dtype for t in student]
        ctx.mark_non_differentiable(nats)
        return total, nats

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return (*((t * grads[0]).to(dtype) for t, dtype in pairs), None, None, None, None)


def _chunk(
    student: Tensor, teacher: Tensor, targets: Tensor, temperature: float, alpha: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradient of the logits of the student `(n, V)`, the loss, and the nats."""
    log_p = torch.log_softmax(student, 1)
    nats = -log_p.gather(1, targets.unsqueeze(1)).sum()
    d = log_p.exp_().mul_(1 - alpha)
    d.scatter_add_(1, targets.unsqueeze(1), d.new_full((len(targets), 1), alpha - 1))
    soft, aim = (torch.log_softmax(logits / temperature, 1) for logits in (student, teacher))
    divergence = F.kl_div(soft, aim, reduction="sum", log_target=True)
    d.add_(soft.exp_().sub_(aim.exp_()), alpha=alpha * temperature)
    return d, alpha * temperature**2 * divergence + (1 - alpha) * nats, nats
