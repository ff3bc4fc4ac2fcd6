"""`train_sequence_model()`: from sequences and answers to a trained network, and its task."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from fastlstm.distributed.joining import joined
from fastlstm.errors import FormatError, Stopped, counted
from fastlstm.ops.explain import explain
from fastlstm.runs.events import Event, Observer
from fastlstm.sequence.config import ARCHITECTURE, DEFAULT_EPOCHS, LEARNING_RATES, SequenceConfig
from fastlstm.sequence.data import LabelledBatch, SequenceBatch, SequenceData, SequenceLoader
from fastlstm.sequence.files import MODEL_FILE, StoredSequenceModel, description_files, read_options
from fastlstm.sequence.model import NetworkConfig, SequenceNetwork, flop_per_step
from fastlstm.system.tensors import encode_tensors
from fastlstm.training.callbacks import Callback
from fastlstm.training.options import MAY_CHANGE
from fastlstm.training.plan import TrainingResult
from fastlstm.training.precision import (
    PrecisionChoice,
    autocast,
    choose_precision,
    notes_on,
    pass_seconds,
)
from fastlstm.training.session import RunSession, Start, locked_run, torch_settings_kept
from fastlstm.training.signals import StopFlag
from fastlstm.training.task import Score, Task, Watch
from fastlstm.training.trainer import Trainer

Trained = tuple[StoredSequenceModel, TrainingResult]
_EVALUATION_BATCH = 256


@torch_settings_kept()
def train_sequence_model(
    data: SequenceData,
    config: SequenceConfig,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    observers: Sequence[Observer] = (),
    callbacks: Sequence[Callback] = (),
) -> Trained:
    """Trains a network that answers once per sequence; arguments and errors are those of
    `SequenceModel.fit`."""
    started = time.perf_counter()
    with ExitStack() as stack:
        world = stack.enter_context(joined(config))
        stop = None if out is None else stack.enter_context(StopFlag())
        run = stack.enter_context(locked_run(out if world.is_leader else None))
        session = RunSession(run, observers, stop, started, world)
        names = [field.name for field in dataclasses.fields(config)]
        start = stack.enter_context(
            session.start(config, names, resume, lambda s: read_options(s)[:2], MAY_CHANGE)
        )
        return _trained(session, data, start, callbacks)


def _trained(
    session: RunSession,
    data: SequenceData,
    start: Start[SequenceConfig],
    callbacks: Sequence[Callback],
) -> Trained:
    """Builds the network, trains, publishes, reports."""
    session.require_same(key := data.key, "these are other sequences or answers")
    if start.checkpoint is not None and key != read_options(start.checkpoint)[2]:
        assert session.run is not None
        raise FormatError(
            f"'{session.run.path}' was started with other sequences or answers; resume with the"
            " same, or start a new run with another `out`"
        )
    session.mark()
    config, device, checkpoint = start.options, start.device, start.checkpoint
    if (config.steps, config.epochs, config.budget) == (None, None, None):
        config = dataclasses.replace(config, epochs=DEFAULT_EPOCHS)
    config = session.with_rate(config, LEARNING_RATES)
    torch.default_generator.manual_seed(config.seed)
    network = SequenceNetwork(_sizes(config, data)).to(device)
    network.lstm.strict = config.strict_kernels
    precision = session.of_leader(
        PrecisionChoice, lambda: _precision(config, data, network, device)
    )
    session.notes += notes_on(precision.name, device)
    config = dataclasses.replace(config, precision=precision.name)
    stored = StoredSequenceModel(
        config, start.first, network, data.mean, data.std, data.answers, key
    )
    session.check_processes(config)
    task = SequenceTask(session, stored, data, device)
    steps = task.loader.steps_per_epoch
    every = steps if config.eval_every is None else config.eval_every
    plan = session.plan(config, device, checkpoint, steps, every)
    about = {**_about(data, stored, device), "precision_why": start.why(precision)}
    return stored, session.fit(task, plan, checkpoint, callbacks, about)


def _precision(
    config: SequenceConfig, data: SequenceData, network: SequenceNetwork, device: torch.device
) -> PrecisionChoice:
    """Returns the precision of the training; `auto` times the candidates on the network."""
    if config.precision != "auto":
        return choose_precision(config.precision, device, {}, None)
    batch = data.batch(data.train[: config.batch_size]).inputs.to(device)
    about = {"model": dataclasses.asdict(network.config), "batch": list(batch.values.shape)}

    def seconds(name: str) -> float:
        return pass_seconds(network, lambda: network(*batch).float().sum(), name, device)

    return choose_precision(config.precision, device, about, seconds)


def _about(data: SequenceData, stored: StoredSequenceModel, device: torch.device) -> Event:
    """Returns the keys of the `start` event that only sequences have."""
    network, sequences = stored.network, data.sequences
    with autocast(stored.config.precision, device):
        T = max(1, round(sequences.mean_length))
        kernels = [str(line) for line in explain(network, T=T, B=stored.config.batch_size)]
    return {
        "source": counted(len(sequences), "sequence"),
        "model": dataclasses.asdict(network.config),
        "answers": stored.answers.kind,
        "num_units": {"train": len(data.train), "valid": len(data.held_out)},
        "dropout": stored.config.dropout,
        "kernels": kernels,
    }


def _sizes(config: SequenceConfig, data: SequenceData) -> NetworkConfig:
    sequences = data.sequences
    return NetworkConfig(
        num_columns=sequences.num_columns,
        num_outputs=len(data.answers),
        has_missing=sequences.has_missing,
        **{name: getattr(config, name) for name in ARCHITECTURE},
    )


class SequenceTask(Task):
    """A network on `device` and its sequences. Raises DataError: there is a run directory, and a
    label that JSON cannot represent."""

    name, unit = "sequence", "sequences"
    min_scored = 1000
    forward_share = 1 / 3
    model: SequenceNetwork
    loader: SequenceLoader

    def __init__(
        self,
        session: RunSession,
        stored: StoredSequenceModel,
        data: SequenceData,
        device: torch.device,
    ) -> None:
        config = stored.config
        rows = config.batch_size * config.accumulate
        assert isinstance(stored.network, SequenceNetwork)
        self.model, self.num_valid = stored.network, len(data.held_out)
        self.loader = SequenceLoader(data, rows, config.seed, session.world.share)
        self.step_units = rows / self.loader.share.size
        self.flop_per_unit = 3 * flop_per_step(stored.network.config) * data.sequences.mean_length
        self._stored, self._data, self._device = stored, data, device
        self._weights = None if (w := data.class_weights) is None else w.to(device)
        self._run, self._report_s = session.run, session.report_s()
        self._files = {} if self._run is None else description_files(stored)

    def size(self, batch: LabelledBatch) -> int:
        return batch.total

    def num_rows(self, batch: LabelledBatch) -> int:
        return len(batch.targets)

    num_targets = num_rows

    def losses(
        self, batch: LabelledBatch, parts: Sequence[slice], count: float | None = None
    ) -> Iterator[Tensor]:
        total = len(batch.targets) if count is None else count
        for part in parts:
            values, lengths = batch.inputs
            own = SequenceBatch(values[part], None if lengths is None else lengths[part])
            with autocast(self._stored.config.precision, self._device):
                outputs = self.model(*own.to(self._device))
            yield self._loss(outputs, batch.targets[part]) * ((part.stop - part.start) / total)

    def graph_inputs(self, batch: LabelledBatch) -> list[Tensor] | None:
        values, lengths = batch.inputs
        return None if lengths is not None else [values, batch.targets]

    def graph_batch(self, batch: LabelledBatch, inputs: Sequence[Tensor]) -> LabelledBatch:
        values, targets = inputs
        return batch._replace(inputs=SequenceBatch(values, None), targets=targets)

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._stored.answers.loss(outputs.float(), targets.to(self._device), self._weights)

    def num_blocks(self, limit: int) -> int:
        return -(-limit // _EVALUATION_BATCH)

    @torch.no_grad()
    def evaluate_blocks(
        self, limit: int, blocks: range, stop: Callable[[], bool] | None, watch: Watch | None
    ) -> Tensor:
        self.model.eval()
        starts = [block * _EVALUATION_BATCH for block in blocks]
        parts = [self._data.held_out[k : min(k + _EVALUATION_BATCH, limit)] for k in starts]
        sums, done = list[float](), 0
        for numbers in parts:
            if stop is not None and stop():
                raise Stopped("stopped while evaluating")
            batch = self._data.batch(numbers)
            outputs = self.model(*batch.inputs.to(self._device))
            sums.append(float(self._loss(outputs, batch.targets)) * len(numbers))
            done += len(numbers)
            if watch is not None:
                watch(done, sum(map(len, parts)))
        return torch.tensor(sums, dtype=torch.float64)[:, None]

    def score(self, limit: int, sums: Tensor, seconds: float) -> Score:
        return Score(math.fsum(sums[:, 0].tolist()) / limit, limit)

    def files(self) -> dict[str, bytes]:
        return self._files

    def publish(self, weights: Mapping[str, Tensor], trainer: Trainer) -> None:
        if self._run is not None:
            self._run.publish({**self._files, MODEL_FILE: encode_tensors(weights)})

    def finish_s(self, unit_s: float) -> float:
        return self._report_s

    def finish(self, trainer: Trainer) -> Event:
        with trainer.progress.counted("saving"):
            trainer.best.publish()
        return {}
