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
from fastlstm.errors import DataError
from fastlstm.forecast.calibration import Calibration, calibrate
from fastlstm.forecast.closing import MIN_CALIBRATED
from fastlstm.forecast.data.scaled_windows import ScaledWindows
from fastlstm.forecast.data.splits import Split
from fastlstm.forecast.data.window_index import WindowIndex
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
        self._table, self._scored, self._blocks = "", "", dict[str, list[Any]]()
        self._before: dict[str, BlockErrors] = {}
        self._valid: WindowIndex | None = None
        self._limit_s: float | None = None
        self.why_not, self.notes, self.seconds = "", list[str](), _SPEED_S
        weights = "fp32" if source.compression is None else source.compression.weights
        is_used = not config.is_new_student or config.distil is None
        if weights != "fp32" and is_used:
            role = "teacher's" if config.is_new_student else "start"
            self.notes.append(f"{run} is stored as {weights}: its rounded weights are the {role}")

    def begin(
        self,
        split: Split,
        inputs: ScaledWindows,
        table: str,
        *,
        is_own: bool,
        is_trained: bool,
        budget_s: float | None = None,
    ) -> WindowIndex | None:
        """Measures the errors of the source, on windows that favour neither side.

        The intervals of a result are calibrated on the validation part. Those of the source are so
        for its own table. For another the source is calibrated there, too, and the test part alone
        is scored; a result that is only rounded keeps the intervals of the source where one part
        has no windows.

        Args:
            split: of the table.
            inputs: its windows.
            table: its name.
            is_own: the source was trained and calibrated on it.
            is_trained: the result is trained on it, and calibrated by that.
            budget_s: of the training, or None.

        Returns:
            The validation windows that a result that is only rounded is to be calibrated on, or
            None.

        Raises:
            DataError: the table is too short for a window, or `max_loss` cannot be checked on it.
        """
        started = time.perf_counter()
        self._inputs, self._table = inputs, table
        limit_s = None if budget_s is None else _SHARE * budget_s
        blocks = {
            part: found for part in PARTS if (found := blocks_of(split, inputs, self._source, part))
        }
        valid, has_both = None, len(blocks) == len(PARTS)
        if is_own or is_trained or has_both or not blocks:
            sizes = self._source.network.config
            valid = split.windows(inputs.table, "valid", sizes.input_size, sizes.horizon)
        if not is_own:
            calibrates = valid is not None
            self.notes += _notes_on_intervals(self._source, table, calibrates, list(blocks))
            if valid is not None:
                calibration = _calibrated(self._source, inputs, valid, limit_s)
                self._source = dataclasses.replace(self._source, calibration=calibration)
            if has_both:
                del blocks["valid"]
        for part, rows in blocks.items():
            errors = block_errors(self._source, inputs, rows, limit_s)
            if errors.num_values.sum():  # else all values are missing
                self._before[part] = errors
                self._blocks[part] = rows[: len(errors.num_values)]
        self._scored = next(iter(blocks))
        if self._scored not in self._blocks:
            self.why_not = f"the {PARTS[self._scored]} part of {table} has no value of the targets"
            if self._config.max_loss is not None:
                raise DataError(
                    f"`max_loss` cannot be checked: {self.why_not}; give another `data` or leave"
                    " out `max_loss`"
                )
        self._valid, self._limit_s = valid, limit_s
        self.seconds = _SPEED_S + time.perf_counter() - started
        if self._config.needs_no_training:  # and RUN's weights, rounded to the nearest
            self.seconds += self.seconds + (limit_s or 0.0)
        return valid

    def calibrated(self, result: StoredForecaster) -> StoredForecaster:
        """Returns a result with intervals of the validation part."""
        assert self._inputs is not None
        assert self._valid is not None
        calibration = _calibrated(result, self._inputs, self._valid, self._limit_s)
        return dataclasses.replace(result, calibration=calibration)

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
        if self._inputs is not None and self._scored in self._blocks:
            after = {
                part: block_errors(result, self._inputs, blocks, self._limit_s)
                for part, blocks in self._blocks.items()
            }
            before = {
                part: errors.first(len(after[part].num_values))
                for part, errors in self._before.items()
            }
            scored_on = f"the {PARTS[self._scored]} part of {self._table}"
            horizon = source.network.config.horizon
            errors_of = before[self._scored], after[self._scored]
            change = change_of(*errors_of, measure, scored_on, horizon)
            qualities = [errors.mean(measure) for errors in errors_of]
            sides = [
                dataclasses.replace(side, quality=quality)
                for side, quality in zip(sides, qualities, strict=True)
            ]
            outputs = output_errors(source, result, self._inputs, self._blocks[self._scored])
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
    about = None if result.compression is None else result.compression.about
    if about is not None and about.get("is_trained") is False:
        return [f"{config.to}, rounded to the nearest, which lost less than training for it"]
    methods, sizes = [], (source.network.config, result.network.config)
    if config.prune is not None:
        units = sizes[0].hidden_size, sizes[1].hidden_size
        methods.append(pruning_method(config.prune, config.structured, units))
    if config.is_taught:
        shapes = [f"{s.num_layers} x {s.hidden_size}" for s in sizes]
        new = f", {shapes[1]} hidden units instead of {shapes[0]}" if config.is_new_student else ""
        methods.append(f"distilled from {config.distil or run}{new}")
    if config.to != "fp32":
        how = "trained with its rounding" if config.trains else "rounded to the nearest"
        methods.append(f"{config.to}, {how}")
    return methods or ["trained on"]


def _calibrated(
    source: StoredForecaster, inputs: ScaledWindows, valid: WindowIndex, limit_s: float | None
) -> Calibration:
    """Returns a calibration of a forecaster; after `limit_s` it leaves windows out."""
    started = time.perf_counter()

    def has_time(done: int) -> bool:
        return time.perf_counter() - started < (limit_s or 0.0) or done < MIN_CALIBRATED

    should_continue = None if limit_s is None else has_time
    return calibrate(source.network, inputs, valid, should_continue=should_continue)


def _notes_on_intervals(
    source: StoredForecaster, table: str, calibrates: bool, parts: list[str]
) -> list[str]:
    """Returns how the intervals are calibrated for a table that is not the source's own."""
    notes: list[str] = []
    if not source.network.output.is_calibrated:
        return notes
    if len(parts) == len(PARTS):
        notes.append(
            f"the intervals of source and result are calibrated on the validation part of {table}"
            " and scored on its test part"
        )
    elif calibrates:
        notes.append(
            f"{table} has no test part: the intervals of source and result are calibrated and"
            " scored on its validation part, where they look better than on later rows"
        )
    else:
        notes.append(
            "the intervals are those of the source, not calibrated anew: they are scored on the"
            f" {PARTS[parts[0]]} part of {table}, the only one with windows"
        )
    return notes


def _notes(result: StoredForecaster) -> list[str]:
    note = None if result.compression is None else result.compression.note
    return [] if note is None else [note]
