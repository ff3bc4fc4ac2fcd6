"""What `tune` needs to know of what is trained: a text model or a forecaster."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fastlstm.system import hardware
from fastlstm.tuning.size_limits import sizes_within_limits

if TYPE_CHECKING:
    from fastlstm.runs.events import Event
    from fastlstm.training.trainer import Trainer
    from fastlstm.tuning.size_limits import ModelCost
    from fastlstm.tuning.tune import Search

Changes = Mapping[str, Any]
"""Value by axis, of the axes that differ from the default."""
Show = Callable[[str, str], None]
"""Called with a label and a text of everything that is found."""
MIN_STEPS_PER_EPOCH = 8


@dataclass(frozen=True)
class Space:
    """The settings that a run would have, and what is tried in their place.

    Attributes:
        options: of the default, by field; all that the axes may change.
        values: of every axis, the default's first; learning rates are any around them.
        first: changes that are tried first, the most promising first.
        sizes: of every size: its latency and bytes, and why it was refused.
        units_per_s: speed of the default; 0 where it was not timed.
    """

    options: dict[str, Any]
    values: dict[str, list[Any]]
    first: list[dict[str, Any]]
    sizes: list[dict[str, Any]]
    units_per_s: float = 0.0


@dataclass(frozen=True)
class Job(ABC):
    """A kind of training.

    Attributes:
        stop: polled while runs train; when true, they are stopped.
        fields: by axis, the option that it changes and the others that fix it when they are given.
        names: by axis, what a label says of a value.
        more: further options that changes of an axis may set.
        size: the option of the number of hidden units.
        per: what latency is the time of.
    """

    stop: Callable[[], bool] | None = None
    fields: ClassVar[Mapping[str, tuple[str, ...]]]
    names: ClassVar[Mapping[str, str]]
    more: ClassVar[tuple[str, ...]] = ()
    size: ClassVar[str]
    per: ClassVar[str]

    @property
    def ending(self) -> str:
        """Words behind the figure of the best settings."""
        return " of its longest run"

    @abstractmethod
    def train(self, source: Any, config: Any, **options: Any) -> None:
        """Trains a run as `fastlstm train` does, for comparison with others of the search."""

    @abstractmethod
    def prepare(
        self, trainer: Trainer, given: Collection[str], search: Search, show: Show
    ) -> Space:
        """Returns the settings of a run that was set up, and those to try."""

    @abstractmethod
    def result(
        self, start: Event, end: Event, options: Mapping[str, Any], space: Space, seconds: float,
        budget_s: float,
    ) -> tuple[float, float]:  # fmt: skip
        """Returns what a short run of so many seconds ended at, and what the whole run is expected
        to end at, by the events that the short one began and ended with."""

    @abstractmethod
    def figure(self, value: float, has_unit: bool = True) -> str:
        """Returns one figure as words."""

    def options_of(self, default: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
        """Returns the default options with some changes."""
        options = {**default, **{self.fields[a][0]: v for a, v in changes.items() if a != "lr"}}
        if "lr" in changes:
            options["learning_rate"] = float(f"{options['learning_rate'] * changes['lr']:.4g}")
        return options

    def label_of(self, changes: Changes) -> str:
        """Returns "384 units, batch 16", or "default"."""
        return ", ".join(self.names[a].format(v) for a, v in changes.items()) or "default"

    def open_axes(self, axes: Collection[str], given: Collection[str]) -> list[str]:
        """Returns the axes of which no option was given."""
        return [axis for axis in axes if not set(self.fields[axis]) & set(given)]

    def space_around(
        self, config: Any, axes: Collection[str], ladder: Sequence[int],
        cost: Callable[[Any], ModelCost], around: Callable[[Any], Mapping[str, Sequence[Any]]],
        search: Search, show: Show,
    ) -> tuple[Any, Space]:  # fmt: skip
        """Returns the default, of the nearest size within the limits, and what is tried around it.

        `cost` measures the model of a configuration; `around` returns the values of every axis but
        size, threads and precision.
        """
        size, limits = getattr(config, self.size), search.limits
        wanted = sizes_around(size, ladder, limits.has_any) if "size" in axes else [size]

        def of_size(other: int) -> Any:
            changes = {} if other == size else self.options_of({}, {"size": other})
            return replace(config, **changes)

        sizes = sizes_within_limits(self, wanted, lambda each: cost(of_size(each)), limits, show)
        fit = [each[self.size] for each in sizes if each["refusal"] is None]
        nearest = min(fit, key=lambda each: abs(each - size))
        config = of_size(nearest)
        threads, cores = config.threads or torch.get_num_threads(), hardware.cores()
        bf16 = ["fp32", "bf16"] * hardware.may_gain_by_bf16()
        found = {
            **around(config), "size": [nearest, *fit],
            "threads": [threads, cores, max(1, cores // 2), 1],
            "precision": [config.precision, *bf16],
        }  # fmt: skip
        values = {a: list(dict.fromkeys(found[a])) for a in self.fields if a in axes}
        values = {axis: tried for axis, tried in values.items() if len(tried) > 1}
        names = [*(names[0] for names in self.fields.values() if names), *self.more]
        resolved = {name: getattr(config, name) for name in names}
        default = {name: value for name, value in resolved.items() if value is not None}
        return config, Space(default, values, single_changes(values), sizes)


def single_changes(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Returns the single changes: the first of every axis, then the second ones."""
    columns = itertools.zip_longest(
        *([(axis, v) for v in found[1:]] for axis, found in values.items())
    )
    return [dict([pair]) for row in columns for pair in row if pair is not None]


def sizes_around(size: int, ladder: Sequence[int], has_limits: bool) -> list[int]:
    """Returns a size, its two neighbours on each side, nearest first, and with limits all smaller
    ones."""
    at = ladder.index(size) if size in ladder else None
    near = [] if at is None else [n for i, n in enumerate(ladder) if 0 < abs(i - at) <= 2]
    near.sort(key=lambda n: abs(ladder.index(n) - (at or 0)))
    smaller = [n for n in reversed(ladder) if has_limits and n < size and n not in near]
    return [size, *near, *smaller]
