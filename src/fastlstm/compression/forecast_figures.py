"""What a forecaster costs and how good it is: errors by blocks of windows, speed, bytes."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastlstm.compression.report import (
    Change,
    ModelFigures,
    OutputErrors,
    speeds_in_turns,
)
from fastlstm.compression.statistics import MIN_BLOCKS, bootstrap_interval
from fastlstm.errors import DataError
from fastlstm.forecast.calibration import quantiles_of
from fastlstm.forecast.data.error_measures import QuantileScores
from fastlstm.forecast.data.scaled_windows import ScaledWindows
from fastlstm.forecast.data.splits import Split
from fastlstm.forecast.data.window_index import spread_out
from fastlstm.forecast.evaluation import INTERVALS
from fastlstm.forecast.files import StoredForecaster
from fastlstm.forecast.window_forecaster import WindowForecaster
from fastlstm.ops.explain import explain

BATCHES = (1, 256)
"""Windows at once in a measurement of speed: one, and what `forecast` and `serve` run at most."""
PARTS = {"valid": "validation", "test": "test"}
_BLOCK, _NUM_BLOCKS = 64, 32
"""Windows of a block, which follow each other in time; blocks of a part."""
_COMPARED = 256
_SPEED_S = 0.15


def measure_of(stored: StoredForecaster) -> str:
    """Returns the error that forecasters are compared by: of what they are trained for."""
    if stored.config.output != "point":
        return "crps"
    return "mse" if stored.config.loss == "mse" else "mae"


@dataclass(frozen=True)
class BlockErrors:
    """Errors of consecutive windows, block by block, in deviations of the training rows.

    Attributes:
        first_rows: of each block's first window, shape ``(blocks,)``.
        num_windows: of each block, shape ``(blocks,)``.
        num_values: present target values of each block, shape ``(blocks,)``.
        means: of each block by name, ``(blocks,)``: mse, mae, coverage_80, coverage_95, and crps
            unless the output is a point.
    """

    first_rows: NDArray[np.int64]
    num_windows: NDArray[np.int64]
    num_values: NDArray[np.float64]
    means: Mapping[str, NDArray[np.float64]]

    def taken(self, which: Any) -> BlockErrors:
        """Returns the errors of some blocks."""
        means = {name: values[which] for name, values in self.means.items()}
        counts = self.num_windows[which], self.num_values[which]
        return BlockErrors(self.first_rows[which], *counts, means)

    def mean(self, name: str) -> float:
        """Returns a measure over all values."""
        return float(self.means[name] @ self.num_values / self.num_values.sum())

    def means_of_all(self) -> dict[str, float]:
        """Returns every measure over all values."""
        return {name: self.mean(name) for name in self.means}


def blocks_of(
    split: Split, inputs: ScaledWindows, stored: StoredForecaster, part: str
) -> list[NDArray[np.int64]]:
    """Returns first rows of windows of a part, in blocks that are spread evenly over it.

    The beginning of the list is spread evenly, too. It is empty where the part has no window.
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
    stored: StoredForecaster,
    inputs: ScaledWindows,
    blocks: Sequence[NDArray[np.int64]],
    limit_s: float | None = None,
) -> BlockErrors:
    """Returns the errors of a forecaster; from `limit_s` seconds on it leaves blocks out."""
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
        wide = stored.calibration.width(values, network.config, places)
        scores = QuantileScores((), INTERVALS, has_crps)
        quantiles = quantiles_of(
            network.output, parameters, wide, stored.calibration, scores.levels
        )
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
    """Returns how a measure changed, with a bootstrap interval.

    What is drawn are neighbouring blocks that begin at least a horizon (steps of a forecast) before
    the next ones: windows nearer than that forecast the same values.
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
    source: StoredForecaster,
    result: StoredForecaster,
    inputs: ScaledWindows,
    blocks: Sequence[NDArray[np.int64]],
) -> OutputErrors:
    """Returns how far the forecasts moved, in deviations of the training rows."""
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

    Networks of the same sizes run the same products: one of them is measured.
    """
    sizes = [dataclasses.replace(stored.network.config, dropout=0.0) for stored in models]
    is_same = all(one == sizes[0] for one in sizes)
    runners = [WindowForecaster(stored, "") for stored in (models[:1] if is_same else models)]
    return speeds_in_turns(runners, BATCHES, _speed) * (len(models) if is_same else 1)


def speed_of(stored: StoredForecaster, batch: int) -> float:
    """Returns the windows a second of a forecaster with `batch` windows at once."""
    return speeds_in_turns([WindowForecaster(stored, "")], [batch], _speed)[0][batch]


def _speed(runner: WindowForecaster, batch: int) -> float:
    past = np.zeros((batch, runner.input_size, len(runner.past.names)), runner.dtype)
    past += [
        runner.typical(name) if name in runner.past.numbers else 0 for name in runner.past.names
    ]
    future = past[:, : runner.horizon, len(runner.past.names) - len(runner.future.names) :]
    if runner.horizon > runner.input_size:
        future = np.repeat(future[:, :1], runner.horizon, 1)
    statics = np.zeros((batch, len(runner.static.names)), runner.dtype)
    args = [part if part.shape[-1] else None for part in (future, statics)]
    count, started = 0, time.perf_counter()
    while (taken_s := time.perf_counter() - started) < _SPEED_S or count == 0:
        runner.run(past, *args).values()
        count += batch
    return count / taken_s


def figures_of(
    stored: StoredForecaster, path: str, model_file: bytes, speed: dict[int, float]
) -> ModelFigures:
    """Returns the figures of a forecaster whose file of weights is `model_file`."""
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
