"""What a trainer trains: `Task`, the one interface between the loop and the three jobs."""

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
    from fastlstm.training.plan import TrainingPlan
    from fastlstm.training.state import Progress, TrainingState
    from fastlstm.training.trainer import Trainer

Watch = Callable[[int, int], object]
"""Called with the units done so far and in all."""


class Loader(Protocol):
    """Hands out training batches in an order that follows from a seed and a position alone."""

    @property
    def wait_s(self) -> float:
        """Seconds that `next` has waited in all."""
        ...

    @property
    def steps_per_epoch(self) -> int: ...

    def next(self) -> Any: ...

    def state_dict(self) -> dict[str, int]:
        """Returns the position behind the last batch handed out."""
        ...

    def load_state_dict(self, state: dict[str, int]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Score:
    """Result of an evaluation.

    Attributes:
        loss: mean loss of the validation part; what early stopping compares.
        num_units: tokens, windows or sequences that were scored.
        metrics: further figures, as they stand in the `eval` event.
        detail: the evaluation as the task's own type, or None.
    """

    loss: float
    num_units: int
    metrics: Mapping[str, Any] = field(default_factory=dict)
    detail: Any = None


def even_parts(num_rows: int, num_parts: int) -> list[slice]:
    """Returns the rows of each of `num_parts` parts, or of as many as there are rows."""
    if num_rows == 0:
        return []
    size, longer = divmod(num_rows, num := min(num_parts, num_rows))
    ends = [part * size + min(part, longer) for part in range(num + 1)]
    return [slice(*rows) for rows in pairwise(ends)]


class Task(ABC):
    """A model with its data: what differs between texts, tables and sequences.

    Attributes:
        name: of the job, as events call it: text, forecast or sequence.
        unit: what a batch is counted in, such as "tokens".
        publishes_at_once: the best weights are published whenever they are found, and no copy is
            kept; else they are published with each checkpoint and are in the model at the end.
        min_scored: units that an evaluation scores in any case, where there are as many.
        max_scored: units that an evaluation scores at most; None has no such limit.
        forward_share: time of scoring a unit over training on it, until an evaluation was timed.
        may_be_nan: names of carried tensors in which NaN has a meaning.
        row_axis: axis of the rows of a batch in each carried tensor.
        num_lanes: places for rows of a batch whose state is carried, in all processes.
        num_sums: numbers that an evaluation has of each block.
        model: on its device.
        loader: of the training batches.
        flop_per_unit: floating-point operations of a training step per unit.
        num_valid: units of the validation part.
        step_units: validation units that are read like this process's part of a training step.
        is_pipelined: whether it is a `PipelinedTask`: processes share the layers, not the rows.
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

        The caller runs the backward pass of a part before it asks for the next. State that is
        carried from batch to batch moves on only after the last part.

        Args:
            batch: of the loader.
            parts: rows of each part, consecutive and not empty; together all of the batch.
            count: None divides by `num_targets`, so that the losses add up to the mean.
        """

    def graph_inputs(self, batch: Any) -> list[Tensor] | None:
        """Returns the tensors of a batch that `losses` reads on a GPU, or None where a step on it
        cannot be recorded as a CUDA graph.

        Batches whose tensors have the same shapes have the same graph. A carried state must stay
        in its place (`carried`), and nothing in `losses` may wait for the GPU.
        """
        return None

    def graph_batch(self, batch: Any, inputs: Sequence[Tensor]) -> Any:
        """Returns the batch with other tensors in place of its `graph_inputs`."""
        raise NotImplementedError

    @abstractmethod
    def num_rows(self, batch: Any) -> int:
        """Returns the number of rows of a batch that this process has."""

    @abstractmethod
    def num_targets(self, batch: Any) -> int:
        """Returns the targets of a batch, missing values left out: what a mean loss is over."""

    @abstractmethod
    def num_blocks(self, limit: int) -> int:
        """Returns the blocks in which an evaluation of `limit` units is computed."""

    @abstractmethod
    def evaluate_blocks(
        self, limit: int, blocks: range, stop: Callable[[], bool] | None, watch: Watch | None
    ) -> Tensor:
        """Scores some blocks of the validation part.

        Args:
            limit: units to score in all, at most `num_valid`.
            blocks: which of `num_blocks`, consecutive.
            stop: polled.
            watch: called with the units scored so far and the units of these blocks.

        Returns:
            Float64 `(len(blocks), num_sums)`: the same bits for a block whichever others are
            computed with it.

        Raises:
            Stopped: `stop` returned True.
        """

    @abstractmethod
    def score(self, limit: int, sums: Tensor, seconds: float) -> Score:
        """Returns the result of all blocks; `sums` as `evaluate_blocks` returns them."""

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """Returns the files that describe the model, for every checkpoint."""

    @abstractmethod
    def publish(self, weights: Mapping[str, Tensor], trainer: Trainer) -> None:
        """Makes the weights the model of the run directory.

        Raises:
            StorageError: the disk refused.
        """

    def changed(self, options: Any, stop: Callable[[], bool] | None = None) -> Task:
        """Returns the task with other options: the same model and data, with a loader and carried
        state of its own.

        Args:
            options: of the same kind as this task's; sizes of the model are not looked at.
            stop: polled by the loader.

        Raises:
            UsageError: the task cannot be changed so.
        """
        raise UsageError(f"the options of a task of {self.name}s cannot be changed")

    def reset_state(self) -> None:  # noqa: B027
        """Sets the state that is carried from batch to batch to zero."""

    def carried(self) -> dict[str, Tensor]:
        """Returns the state that is carried from batch to batch, by name."""
        return {}

    def restore_carried(self, carried: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Puts the state of `carried` back.

        Raises:
            ValueError: it does not fit the model.
        """

    def step_metrics(self, loss: float) -> Event:
        """Returns what a `step` event holds beside the loss."""
        return {}

    def finish_s(self, unit_s: float) -> float:
        """Returns about how many seconds of a budget the work after training takes.

        Args:
            unit_s: seconds of scoring one unit.
        """
        return 0.0

    def finish(self, trainer: Trainer) -> Event:
        """Does what follows training, and returns what the `end` event holds of it.

        Raises:
            Stopped: the trainer's `stop` returned True.
        """
        return {}

    def totals(self, progress: Progress) -> Event:
        """Returns what an `end` event holds beside the counters that all tasks share."""
        return {}


class PipelinedTask(Protocol):
    """What a task does itself where processes share the layers: see `PipelinedTextTask`."""

    @property
    def norm(self) -> Tensor: ...

    def passes(self, batch: Any, plan: TrainingPlan, step: int) -> float: ...

    def gather(self, state: TrainingState) -> None: ...

    def optimizer_tensors(self, state: TrainingState) -> dict[str, Tensor]: ...
