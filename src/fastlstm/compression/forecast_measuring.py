"""A forecaster before and after: errors on its table, speed, bytes; as a `CompressReport`."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

from fastlstm.compression.forecast_figures import (
    PARTS,
    BlockErrors,
    block_errors,
    blocks_of,
    change_of,
    figures_of,
    measure_of,
    output_errors,
    speeds,
)
from fastlstm.compression.options import CompressConfig
from fastlstm.compression.report import (
    REPORT_FILE,
    CompressReport,
    TrainingFigures,
    notes_of_speed,
    pruning_method,
)
from fastlstm.forecast.data.scaled_windows import ScaledWindows
from fastlstm.forecast.data.splits import Split
from fastlstm.forecast.files import MODEL_FILE, StoredForecaster, forecaster_files
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.system.measurements import CpuTimer

_SHARE = 0.04
"""Of a budget, for the errors of each part, before training and after."""
_SPEED_S = 3.0


class Measuring:
    """Measures a source, and a result beside it.

    Args:
        run: of the source.
        config: what is done to it.
        source: the forecaster.

    Attributes:
        why_not: why errors are not measured.
        notes: remarks for the user.
        seconds: about what `report` takes.
    """

    def __init__(self, run: Path, config: CompressConfig, source: StoredForecaster) -> None:
        self._run, self._config, self._source = run, config, source
        self._inputs: ScaledWindows | None = None
        self._table, self._blocks = "", dict[str, list[Any]]()
        self._before: dict[str, BlockErrors] = {}
        self._limit_s: float | None = None
        self.why_not, self.notes, self.seconds = "", list[str](), _SPEED_S
        if source.compression is not None and source.compression.weights != "fp32":
            self.notes.append(
                f"{run} was stored as {source.compression.weights}: its rounded weights are the"
                " start"
            )

    def begin(
        self,
        split: Split,
        inputs: ScaledWindows,
        table: str,
        budget_s: float | None = None,
    ) -> None:
        """Measures the errors of the source on the validation and the test part."""
        started = time.perf_counter()
        self._inputs, self._table = inputs, table
        limit_s = None if budget_s is None else _SHARE * budget_s
        for part in PARTS:
            if not (blocks := blocks_of(split, inputs, self._source, part)):
                continue
            errors = block_errors(self._source, inputs, blocks, limit_s)
            if errors.num_values.sum():  # else all values are missing
                self._before[part] = errors
                self._blocks[part] = blocks[: len(errors.num_values)]
        self._limit_s = limit_s
        self.seconds = _SPEED_S + time.perf_counter() - started

    def report(
        self, result: StoredForecaster, out: Path, training: TrainingFigures | None
    ) -> tuple[CompressReport, dict[str, bytes]]:
        """Returns the report of a result, and its files with the report among them."""
        source, measure = self._source, measure_of(self._source)
        files = forecaster_files(result)
        with CpuTimer(threads=1) as timer:
            before_s, after_s = speeds([source, result])
        sides = [
            figures_of(source, str(self._run), self._source_file(), before_s),
            figures_of(result, str(out), files[MODEL_FILE], after_s),
        ]
        before, after = dict[str, BlockErrors](), dict[str, BlockErrors]()
        change, outputs = None, None
        if self._inputs is not None and "valid" in self._blocks:
            after = {
                part: block_errors(result, self._inputs, blocks, self._limit_s)
                for part, blocks in self._blocks.items()
            }
            before = {
                part: errors.first(len(after[part].num_values))
                for part, errors in self._before.items()
            }
            change = change_of(before["valid"], after["valid"], measure, self._table)
            qualities = [errors["valid"].mean(measure) for errors in (before, after)]
            sides = [
                dataclasses.replace(side, quality=quality)
                for side, quality in zip(sides, qualities, strict=True)
            ]
            outputs = output_errors(source, result, self._inputs, self._blocks["valid"])
        scores = {
            part: {"source": before[part].means_of_all(), "result": after[part].means_of_all()}
            for part in after
        }  # fmt: skip
        methods = methods_of(self._run, self._config, source, result)
        report = CompressReport(
            kind="forecaster", path=str(out), methods=methods,
            source=sides[0], result=sides[1], measure=measure, change=change,
            not_measured=self.why_not or None, outputs=outputs, speed_unit="windows", lacks=[],
            training=training, max_loss=self._config.max_loss, is_published=True,
            notes=[*self.notes, *_notes(result), *notes_of_speed(timer)], scores=scores,
        )  # fmt: skip
        report = report.checked()
        return report, {**files, REPORT_FILE: report.to_json()}

    def _source_file(self) -> bytes:
        return RunDirectory(self._run).read_published([MODEL_FILE])[1][MODEL_FILE]


def methods_of(
    run: Path, config: CompressConfig, source: StoredForecaster, result: StoredForecaster
) -> list[str]:
    """Returns what was done, in order."""
    methods, sizes = [], (source.network.config, result.network.config)
    if config.prune is not None:
        units = sizes[0].hidden_size, sizes[1].hidden_size
        methods.append(pruning_method(config.prune, config.structured, units))
    if config.distils:
        shapes = [f"{s.num_layers} x {s.hidden_size}" for s in sizes]
        new = f", {shapes[1]} hidden units instead of {shapes[0]}" if config.is_new_student else ""
        methods.append(f"distilled from {config.distil or run}{new}")
    if config.to != "fp32":
        how = "trained with its rounding" if config.trains else "rounded to the nearest"
        methods.append(f"{config.to}, {how}")
    return methods or ["trained on"]


def _notes(result: StoredForecaster) -> list[str]:
    note = None if result.compression is None else result.compression.note
    return [] if note is None else [note]
