"""The task of training a network that answers once per sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastlstm.distributed.share import Share
from fastlstm.errors import Stopped
from fastlstm.runs.events import Event
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.runs.tensors import encode_tensors
from fastlstm.sequence.data import SequenceBatch
from fastlstm.sequence.files import MODEL_FILE, StoredSequenceModel
from fastlstm.sequence.loader import LabelledBatch, SequenceData, SequenceLoader
from fastlstm.sequence.model import SequenceNetwork, flop_per_step
from fastlstm.training.precision import autocast
from fastlstm.training.task import Score, Task, Watch

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer

_EVALUATION_BATCH = 256


class SequenceTask(Task):
    """A network with sequences.

    Args:
        stored: the model, its network on `device`.
        data: the sequences.
        device: where the network is.
        files: config.json; empty without a run.
        run: where the model is published; None keeps it in memory.
        report_s: of a budget, kept for the report.
        share: the part of every batch that this process trains on; default is all of it.
    """

    name, unit = "sequence", "sequences"
    min_scored = 1000
    forward_share = 1 / 3
    model: SequenceNetwork
    loader: SequenceLoader

    def __init__(
        self,
        stored: StoredSequenceModel,
        data: SequenceData,
        device: torch.device,
        files: dict[str, bytes],
        run: RunDirectory | None,
        report_s: float = 0.0,
        share: Share | None = None,
    ) -> None:
        config = stored.config
        rows = config.batch_size * config.accumulate
        assert isinstance(stored.network, SequenceNetwork)
        self.model, self.num_valid = stored.network, len(data.held_out)
        self.loader = SequenceLoader(data, rows, config.seed, share)
        self.step_units = rows / self.loader.share.size
        self.flop_per_unit = 3 * flop_per_step(stored.network.config) * data.sequences.mean_length
        self._stored, self._data, self._device = stored, data, device
        self._files, self._run, self._report_s = files, run, report_s

    def size(self, batch: LabelledBatch) -> int:
        return batch.total

    def num_rows(self, batch: LabelledBatch) -> int:
        return len(batch.targets)

    def num_targets(self, batch: LabelledBatch) -> int:
        return len(batch.targets)

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
        return self._stored.answers.loss(outputs.float(), targets.to(self._device))

    def num_blocks(self, limit: int) -> int:
        return -(-limit // _EVALUATION_BATCH)

    @torch.no_grad()
    def evaluate_blocks(
        self, limit: int, blocks: range, stop: Callable[[], bool] | None, watch: Watch | None
    ) -> Tensor:
        self.model.eval()
        own = self._data.held_out[:limit][
            blocks.start * _EVALUATION_BATCH : blocks.stop * _EVALUATION_BATCH
        ]
        sums = list[float]()
        for first in range(0, len(own), _EVALUATION_BATCH):
            if stop is not None and stop():
                raise Stopped("stopped while evaluating")
            numbers = own[first : first + _EVALUATION_BATCH]
            batch = self._data.batch(numbers)
            outputs = self.model(*batch.inputs.to(self._device))
            sums.append(float(self._loss(outputs, batch.targets)) * len(numbers))
            if watch is not None:
                watch(first + len(numbers), len(own))
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
