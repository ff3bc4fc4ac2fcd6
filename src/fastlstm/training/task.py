"""`Task`, the interface between the training loop and its jobs: text, tables, sequences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import Tensor, nn

from fastlstm.errors import UsageError

if TYPE_CHECKING:
    from fastlstm.runs.events import Event
    from fastlstm.training.state import Progress, TrainingState
    from fastlstm.training.trainer import Trainer

Watch = Callable[[int, int], object]
"""Receives the units done so far and in all."""


class Loader(Protocol):
    """Training batches, whose order depends on a seed and a position only."""

    @property
    def wait_s(self) -> float:
        """Seconds that `next` has waited so far."""
        ...

    @property
    def steps_per_epoch(self) -> int: ...

    def next(self) -> Any: ...

    def state_dict(self) -> dict[str, int]:
        """Returns the position after the last batch."""
        ...

    def load_state_dict(self, state: dict[str, int]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Score:
    """Result of an evaluation.

    Attributes:
        loss: mean over the validation part; early stopping compares it.
        num_units: scored tokens, windows or sequences.
        metrics: further figures of the `eval` event.
        detail: the evaluation as the task's type, or None.
    """

    loss: float
    num_units: int
    metrics: Mapping[str, Any] = field(default_factory=dict)
    detail: Any = None


def even_parts(num_rows: int, num_parts: int) -> list[slice]:
    """Returns the rows of each of `num_parts` parts, or of fewer parts if there are fewer rows."""
    if num_rows == 0:
        return []
    size, longer = divmod(num_rows, num := min(num_parts, num_rows))
    ends = [part * size + min(part, longer) for part in range(num + 1)]
    return [slice(*rows) for rows in pairwise(ends)]


class Task(ABC):
    """A model with its data.

    Attributes:
        name: name of the job in events: text, forecast or sequence.
        unit: what batches are counted in, such as "tokens".
        publishes_at_once: whether each best model is published when it is found, without a copy in
            memory; else with the next checkpoint, and the model has the best weights at the end.
        min_scored: units that an evaluation scores at least, if there are as many.
        max_scored: units that an evaluation scores at most, or None.
        forward_share: estimated time of scoring a unit relative to training on it.
        may_be_nan: names of carried tensors in which NaN has a meaning.
        row_axis: axis of the batch's rows in each carried tensor.
        num_lanes: rows with a carried state, in all processes.
        num_sums: numbers per block of an evaluation.
        model: the model, on its device.
        loader: loader of the training batches.
        flop_per_unit: floating-point operations of a training step per unit.
        num_valid: units of the validation part.
        step_units: validation units that cost as much reading as one step of this process.
        is_pipelined: whether processes share layers, not rows, and the task takes the passes itself
            (`PipelinedTextTask`).
    """

    name: ClassVar[str]
    unit: ClassVar[str]
    publishes_at_once: ClassVar[bool] = False
    min_scored: ClassVar[int] = 0
    max_scored: ClassVar[int | None] = None
    forward_share: ClassVar[float] = 0.5
    may_be_nan: ClassVar[frozenset[str]] = frozenset()
    row_axis: ClassVar[Mapping[str, int]] = {}
    num_lanes: int = 0
    num_sums: ClassVar[int] = 1
    is_pipelined: ClassVar[bool] = False

    model: nn.Module
    loader: Loader
    flop_per_unit: float = 0.0
    num_valid: int
    step_units: float

    @abstractmethod
    def size(self, batch: Any) -> int:
        """Returns the units of a batch."""

    @abstractmethod
    def losses(
        self, batch: Any, parts: Sequence[slice], count: float | None = None
    ) -> Iterator[Tensor]:
        """Yields the loss of each part of a batch: its sum over the targets, divided by `count`.

        The caller runs the backward pass of a part before it asks for the next. The carried state
        advances after the last part.

        Args:
            batch: a batch of the loader.
            parts: consecutive rows that make up the batch, none empty.
            count: default `num_targets`, so that the losses add up to the mean.
        """

    def graph_inputs(self, batch: Any) -> list[Tensor] | None:
        """Returns the tensors of a batch that `losses` reads on a GPU, or None if its step cannot
        be a CUDA graph.

        Batches of the same shapes share a graph: carried tensors must keep their addresses, and
        `losses` must not wait for the GPU.
        """
        return None

    def graph_batch(self, batch: Any, inputs: Sequence[Tensor]) -> Any:
        """Returns the batch with `inputs` in place of its `graph_inputs`."""
        raise NotImplementedError

    @abstractmethod
    def num_rows(self, batch: Any) -> int:
        """Returns the rows of a batch in this process."""

    @abstractmethod
    def num_targets(self, batch: Any) -> int:
        """Returns the number of targets of a batch, without missing values."""

    @abstractmethod
    def num_blocks(self, limit: int) -> int:
        """Returns the number of blocks in an evaluation of `limit` units."""

    @abstractmethod
    def evaluate_blocks(
        self, limit: int, blocks: range, stop: Callable[[], bool] | None, watch: Watch | None
    ) -> Tensor:
        """Scores consecutive blocks, of `num_blocks`, in an evaluation of `limit` units.

        Returns float64 `(len(blocks), num_sums)`; the bits of a block do not depend on the others.
        `watch` is called with the units scored so far and the units of these blocks. Raises Stopped
        if `stop` returned True.
        """

    @abstractmethod
    def score(self, limit: int, sums: Tensor, seconds: float) -> Score:
        """Returns the result of the evaluation; `evaluate_blocks` gives `sums`, for all blocks."""

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """Returns the files beside the weights in checkpoints, such as config.json."""

    @abstractmethod
    def publish(self, weights: Mapping[str, Tensor], trainer: Trainer) -> None:
        """Writes the weights as the model of the run directory. Raises StorageError."""

    def changed(self, options: Any, stop: Callable[[], bool] | None = None) -> Task:
        """Returns a task with other options, but for sizes of the model, on the same model and
        data, with another loader, which polls `stop`, and carried state. Raises UsageError: these
        options cannot be changed."""
        raise UsageError(f"the options of a task of {self.name}s cannot be changed")

    def reset_state(self) -> None:  # noqa: B027
        """Sets the carried state to zero."""

    def carried(self) -> dict[str, Tensor]:
        """Returns the state that is carried from batch to batch, by name."""
        return {}

    def restore_carried(self, carried: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Restores a state of `carried`; raises ValueError if it does not fit the model."""

    def gather(self, state: TrainingState) -> None:  # noqa: B027
        """Brings all weights, their averages and the carried state to every process."""

    def optimizer_tensors(self, state: TrainingState) -> dict[str, Tensor]:
        """Returns the state of the optimizers of all processes."""
        return state.optimizers.tensors()

    def step_metrics(self, loss: float) -> Event:
        """Returns further figures of a `step` event."""
        return {}

    def finish_s(self, unit_s: float) -> float:
        """Returns about how many seconds `finish` takes; `unit_s` are seconds of scoring a unit."""
        return 0.0

    def finish(self, trainer: Trainer) -> Event:
        """Does the work after training; returns its part of the `end` event. May raise Stopped."""
        return {}

    def totals(self, progress: Progress) -> Event:
        """Returns further counters of the `end` event."""
        return {}
