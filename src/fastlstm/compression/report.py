"""`CompressReport`: a model before and after its compression."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import DataError, QualityError
from fastlstm.report.compression import compression_rows
from fastlstm.report.html import InNotebook
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.system.measurements import CpuTimer

SideT = TypeVar("SideT")

REPORT_FILE = "compression.json"
_ROUNDS = 3
_QUIET_SHARE = 0.9
"""Share of the time of one thread; with less CPU time, other processes had the cores."""
MIN_BLOCKS = 10
"""Fewer blocks say too little about how the values scatter."""
_MAX_BLOCKS, _NUM_BLOCKS, _BLOCK = 1000, 20, 200
_SAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class ModelFigures:
    """A model before or after its compression; hash and `file_bytes` of model.safetensors.

    Attributes:
        weights: format in the file.
        num_parameters: weights, with zeros.
        resident_bytes: size of the weights in memory.
        speed: characters (or windows) a second by number of streams (or windows) at once.
        quality: bits per character, or the error of a forecaster; None if not measured.
    """

    path: str
    sha256: str
    weights: str
    num_parameters: int
    num_nonzero: int
    file_bytes: int
    resident_bytes: int
    kernel: str
    speed: dict[int, float]
    quality: float | None = None


@dataclass(frozen=True, kw_only=True)
class Change:
    """The change of quality: result minus source, on the same data.

    Attributes:
        difference: in the unit of the measure.
        low, high: 95 % bootstrap interval of the difference; None for too few blocks of data.
        num_scored: tokens or windows.
        scored_on: name of the text or table.
    """

    difference: float
    low: float | None
    high: float | None
    num_scored: int
    scored_on: str


@dataclass(frozen=True, kw_only=True)
class OutputErrors:
    """The distance of the outputs of source and result.

    Attributes:
        largest, rms: largest absolute difference, and root of the mean squared difference.
        num_compared: tokens or windows.
        agreement: share of tokens for which both models predict the same one; None for tables.
    """

    what: Literal["logits", "forecasts"]
    largest: float
    rms: float
    num_compared: int
    agreement: float | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingFigures:
    """The cost of training.

    Attributes:
        seconds: wall clock of all starts of the run.
        teacher_s: seconds of these that the teacher took.
        reason: why training ended.
    """

    steps: int
    seconds: float
    teacher_s: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class CompressReport(InNotebook):
    """Result of `compress`; compression.json holds the same.

    Attributes:
        kind: "text" or "forecaster".
        path: the run directory of the result; `LM.load(report.path)` takes it.
        methods: the methods in order, such as ["90 % of the blocks of weights pruned", "int8, …"].
        source: the model before.
        result: the model after.
        measure: measure of quality; "bits_per_char" for a text.
        change: change of quality; None if not measured.
        not_measured: why quality was not measured, or None.
        outputs: distance of the outputs; None if not compared.
        speed_unit: "characters", "tokens" or "windows".
        lacks: what this CPU lacks for the fastest kernels of the result.
        training: cost of training; None without training.
        max_loss: as given.
        is_published: False if the loss is above `max_loss`.
        notes: remarks for the user.
        scores: scores of a forecaster, by part of its table, then "source" or "result", then
            measure.
    """

    kind: Literal["text", "forecaster"]
    path: str
    methods: list[str]
    source: ModelFigures
    result: ModelFigures
    measure: str
    change: Change | None
    not_measured: str | None
    outputs: OutputErrors | None
    speed_unit: str
    lacks: list[str]
    training: TrainingFigures | None
    max_loss: float | None
    is_published: bool
    notes: list[str]
    scores: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)

    def __fspath__(self) -> str:
        return self.path

    @property
    def loss(self) -> float | None:
        """The loss that `max_loss` limits: bits per character, or the relative rise of an error."""
        if self.change is None:
            return None
        if self.kind == "text":
            return self.change.difference
        difference, before = self.change.difference, self.source.quality
        return difference / before if before else math.copysign(math.inf, difference or -1.0)

    def checked(self) -> CompressReport:
        """Returns the report with `is_published` set by `max_loss`; DataError if not measured."""
        if self.max_loss is None:
            return self
        if self.loss is None:
            raise DataError(f"`max_loss` cannot be checked: {self.not_measured}; give `data`")
        return dataclasses.replace(self, is_published=self.loss <= self.max_loss)

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of compression.json."""
        return dataclasses.asdict(self)

    def _rows(self) -> list[tuple[str, str]]:
        return compression_rows(self.to_dict())


def speeds_in_turns(
    sides: Sequence[SideT], counts: Sequence[int], speed: Callable[[SideT, int], float]
) -> list[dict[int, float]]:
    """Returns the speeds of each side by count of streams or windows at once.

    A speed is the median of 3 rounds, in which the sides take turns; `speed` measures one side.
    """
    medians = [dict[int, float]() for _ in sides]
    for count in counts:
        rounds = [[speed(side, count) for side in sides] for _ in range(_ROUNDS)]
        for own, taken in zip(medians, zip(*rounds, strict=True), strict=True):
            own[count] = float(np.median(taken))
    return medians


def notes_of_speed(timer: CpuTimer) -> list[str]:
    """Returns the notes on speeds that were measured within a timer of one thread."""
    if not timer.was_busy(_QUIET_SHARE):
        return []
    return ["the machine was busy while speeds were measured: an idle machine is faster"]


def quality_error(report: CompressReport, *, is_trained: bool) -> QualityError:
    """Returns the error for a result with a loss above the limit."""
    loss, limit, change = report.loss, report.max_loss, report.change
    before, after = report.source.quality, report.result.quality
    assert loss is not None
    assert limit is not None
    assert change is not None
    if report.kind == "text":
        grew, most = f"bits/char grew by {loss:.4f}", ""
    else:
        grew, most = f"the {report.measure} grew by {100 * loss:.4g} %", f" ({100 * limit:g} %)"
    has_earlier = RunDirectory(report.path).has_published()
    text = (
        f"{grew}, from {before:.4f} to {after:.4f} on {change.scored_on}, more than"
        f" `max_loss={limit:g}`{most}; "
    )
    if has_earlier:
        text += f"'{report.path}' keeps the model that was published there before. "
    else:
        text += f"nothing is published in '{report.path}'. "
    if is_trained:
        is_over = report.training is not None and report.training.reason.startswith("no gain")
        more = "a larger `patience`" if is_over else "more `steps` or `budget`"
        text += (
            f"Its checkpoints stay. Start it again with `resume=True` and {more} to train on; with"
            " a larger `max_loss` it publishes the model"
        )
    else:
        text += "Give a `budget` to train the model, which loses less, or a larger `max_loss`"
    error = QualityError(text)
    error.report = report.to_dict()
    return error


def bootstrap_interval(
    values: NDArray[Any], weights: NDArray[Any], block: int | None = None
) -> tuple[float, float] | tuple[None, None]:
    """Returns the 95 % bootstrap interval of ``sum(values) / sum(weights)``, both `(n,)`.

    Neighbouring values depend on each other, so it draws blocks of at least `block` values, 2,000
    times, with a fixed seed; by default blocks of 200, or 20 shorter ones. Fewer than 10 blocks
    give (None, None).
    """
    least = min(_NUM_BLOCKS, len(values)) if block is None else 0
    num = min(_MAX_BLOCKS, max(least, len(values) // (block or _BLOCK)))
    if num < MIN_BLOCKS:
        return None, None
    edges = np.linspace(0, len(values), num, endpoint=False).astype(np.int64)
    sums, sizes = (np.add.reduceat(a.astype(np.float64), edges) for a in (values, weights))
    drawn = np.random.default_rng(0).integers(num, size=(_SAMPLES, num))
    ratios = sums[drawn].sum(1) / np.maximum(sizes[drawn].sum(1), 1.0)
    low, high = np.percentile(ratios, (2.5, 97.5))
    return float(low), float(high)
