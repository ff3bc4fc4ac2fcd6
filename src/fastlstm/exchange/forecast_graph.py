"""A forecaster to export: rows of a table in, forecasts in the table's units out.

The graph is recorded from `forecast.window_forecaster.WindowForecaster`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastlstm.errors import ConfigError
from fastlstm.exchange.graph import Graph
from fastlstm.exchange.source import Arrays, ExportSource, rounded_network
from fastlstm.exchange.trace import Traced, Tracer
from fastlstm.forecast.calibration import require_known
from fastlstm.forecast.files import StoredForecaster
from fastlstm.forecast.model.outputs import StudentT
from fastlstm.forecast.window_forecaster import WindowForecaster, float64_columns
from fastlstm.system.measurements import calls_per_s
from fastlstm.training.session import torch_settings_kept

QUANTILES = (0.025, 0.1, 0.5, 0.9, 0.975)
BATCHES = (1, 3, 64)
_SPEED_S = 0.3


class ForecastExport(ExportSource):
    """A forecaster; its quantile levels are by default `QUANTILES`, none for a distribution."""

    kind = "forecaster"

    def __init__(
        self, stored: StoredForecaster, weight_format: str, quantiles: Sequence[float] | None
    ) -> None:
        own = stored.compression
        super().__init__(weight_format, "fp32" if own is None else own.weights)
        matrices, self._given = {} if own is None else own.matrices, stored
        network, self._weights = rounded_network(stored.network, weight_format, matrices)
        self._stored = dataclasses.replace(stored, network=network)
        self._model = WindowForecaster(self._stored, "")
        is_plain = network.output.is_calibrated and not isinstance(network.output, StudentT)
        if quantiles is None:
            quantiles = QUANTILES if is_plain else ()
        self._levels = tuple(quantiles)

    def graph(self) -> Graph:
        return forecast_graph(self._stored, self._weights, self._levels)

    def in_fp32(self) -> ForecastExport:
        return ForecastExport(self._given, "fp32", self._levels)

    def cases(self) -> Iterator[dict[str, NDArray[Any]]]:
        """Yields random windows with unknown names, the last with missing values in any model."""
        for B in BATCHES:
            yield random_windows(self._stored, B)
        yield random_windows(self._stored, BATCHES[1], missing=0.02)

    def run(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        parts = [inputs[name] for name in ("static", "series") if name in inputs]
        statics = np.column_stack(parts) if parts else None
        forecasts = self._model.run(inputs["past"], inputs.get("future"), statics)
        outputs = forecasts.outputs(self._levels)
        return {name: value.float().numpy() for name, value in outputs.items()}

    def in_units(self, outputs: Arrays) -> dict[str, NDArray[Any]]:
        """Returns outputs in standard deviations of their columns."""
        mean, std = self._stored.scaler.mean[: len(self._std)], self._std
        scaled = dict(outputs)
        scaled["forecast"] = (outputs["forecast"] - mean) / std
        if "quantiles" in outputs:
            scaled["quantiles"] = (outputs["quantiles"] - mean[:, None]) / std[:, None]
        if "scale" in outputs:
            scaled["scale"] = outputs["scale"] / std
        return scaled

    def figures(self, runner: Any) -> dict[str, Any]:
        """Returns windows per second on one thread, one and 64 at a time."""
        speeds: dict[str, dict[str, float]] = {}
        with torch_settings_kept():
            torch.set_num_threads(1)
            for B in (1, 64):
                inputs = random_windows(self._stored, B, missing=0.0)
                for name, run in (("target", runner.run), ("fastlstm", self.run)):
                    call = partial(run, inputs)
                    call()
                    speeds.setdefault(str(B), {})[name] = B * calls_per_s(call, _SPEED_S)
        return {"windows_per_s": speeds}

    @property
    def _std(self) -> NDArray[np.float64]:
        return self._stored.scaler.std[: self._stored.network.config.num_targets]


def random_windows(
    stored: StoredForecaster, B: int, *, missing: float | None = None
) -> dict[str, NDArray[Any]]:
    """Returns B random windows for a forecaster's graph: `past`, `future`, `static`, `series`.

    `missing` is the share of missing values, by default 0.3 for a model with missing values; then
    the first window lacks its first half, and the last window lacks its first column. Static
    columns lack a share of 0.3 unless `missing` is 0.
    """
    config = stored.network.config
    rng = np.random.default_rng(B)
    L, F = config.input_size, config.num_future
    mean, std = stored.scaler.mean, stored.scaler.std
    values = mean + std * rng.normal(size=(B, L + config.horizon, len(mean)))
    statics = stored.static_scale[:, 0] + rng.normal(size=(B, config.num_static))
    for rows, pairs in ((values, config.categories), (statics, config.static_categories)):
        for place, size in pairs:
            rows[..., place] = rng.integers(0, size + 1, rows.shape[:-1])
    if config.output == "negative_binomial":
        targets = values[..., : config.num_targets]
        targets[:] = rng.poisson(5, size=targets.shape)
    if missing != 0:
        statics[rng.random(statics.shape) < 0.3] = np.nan
    if share := (0.3 if config.has_missing else 0.0) if missing is None else missing:
        values[rng.random(values.shape) < share] = np.nan
        values[0, : L // 2] = np.nan
        values[-1, :L, 0] = np.nan
    inputs = {"past": values[:, :L]}
    if F:
        inputs["future"] = values[:, L:, -F:]
    if config.num_static:
        inputs["static"] = statics
    windows: dict[str, NDArray[Any]] = {
        name: array.astype(np.float32) for name, array in inputs.items()
    }
    if names := _series_names(stored):
        windows["series"] = rng.integers(-1, len(names), B, dtype=np.int32)
    return windows


def _series_names(stored: StoredForecaster) -> tuple[str, ...]:
    return () if stored.series is None else stored.series.names


def forecast_graph(
    stored: StoredForecaster, weights: Mapping[str, Any], levels: Sequence[float] = ()
) -> Graph:
    """Returns the graph of a forecaster.

    Inputs are float32 in the table's units, with names as numbers: `past` `(B, L, columns)`,
    `future` `(B, h, F)` with future covariates, `static` `(B, S)` with static ones. NaN is a
    missing value; in a model without missing values a missing target makes its forecast NaN. An
    unused number stands for an unknown name. A table of several series adds `series` `(B,)` int32,
    the number of each window's series, -1 if unknown at fit: it has its own scale and intervals.

    Outputs: `forecast` `(B, h, C)`; `quantiles` `(B, h, C, Q)` with `levels`. student_t adds
    `degrees_of_freedom` and `scale` `(B, h, C)` of Student's t around the forecast;
    negative_binomial adds `dispersion`: the variance is forecast + dispersion * forecast². Weights
    have the names of the network; matrices may be `QuantizedMatrix`.
    """
    output = stored.network.config.output
    if len(levels) and output in ("student_t", "negative_binomial"):
        raise ConfigError(
            f"an exported forecaster with `output={output!r}` has no quantiles: it gives the"
            " parameters of its distribution; leave out `quantiles`"
        )
    require_known(levels)
    if large := float64_columns(stored):
        raise ConfigError(
            f"'{large[0]}' is so large beside its range that float32 loses its digits, and an"
            " exported forecaster computes in float32: subtract a constant from it before training"
        )
    config = stored.network.config
    L, h, num = config.input_size, config.horizon, len(stored.schema.columns)
    g = Tracer("fastlstm_forecast", stored.network, weights)
    past = g.traced_input("past", ("B", L, num))
    future = g.traced_input("future", ("B", h, config.num_future)) if config.num_future else None
    statics = g.traced_input("static", ("B", config.num_static)) if config.num_static else None
    names = _series_names(stored)
    series = Traced(g.input("series", ("B",), "int32")) if names else None
    with g.recording():
        model: Any = WindowForecaster(stored, "")
        outputs = model.forecasts(past, future, statics, series).outputs(levels)
    for name, value in outputs.items():
        g.output(name, value.value)
    graph = g.finished()
    columns = stored.schema.columns
    values: dict[str, Any] = {
        "columns": columns,
        "targets": columns[: config.num_targets],
        "future": columns[num - config.num_future :],
        "static": stored.config.static,
        "series": names,
        "categories": stored.schema.categories,
        "levels": [float(level) for level in levels],
    }
    texts = {name: json.dumps(value) for name, value in values.items()}
    graph.metadata.update(texts, frequency=str(stored.schema.timeline.frequency), output=output)
    return graph
