"""`CompressReport`: what a compression cost and what it brought."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np

from fastlstm.errors import DataError, QualityError
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.system.measurements import CpuTimer
from fastlstm.system.storage import encode_json

SideT = TypeVar("SideT")

REPORT_FILE = "compression.json"
_ROUNDS = 3
_QUIET_SHARE = 0.9
"""Of the time of one thread: less CPU time than this, and others had the cores."""


@dataclass(frozen=True, kw_only=True)
class ModelFigures:
    """A model before or after.

    Attributes:
        path: its run.
        sha256: of its model.safetensors.
        weights: format in the file.
        num_parameters: number of weights, zeros included.
        num_nonzero: of these that are not zero.
        file_bytes: of model.safetensors.
        resident_bytes: of the weights in memory, as they are used.
        kernel: what it runs on.
        speed: by number of streams (texts) or windows at once: characters or windows a second.
        quality: bits per character, or the error of a forecaster; None where it was not measured.
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
    """How the quality changed: result minus source, on the same data.

    Attributes:
        difference: in the measure's unit.
        low: lower end of the 95 % bootstrap interval of the difference; None where there are too
            few blocks of data for one.
        high: its upper end, or None.
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
    """How far the result's outputs are from the source's.

    Attributes:
        what: the outputs: "logits" or "forecasts".
        largest: absolute difference.
        rms: root of the mean squared difference.
        num_compared: tokens or windows.
        agreement: share of tokens at which both find the same token likeliest; None for tables.
    """

    what: Literal["logits", "forecasts"]
    largest: float
    rms: float
    num_compared: int
    agreement: float | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingFigures:
    """What training took.

    Attributes:
        steps: optimizer steps.
        seconds: wall clock of the run, over all its starts.
        teacher_s: of these, spent in the teacher; 0 without one.
        reason: why it ended.
    """

    steps: int
    seconds: float
    teacher_s: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class CompressReport:
    """Result of `compress`; compression.json holds the same.

    Attributes:
        kind: "text" or "forecaster".
        path: the run directory that was written; `LM.load(report.path)` takes it.
        methods: what was done, in order, such as ["prune 90 % in blocks", "int8"].
        source: the model before.
        result: the model after.
        measure: of quality; "bits_per_char" of a text.
        change: of the quality; None where it was not measured.
        not_measured: why not, or None.
        outputs: how far the outputs moved; None where they were not compared.
        speed_unit: "characters" or "windows".
        lacks: what this CPU lacks for the result's fastest kernels.
        training: what it took; None where nothing was trained.
        max_loss: as given.
        is_published: False where the loss was larger than `max_loss`.
        notes: remarks for the user.
        scores: of a forecaster, by part of its table, then "source" or "result", then measure.
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
        """What `max_loss` limits: bits per character, or the relative increase of an error."""
        if self.change is None:
            return None
        if self.kind == "text":
            return self.change.difference
        difference, before = self.change.difference, self.source.quality
        return difference / before if before else math.copysign(math.inf, difference or -1.0)

    def checked(self) -> CompressReport:
        """Returns the report with `is_published` as `max_loss` decides; DataError if not
        measured."""
        if self.max_loss is None:
            return self
        if self.loss is None:
            raise DataError(f"`max_loss` cannot be checked: {self.not_measured}; give `data`")
        return dataclasses.replace(self, is_published=self.loss <= self.max_loss)

    def to_json(self) -> bytes:
        """Returns the content of compression.json."""
        return encode_json(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, as compression.json holds them."""
        return dataclasses.asdict(self)


def speeds_in_turns(
    sides: Sequence[SideT], counts: Sequence[int], speed: Callable[[SideT, int], float]
) -> list[dict[int, float]]:
    """Returns each side's speeds by count of streams or windows at once.

    They are the medians of 3 rounds, in which the sides take turns; `speed` measures one of them.
    """
    medians = [dict[int, float]() for _ in sides]
    for count in counts:
        rounds = [[speed(side, count) for side in sides] for _ in range(_ROUNDS)]
        for own, taken in zip(medians, zip(*rounds, strict=True), strict=True):
            own[count] = float(np.median(taken))
    return medians


def notes_of_speed(timer: CpuTimer) -> list[str]:
    """Returns what is noted of speeds that were measured within a timer of one thread."""
    if not timer.was_busy(_QUIET_SHARE):
        return []
    return ["speeds were measured while the machine was busy: idle it is faster"]


def pruning_method(share: float, structured: str, units: tuple[int, int]) -> str:
    """Returns what was pruned, in words; `units` are a layer's before and after."""
    if structured == "units":
        before, after = units
        removed = f"{100 * (1 - after / before):.4g} % of the hidden units pruned"
        return f"{removed} ({before:,} -> {after:,})"
    what = {"none": "weights", "blocks": "blocks of weights"}[structured]
    return f"{100 * share:g} % of the {what} pruned"


def quality_error(report: CompressReport, *, is_trained: bool) -> QualityError:
    """Returns the error for a result whose loss is above the limit."""
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
