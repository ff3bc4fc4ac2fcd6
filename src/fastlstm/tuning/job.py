"""The kinds of training that `tune` searches settings for: their axes, limits and figures."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fastlstm.errors import UsageError
from fastlstm.report.terminal import short_bytes
from fastlstm.system import hardware

if TYPE_CHECKING:
    from fastlstm.runs.events import Event
    from fastlstm.training.trainer import Trainer
    from fastlstm.tuning.size_limits import ModelCost, SizeLimits
    from fastlstm.tuning.tune import Search

Changes = Mapping[str, Any]
"""Value by axis, for the axes that differ from the default."""
Show = Callable[[str, str], None]
"""Shows a label and a text."""
MIN_STEPS_PER_EPOCH = 8


@dataclass(frozen=True)
class Space:
    """The default settings and the values to try.

    Attributes:
        options: options of the default that the axes may change.
        values: values by axis, the default first; any learning rate around them may be tried.
        first: changes to try first, the most promising first.
        sizes: latency, bytes and refusal of every size.
        units_per_s: speed of the default; 0 if not measured.
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
        stop: polled in training; ends it when true.
        fields: by axis, the option that it changes, then options that fix the axis too.
        names: by axis, the format of a value in a label.
        more: further options that an axis may change.
        size: the option of the number of hidden units.
        per: the unit of latency.
    """

    stop: Callable[[], bool] | None = None
    fields: ClassVar[Mapping[str, tuple[str, ...]]]
    names: ClassVar[Mapping[str, str]]
    more: ClassVar[tuple[str, ...]] = ()
    size: ClassVar[str]
    per: ClassVar[str]

    @property
    def ending(self) -> str:
        """Words after the figure of the best settings."""
        return " of its longest run"

    @abstractmethod
    def train(self, source: Any, config: Any, **options: Any) -> None:
        """Trains a run as `fastlstm train` does, comparable with other runs of the search."""

    @abstractmethod
    def prepare(self, trainer: Trainer, search: Search, show: Show) -> Space:
        """Returns the default of a planned run, and the values to try."""

    @abstractmethod
    def result(
        self, start: Event, end: Event, options: Mapping[str, Any], space: Space, seconds: float,
        budget_s: float,
    ) -> tuple[float, float]:  # fmt: skip
        """Returns the result of a short run of so many seconds, and the expected result of the
        whole run; `start` and `end` are events of the short run."""

    @abstractmethod
    def figure(self, value: float, has_unit: bool = True) -> str:
        """Returns a result as text."""

    def options_of(self, default: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
        options = {**default, **{self.fields[a][0]: v for a, v in changes.items() if a != "lr"}}
        if "lr" in changes:
            options["learning_rate"] = float(f"{options['learning_rate'] * changes['lr']:.4g}")
        return options

    def label_of(self, changes: Changes) -> str:
        """Returns "384 units, batch 16", or "default"."""
        return ", ".join(self.names[a].format(v) for a, v in changes.items()) or "default"

    def open_axes(self, axes: Collection[str], given: Collection[str]) -> list[str]:
        return [axis for axis in axes if not set(self.fields[axis]) & set(given)]

    def space_around(
        self, config: Any, ladder: Sequence[int], cost: Callable[[Any], ModelCost],
        around: Callable[[Any], Mapping[str, Sequence[Any]]], search: Search, show: Show,
    ) -> tuple[Any, Space]:  # fmt: skip
        """Returns the default, of the nearest size within the limits, and the values around it.

        `cost` measures the model of a configuration; `around` returns the values of every axis but
        size, threads and precision.
        """
        axes, limits = self.open_axes(search.axes, search.given), search.limits
        size = getattr(config, self.size)
        has_limits = limits.max_latency_s is not None or limits.max_bytes is not None
        wanted = sizes_around(size, ladder, has_limits) if "size" in axes else [size]

        def of_size(other: int) -> Any:
            changes = {} if other == size else self.options_of({}, {"size": other})
            return replace(config, **changes)

        sizes = self._sizes(wanted, lambda each: cost(of_size(each)), limits, show)
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

    def _sizes(
        self, wanted: Iterable[int], cost: Callable[[int], ModelCost], limits: SizeLimits,
        show: Show,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Returns `Space.sizes`; UsageError if every size is over a limit."""
        sizes = list[dict[str, Any]]()
        for units in wanted:
            measured = cost(units)
            refusal = limits.refusal(measured, self.per)
            sizes.append({
                self.size: units, "latency_s": measured.latency_s,
                "latency_high_s": measured.high_s, "num_bytes": measured.num_bytes,
                "refusal": refusal,
            })  # fmt: skip
            limit = limits.max_latency_s
            within = "" if limit is None else f", limit {1e6 * limit:.1f} us"
            about = f"{measured.latency_text(self.per)}{within}, {short_bytes(measured.num_bytes)}"
            show(f"{units} units", f"refused: {refusal}" if refusal else about)
        if all(size["refusal"] for size in sizes):
            fastest = min(sizes, key=lambda size: float(size["latency_s"]))
            raise UsageError(
                f"no size keeps the limits; the fastest has {fastest[self.size]} units:"
                f" {fastest['refusal']}"
            )
        return sizes


def single_changes(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Returns changes of one axis: the first of every axis, then the second ones."""
    columns = itertools.zip_longest(
        *([(axis, v) for v in found[1:]] for axis, found in values.items())
    )
    return [dict([pair]) for row in columns for pair in row if pair is not None]


def sizes_around(size: int, ladder: Sequence[int], has_limits: bool) -> list[int]:
    """Returns a size, then its two neighbours on each side, nearest first; with limits also all
    smaller sizes."""
    at = ladder.index(size) if size in ladder else None
    near = [] if at is None else [n for i, n in enumerate(ladder) if 0 < abs(i - at) <= 2]
    near.sort(key=lambda n: abs(ladder.index(n) - (at or 0)))
    smaller = [n for n in reversed(ladder) if has_limits and n < size and n not in near]
    return [size, *near, *smaller]
