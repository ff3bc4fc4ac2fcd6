"""Compresses a forecaster: reads, rounds, trains and measures it."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastlstm.compression.forecast_task import CompressedForecastTask, read_teacher
from fastlstm.compression.options import TRAINING, CompressConfig
from fastlstm.compression.pruning import without_units
from fastlstm.compression.report import (
    MIN_BLOCKS,
    Change,
    CompressReport,
    ModelFigures,
    OutputErrors,
    TrainingFigures,
    bootstrap_interval,
    notes_of_speed,
    speeds_in_turns,
)
from fastlstm.compression.session import (
    WAYS_OF_FORECASTERS,
    Attempt,
    CompressionSession,
    CompressionWay,
    Result,
)
from fastlstm.errors import ConfigError, DataError
from fastlstm.forecast.calibration import calibrate
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.error_measures import QuantileScores
from fastlstm.forecast.data.preparation import prepare
from fastlstm.forecast.data.scaled_windows import ScaledWindows
from fastlstm.forecast.data.splits import Split, split_table
from fastlstm.forecast.data.window_index import WindowIndex, spread_out
from fastlstm.forecast.evaluation import INTERVALS
from fastlstm.forecast.files import (
    MODEL_FILE,
    Compression,
    StoredForecaster,
    forecaster_files,
    read_forecaster,
)
from fastlstm.forecast.model.network import FIXED, ForecasterConfig, ForecastNetwork
from fastlstm.forecast.plan import fitted_scaler
from fastlstm.forecast.table_schema import apply_schema
from fastlstm.forecast.train import source_text, train_forecaster
from fastlstm.forecast.window_forecaster import WindowForecaster
from fastlstm.ops.explain import explain
from fastlstm.report.history import read_history
from fastlstm.runs.manifest import read_manifest
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.runs.weight_formats import QuantizedMatrix, as_floats, in_format
from fastlstm.system.fields import ENDS
from fastlstm.system.measurements import CpuTimer, calls_per_s
from fastlstm.training.trainer import Trainer

BATCHES = (1, 256)
"""Windows at once in a measurement of speed: one, and the most that `forecast` and `serve` run at
once."""
PARTS = {"valid": "validation", "test": "test"}
_BLOCK, _NUM_BLOCKS = 64, 32
"""Consecutive windows of a block; blocks of a part."""
_COMPARED = 256
_SPEED_S = 0.15
_BUDGET = "5m"
_RATE = 0.5
"""Share of the peak learning rate of a chain's first run that training on from its weights uses."""
_SHARE = 0.04
"""Share of a budget for the errors of each part before training, and again after it."""
_MEASURING_S = 3.0
"""Time of a budget kept for measuring speed."""


class ForecastCompression(CompressionSession):
    """A forecaster, its table, and its errors.

    Attributes:
        stored: the forecaster, calibrated anew for a table that is not its own.
        table: table to train and measure on; None if there is none, with the reason in `why_not`.
        why_not: why errors are not measured.
    """

    unit = "windows"

    def __post_init__(self) -> None:
        if "temperature" in self.given:
            raise ConfigError(
                "`temperature` is for the predictions of a text model, not for forecasts; leave it"
                " out"
            )
        self.stored = stored = read_forecaster(self.run)
        record = read_manifest(self.run).files[MODEL_FILE]
        self.sizes: ForecasterConfig = stored.network.config
        self.sha256, self.learning_rate = record.sha256, stored.config.learning_rate
        self.before = {} if stored.compression is None else stored.compression.about
        about = {"model_bytes": record.size, "learning_rate": self.peak_rate}
        self.facts = {**about, "model": dataclasses.asdict(self.sizes)}
        self.table, self.why_not = self._find_table()
        self._name = "" if self.table is None else source_text(self.table)
        self.own_facts = {"data": self._name or None}
        self._teacher: StoredForecaster | None = None
        self._is_own = False
        self._scored, self._blocks = "", dict[str, list[Any]]()
        self._before: dict[str, BlockErrors] = {}
        self._inputs: ScaledWindows | None = None
        self._valid: WindowIndex | None = None
        self._limit_s: float | None = None

    def _find_table(self) -> tuple[Any, str]:
        run = self.run
        if self.data is not None:
            return self.data, ""
        recorded = read_history(RunDirectory(run).metrics_path).start.get("source")
        name = str(recorded or self.before.get("data") or "")
        paths = name.split(", ")
        if not name:
            return None, f"{run} does not name its table"
        if not all(Path(path).is_file() for path in paths):
            return None, f"the table of {run}, {name:.200}, does not exist any more"
        return paths if len(paths) > 1 else paths[0], ""

    def ways(self) -> tuple[CompressionWay, ...]:
        return WAYS_OF_FORECASTERS

    def attempt(self, config: CompressConfig) -> Attempt:
        result = with_rounded_weights(self._start(config))
        num_bytes = len(forecaster_files(result)[MODEL_FILE])
        if config.target is None:
            return Attempt(num_bytes, None)
        speed = speeds_in_turns([result], [config.streams], _speed)[0]
        return Attempt(num_bytes, speed[config.streams])

    def open_teacher(self) -> dict[str, str] | None:
        path = self.config.distil
        if path is None:
            self._teacher = self.stored if self.config.is_taught else None
            return None
        self._teacher = read_teacher(path, self.stored)
        sha256 = read_manifest(Path(path)).files[MODEL_FILE].sha256
        return {"path": path, "model_sha256": sha256}

    def student_text(self, sizes: ForecasterConfig) -> str:
        new, old = (f"{s.num_layers} x {s.hidden_size}" for s in (sizes, self.sizes))
        return f"{new} hidden units instead of {old}"

    def _start(self, config: CompressConfig) -> StoredForecaster:
        """Returns the forecaster to train: RUN, RUN without some units, or a new one."""
        source, sizes, network = self.stored, self.sizes, copy.deepcopy(self.stored.network)
        buffers = dict(network.named_buffers())
        weights = dict[str, torch.Tensor](network.named_parameters())
        names = ("hidden_size", "num_layers", "dropout")
        changes: dict[str, Any] = {
            name: value for name in names if (value := getattr(config, name)) is not None
        }
        if config.prune is not None or config.is_new_student:
            changes.setdefault("dropout", 0.0)  # fewer weights and the teacher prevent overfitting
        if config.prune is not None and config.structured == "units":
            weights, smaller = without_units(weights, sizes, config.prune)
            changes["hidden_size"] = smaller.hidden_size
        if changes:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(config.seed)
                network = ForecastNetwork(dataclasses.replace(sizes, **changes))
            fixed = {name: t for name, t in buffers.items() if name.startswith(FIXED)}
            own = fixed if config.is_new_student else {**buffers, **weights}
            network.load_state_dict(own, strict=not config.is_new_student)
            if config.is_new_student and sizes.linear:
                network.zero_head()
        resolved, given = (dataclasses.replace(c, **changes) for c in (source.config, source.given))
        compression = Compression(self.about(config))
        return dataclasses.replace(
            source, config=resolved, given=given, network=network, compression=compression
        )

    def plain(self) -> Result:
        compression = Compression(self.about(self.config))
        result = with_rounded_weights(dataclasses.replace(self.stored, compression=compression))
        is_own = has_own_intervals(self.stored)
        if self._valid is not None:
            assert self._inputs is not None
            calibration = calibrate(
                result.network, self._inputs, self._valid, limit_s=self._limit_s
            )
            result, is_own = dataclasses.replace(result, calibration=calibration), self._is_own
        return result_of(described(result, has_own_intervals=is_own))

    def find_data(self) -> None:
        if self.table is None:
            self.notes.append("the intervals are those of the source, not calibrated anew")
            return
        source = self.stored
        config = dataclasses.replace(source.config, **source.columns)
        dataset = prepare(self.table, config, like=source.schema.timeline)
        inputs = apply_schema(dataset, source)
        split = split_table(dataset.table, dataset.frequency, source.config.split)
        self._is_own = is_own_table(dataset, split, source)
        self._begin(split, inputs, is_trained=False)

    def train(self) -> None:
        if self.table is None:
            raise DataError(f"{self.why_not}; give the table as `data`")
        start = self._start(self.config)
        options = self._options(start)
        train_forecaster(
            self.table, options, out=self.out, resume=self.resume,
            given=[n for n in TRAINING if n in self.given and hasattr(options, n)],
            observers=self.observers, callbacks=self.all_callbacks(),
            stop=self.stop, start=start, make_task=self._make_task, needs_steps=False,
            began=self.started,
        )  # fmt: skip

    def _options(self, start: StoredForecaster) -> ForecastConfig:
        config = self.config
        fields = {field.name for field in dataclasses.fields(ForecastConfig)} - {"dropout"}
        values = config.training_options(fields)
        if all(values[name] is None for name in ENDS):
            values["budget"] = _BUDGET
        if "precision" not in self.given:
            del values["precision"]  # "auto" measures for texts only
        if config.learning_rate is None:
            peak = None if config.is_new_student else self.peak_rate
            values["learning_rate"] = None if peak is None else _RATE * peak
        return dataclasses.replace(start.given, **values)

    def _make_task(self, *args: Any) -> CompressedForecastTask:
        _, _, dataset, split, inputs, _, _, budget_s = args
        self._is_own = is_own_table(dataset, split, self.stored)
        teacher = None if self._teacher is None else copy.deepcopy(self._teacher.network)
        seconds = self._begin(split, inputs, is_trained=True, budget_s=budget_s)
        return CompressedForecastTask(
            *args, teacher=teacher, alpha=self.config.alpha, finished=self._finished,
            approved=self._approve, about=self.end_event, measuring_s=seconds,
        )  # fmt: skip

    def _finished(self, stored: StoredForecaster) -> StoredForecaster:
        return described(with_rounded_weights(stored), has_own_intervals=self._is_own)

    def _approve(
        self, stored: StoredForecaster, trainer: Trainer
    ) -> tuple[StoredForecaster, Mapping[str, bytes]] | None:
        best = self.conclude(trainer, partial(result_of, stored))
        return None if best is None else (best.model, self.report_files())

    def _begin(
        self, split: Split, inputs: ScaledWindows, *, is_trained: bool,
        budget_s: float | None = None,
    ) -> float:  # fmt: skip
        """Measures the errors of the source; returns an estimate of the seconds for the results.

        The result is calibrated on the validation part. If the source was not calibrated on this
        table (`_is_own`), the source is calibrated there too, and only the test part is scored. A
        rounded result keeps the intervals of the source if only one part has windows. Raises
        DataError: the table is too short for a window, or `max_loss` cannot be checked on it.
        """
        started, config, sizes = time.perf_counter(), self.config, self.sizes
        self._inputs = inputs
        self._limit_s = limit_s = None if budget_s is None else _SHARE * budget_s
        blocks = {
            part: found for part in PARTS if (found := blocks_of(split, inputs, self.stored, part))
        }
        has_both = len(blocks) == len(PARTS)
        if self._is_own or is_trained or has_both or not blocks:
            self._valid = split.windows(inputs.table, "valid", sizes.input_size, sizes.horizon)
        if not self._is_own:
            if self.stored.network.output.is_calibrated:
                self.notes.append(self._note_on_intervals(list(blocks)))
            if self._valid is not None:
                calibration = calibrate(self.stored.network, inputs, self._valid, limit_s=limit_s)
                self.stored = dataclasses.replace(self.stored, calibration=calibration)
            if has_both:
                del blocks["valid"]
        for part, rows in blocks.items():
            errors = block_errors(self.stored, inputs, rows, limit_s)
            if errors.num_values.sum():  # otherwise every value is missing
                self._before[part] = errors
                self._blocks[part] = rows[: len(errors.num_values)]
        self._scored = next(iter(blocks))
        if self._scored not in self._blocks:
            name = f"the {PARTS[self._scored]} part of {self._name}"
            self.why_not = f"{name} has no value of a target"
            if config.max_loss is not None:
                raise DataError(
                    f"`max_loss` cannot be checked: {self.why_not}; give another `data` or leave"
                    " out `max_loss`"
                )
        return _MEASURING_S + time.perf_counter() - started

    def _note_on_intervals(self, parts: list[str]) -> str:
        table = self._name
        if len(parts) == len(PARTS):
            return (
                "the intervals of source and result are calibrated on the validation part of"
                f" {table} and scored on its test part"
            )
        if self._valid is not None:
            return (
                f"{table} has no test part: the intervals of source and result are calibrated and"
                " scored on its validation part, and look better there than on later rows"
            )
        return (
            "the intervals are those of the source, not calibrated anew: they are scored on the"
            f" {PARTS[parts[0]]} part of {table}, the only part with windows"
        )

    def _note_on_start(self) -> list[str]:
        config, compression = self.config, self.stored.compression
        is_used = not config.is_new_student or config.distil is None
        if compression is None or compression.weights == "fp32" or not is_used:
            return []
        role, run = "teacher's" if config.is_new_student else "start", self.run
        return [f"{run} is stored as {compression.weights}: its rounded weights are the {role}"]

    def measured(
        self, result: Result, methods: list[str], training: TrainingFigures | None
    ) -> CompressReport:
        source, measure = self.stored, measure_of(self.stored)
        model: StoredForecaster = result.model
        source_file = RunDirectory(self.run).read_published([MODEL_FILE])[1][MODEL_FILE]
        with CpuTimer(threads=1) as timer:
            speed = speeds([source, model])
        sides = [
            figures_of(source, str(self.run), source_file, speed[0]),
            figures_of(model, str(self.out), result.files[MODEL_FILE], speed[1]),
        ]
        before, after = dict[str, BlockErrors](), dict[str, BlockErrors]()
        change = outputs = None
        if self._inputs is not None and self._scored in self._blocks:
            for part, rows in self._blocks.items():
                after[part] = block_errors(model, self._inputs, rows, self._limit_s)
                before[part] = self._before[part].taken(slice(len(after[part].num_values)))
            scored_on = f"the {PARTS[self._scored]} part of {self._name}"
            errors = before[self._scored], after[self._scored]
            change = change_of(*errors, measure, scored_on, self.sizes.horizon)
            sides = [
                dataclasses.replace(side, quality=own.mean(measure))
                for side, own in zip(sides, errors, strict=True)
            ]
            outputs = output_errors(source, model, self._inputs, self._blocks[self._scored])
        scores = {
            part: {"source": before[part].means_of_all(), "result": after[part].means_of_all()}
            for part in after
        }  # fmt: skip
        note = None if model.compression is None else model.compression.note
        notes = [*self._note_on_start(), *self.notes, *([note] if note else [])]
        return CompressReport(
            kind="forecaster", path=str(self.out), methods=methods,
            source=sides[0], result=sides[1], measure=measure, change=change,
            not_measured=self.why_not or None, outputs=outputs, speed_unit="windows", lacks=[],
            training=training, max_loss=self.config.max_loss, is_published=True,
            notes=[*notes, *notes_of_speed(timer)], scores=scores,
        )  # fmt: skip


def result_of(stored: StoredForecaster) -> Result:
    """Returns a compressed forecaster as a result, with its files."""
    return Result(stored, stored.network.config, forecaster_files(stored))


def with_rounded_weights(stored: StoredForecaster) -> StoredForecaster:
    """Returns a forecaster with the weights of its file; ConfigError for a weight too large for
    the format."""
    assert stored.compression is not None
    network = copy.deepcopy(stored.network).cpu().eval()
    floats = {name: p.detach().numpy() for name, p in network.named_parameters()}
    weights = in_format(floats, stored.compression.weights)
    rounded = {name: torch.from_numpy(w) for name, w in as_floats(weights).items()}
    network.load_state_dict(rounded, strict=False)
    matrices = {name: w for name, w in weights.items() if isinstance(w, QuantizedMatrix)}
    compression = dataclasses.replace(stored.compression, matrices=matrices)
    return dataclasses.replace(stored, network=network, compression=compression)


def is_own_table(dataset: SeriesDataset, split: Split, source: StoredForecaster) -> bool:
    """Returns whether the source was trained and calibrated on a table: its training rows have the
    means and deviations of the source."""
    if not has_own_intervals(source):
        return False
    own, other = source.scaler, fitted_scaler(source.config, dataset, split)
    return np.array_equal(own.mean, other.mean) and np.array_equal(own.std, other.std)


def has_own_intervals(stored: StoredForecaster) -> bool:
    """Returns whether a forecaster is calibrated on the table that it scales by."""
    if stored.is_recalibrated:
        return False
    return stored.compression is None or bool(stored.compression.about.get("has_own_intervals"))


def described(stored: StoredForecaster, *, has_own_intervals: bool) -> StoredForecaster:
    """Returns a compressed forecaster whose config.json says whether its intervals are of its own
    table."""
    assert stored.compression is not None
    about = {**stored.compression.about, "has_own_intervals": has_own_intervals}
    compression = dataclasses.replace(stored.compression, about=about)
    return dataclasses.replace(stored, compression=compression)


def measure_of(stored: StoredForecaster) -> str:
    """Returns the name of the error measure that training minimises."""
    if stored.config.output != "point":
        return "crps"
    return "mse" if stored.config.loss == "mse" else "mae"


@dataclass(frozen=True)
class BlockErrors:
    """Errors of blocks of consecutive windows, in deviations of the training rows.

    Every array has the shape ``(blocks,)``. `means` holds mse, mae, coverage_80, coverage_95, and
    crps unless the output is a point; `num_values` counts present target values.
    """

    first_rows: NDArray[np.int64]
    num_windows: NDArray[np.int64]
    num_values: NDArray[np.float64]
    means: Mapping[str, NDArray[np.float64]]

    def taken(self, which: Any) -> BlockErrors:
        means = {name: values[which] for name, values in self.means.items()}
        counts = self.num_windows[which], self.num_values[which]
        return BlockErrors(self.first_rows[which], *counts, means)

    def mean(self, name: str) -> float:
        return float(self.means[name] @ self.num_values / self.num_values.sum())

    def means_of_all(self) -> dict[str, float]:
        return {name: self.mean(name) for name in self.means}


def blocks_of(
    split: Split, inputs: ScaledWindows, stored: StoredForecaster, part: str
) -> list[NDArray[np.int64]]:
    """Returns first rows of windows, in blocks spread evenly over a part; empty without windows.

    Every beginning of the list is spread evenly too.
    """
    sizes = stored.network.config
    try:
        index = split.windows(inputs.table, part, sizes.input_size, sizes.horizon)
    except DataError:
        return []
    rows = index.rows(len(index))
    count = min(_NUM_BLOCKS, max(1, len(rows) // _BLOCK))
    firsts = np.linspace(0, max(0, len(rows) - _BLOCK), count).astype(np.int64)
    return [rows[first : first + _BLOCK] for first in spread_out(firsts).tolist()]


@torch.no_grad()
def block_errors(
    stored: StoredForecaster, inputs: ScaledWindows, blocks: Sequence[NDArray[np.int64]],
    limit_s: float | None = None,
) -> BlockErrors:  # fmt: skip
    """Returns the errors of a forecaster, on fewer blocks after `limit_s` seconds."""
    network, started = stored.network, time.perf_counter()
    L, C = network.config.input_size, network.config.num_targets
    has_crps, means = stored.config.output != "point", list[dict[str, float]]()
    num_values: list[int] = []
    for number, rows in enumerate(blocks):
        is_late = limit_s is not None and time.perf_counter() - started > limit_s
        if is_late and number >= MIN_BLOCKS:
            break
        values, statics = next(inputs.read(rows, network.config, len(rows)))
        parameters, target = network(values, statics), values[:, L:, :C].numpy()
        places = inputs.places(inputs.table.segments.of_rows(rows))
        scores = QuantileScores((), INTERVALS, has_crps)
        quantiles = stored.quantiles(parameters, values, places, scores.levels)
        scores.add(quantiles.numpy(), target)
        error = np.abs(network.output.center(parameters).numpy().astype(np.float64) - target)
        count = max(scores.num_values, 1)
        errors = {"mse": np.nansum(error**2) / count, "mae": np.nansum(error) / count}
        num_values.append(scores.num_values)
        means.append({**errors, **scores.result()})
    columns = {name: np.array([one[name] for one in means]) for name in means[0]}
    first_rows = np.array([rows[0] for rows in blocks[: len(means)]])
    num_windows = np.array([len(rows) for rows in blocks[: len(means)]])
    return BlockErrors(first_rows, num_windows, np.array(num_values, np.float64), columns)


def change_of(
    before: BlockErrors, after: BlockErrors, measure: str, table: str, horizon: int
) -> Change:
    """Returns the change of a measure with a bootstrap interval.

    The bootstrap draws groups of neighbouring blocks, at least a horizon long, because windows that
    are nearer forecast the same values.
    """
    before, after = (own.taken(np.argsort(own.first_rows)) for own in (before, after))
    counts = before.num_values
    sums = (after.means[measure] - before.means[measure]) * counts
    distance = np.median(np.diff(before.first_rows)) if len(sums) > 1 else horizon
    low, high = bootstrap_interval(sums, counts, block=math.ceil(horizon / max(distance, 1)))
    return Change(
        difference=after.mean(measure) - before.mean(measure), low=low, high=high,
        num_scored=int(before.num_windows.sum()), scored_on=table,
    )  # fmt: skip


@torch.no_grad()
def output_errors(
    source: StoredForecaster, result: StoredForecaster, inputs: ScaledWindows,
    blocks: Sequence[NDArray[np.int64]],
) -> OutputErrors:  # fmt: skip
    """Returns the distance of the forecasts, in deviations of the training rows."""
    sizes, distances, compared = source.network.config, [], 0
    for rows in blocks[: _COMPARED // _BLOCK]:
        values, statics = next(inputs.read(rows, sizes, len(rows)))
        answers = [s.network.output.center(s.network(values, statics)) for s in (source, result)]
        distances.append((answers[1] - answers[0]).double().flatten())
        compared += len(rows)
    all_of = torch.cat(distances)
    return OutputErrors(
        what="forecasts", largest=float(all_of.abs().max()),
        rms=float(all_of.square().mean().sqrt()), num_compared=compared,
    )  # fmt: skip


def speeds(models: Sequence[StoredForecaster]) -> list[dict[int, float]]:
    """Returns windows per second of each forecaster by windows at once, measured in turns.

    Networks of the same sizes run the same products, so only one is measured.
    """
    sizes = [dataclasses.replace(stored.network.config, dropout=0.0) for stored in models]
    is_same = all(one == sizes[0] for one in sizes)
    measured = models[:1] if is_same else models
    return speeds_in_turns(measured, BATCHES, _speed) * (len(models) if is_same else 1)


def _speed(stored: StoredForecaster, batch: int) -> float:
    runner, sizes = WindowForecaster(stored, ""), stored.network.config
    mean, static = (m.astype(runner.dtype) for m in (stored.scaler.mean, stored.static_scale[:, 0]))
    past = np.tile(mean, (batch, sizes.input_size, 1))
    future = np.tile(mean[len(mean) - sizes.num_future :], (batch, sizes.horizon, 1))
    args = [rows if rows.size else None for rows in (future, np.tile(static, (batch, 1)))]
    return batch * calls_per_s(lambda: runner.run(past, *args).arrays(), _SPEED_S)


def figures_of(
    stored: StoredForecaster, path: str, model_file: bytes, speed: dict[int, float]
) -> ModelFigures:
    """Returns the figures of a forecaster; `model_file` is its file of weights."""
    network, config = stored.network.eval(), stored.network.config
    parameters = list(network.parameters())
    steps = config.input_size // config.patch
    kernel = str(explain(network, T=steps, B=BATCHES[-1] * network.num_channels)[0])
    number = sum(p.numel() for p in parameters)
    return ModelFigures(
        path=path, sha256=hashlib.sha256(model_file).hexdigest(),
        weights="fp32" if stored.compression is None else stored.compression.weights,
        num_parameters=number, num_nonzero=sum(int(p.count_nonzero()) for p in parameters),
        file_bytes=len(model_file), resident_bytes=4 * number, kernel=kernel, speed=speed,
    )  # fmt: skip
