"""What `tune` needs to know of what is trained: a text model or a forecaster."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from fastlstm.runs.events import Event, Observer
    from fastlstm.training.callbacks import Callback
    from fastlstm.training.options import TrainingOptions
    from fastlstm.training.signals import StopFlag
    from fastlstm.training.trainer import Trainer
    from fastlstm.tuning.halving import Changes
    from fastlstm.tuning.tune import Search

Show = Callable[[str, str], None]
"""Called with a label and a text of everything that is found."""


@dataclass(frozen=True)
class Default:
    """The settings that a run would have, and what is tried beside them.

    Attributes:
        options: by field; all that the axes may change.
        changes: single changes, the most promising first.
        speeds: timed cells of the speed surface.
        sizes: of every size: its latency and bytes, and why it was refused.
        rates: changes of the learning rate that are tried with the best of the others.
        units_per_s: its speed; 0 where it was not timed.
    """

    options: dict[str, Any]
    changes: list[dict[str, Any]]
    speeds: list[dict[str, Any]]
    sizes: list[dict[str, Any]]
    rates: list[dict[str, Any]] = field(default_factory=list)
    units_per_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Job(ABC):
    """A kind of training.

    Attributes:
        stop: polled while runs train; when set, they are stopped.
        axes: what can be tuned; threads and precision by speed alone.
        fields: options that fix an axis when one of them is given.
        size: the option of the number of hidden units.
        per: what latency is the time of.
        ending: words behind the figure of the best settings.
    """

    stop: StopFlag | None = None
    axes: ClassVar[tuple[str, ...]]
    fields: ClassVar[Mapping[str, tuple[str, ...]]]
    size: ClassVar[str]
    per: ClassVar[str]

    @property
    def ending(self) -> str:
        return " of its longest run"

    @abstractmethod
    def train(
        self,
        source: Any,
        config: Any,
        *,
        given: Collection[str],
        out: Path,
        observers: Sequence[Observer] = (),
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Trains a run as `fastlstm train` does, for comparison with others of the search."""

    @abstractmethod
    def prepare(
        self, trainer: Trainer, given: Collection[str], search: Search, show: Show
    ) -> Default:
        """Returns the default of a run that was set up, and the changes of it to try."""

    @abstractmethod
    def options_of(self, default: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
        """Returns options, those of the default, with some changes."""

    @abstractmethod
    def label_of(self, changes: Changes) -> str:
        """Returns "384 units, batch 16", or "default"."""

    @abstractmethod
    def result(
        self, start: Event, end: Event, options: Mapping[str, Any], default: Default,
        seconds: float, budget_s: float,
    ) -> tuple[float, float]:  # fmt: skip
        """Returns what a short run ended at, and what the whole run is expected to end at.

        Args:
            start: the event that the short run began with.
            end: the event that it ended with.
            options: those that `tune` chose.
            default: the settings that are compared with.
            seconds: its budget.
            budget_s: of the whole run.
        """

    @abstractmethod
    def told(self, measured: float, expected: float) -> str:
        """Returns both as words."""

    @abstractmethod
    def figure(self, value: float, has_unit: bool = True) -> str:
        """Returns one figure as words."""


def open_axes(
    axes: Collection[str], given: Collection[str], fields: Mapping[str, tuple[str, ...]]
) -> list[str]:
    """Returns the axes of which no option was given."""
    return [axis for axis in axes if not set(fields[axis]) & set(given)]


def names_of(options: TrainingOptions, names: Collection[str]) -> dict[str, Any]:
    """Returns some options by name."""
    return {name: getattr(options, name) for name in names}


def in_turns(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Returns the single changes: the first of every axis, then the second ones."""
    columns = itertools.zip_longest(
        *([(axis, v) for v in found[1:]] for axis, found in values.items())
    )
    return [dict([pair]) for row in columns for pair in row if pair is not None]
