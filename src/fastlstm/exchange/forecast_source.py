"""A forecaster to export: its graph, its own forecasts, and the speed of both."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastlstm.errors import ConfigError
from fastlstm.exchange.forecast_graph import forecast_graph
from fastlstm.exchange.graph import Graph
from fastlstm.exchange.rounded_network import rounded_network
from fastlstm.exchange.targets import Arrays, Form, Runner
from fastlstm.forecast.files import StoredForecaster
from fastlstm.forecast.model.outputs import NegativeBinomial, StudentT
from fastlstm.forecast.window_forecaster import WindowForecaster
from fastlstm.sequence.layer_stack import LayerStack
from fastlstm.training.session import torch_settings_kept

QUANTILES = (0.025, 0.1, 0.5, 0.9, 0.975)
"""Levels that are exported where none are given."""
BATCHES = (1, 3, 64)
_SPEED_S = 0.3


class ForecastSource:
    """A forecaster.

    Args:
        stored: the forecaster.
        weight_format: "fp32", "fp16" or "int8".
        quantiles: levels of the quantiles; None is `QUANTILES`, without any for distributions.
    """

    kind = "forecaster"

    def __init__(
        self, stored: StoredForecaster, weight_format: str, quantiles: Sequence[float] | None
    ) -> None:
        self.weight_format, self.notes = weight_format, list[str]()
        own = {} if stored.compression is None else stored.compression.matrices
        self._given = stored
        network, self._weights = rounded_network(stored.network, weight_format, own)
        self._stored = dataclasses.replace(stored, network=network)
        self._model = WindowForecaster(self._stored, "")
        is_plain = network.output.is_calibrated and not isinstance(network.output, StudentT)
        if quantiles is None:
            quantiles = QUANTILES if is_plain else ()
        self._levels = tuple(quantiles)

    def graph(self, form: Form) -> Graph:
        return forecast_graph(self._stored, self._weights, self._levels)

    def stack(self) -> LayerStack:
        raise ConfigError(
            "a forecaster is no sequence of Keras layers; export it to another target"
        )

    def unrounded(self) -> ForecastSource | None:
        compression = self._given.compression
        own = "fp32" if compression is None else compression.weights
        if self.weight_format in ("fp32", own):
            return None
        return ForecastSource(self._given, "fp32", self._levels)

    def files(self) -> dict[str, bytes]:
        return {}

    def cases(self, form: Form) -> Iterator[dict[str, NDArray[Any]]]:
        """Yields random windows, with unknown names; the last have missing values where the model
        knows none."""
        for B in BATCHES:
            yield random_windows(self._stored, B)
        yield random_windows(self._stored, BATCHES[1], missing=0.02)

    def run(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        forecasts = self._model.run(inputs["past"], inputs.get("future"), inputs.get("static"))
        outputs: dict[str, NDArray[Any]] = {"forecast": forecasts.values()}
        if self._levels:
            outputs["quantiles"] = forecasts.quantiles(self._levels)
        output = self._stored.network.output
        if isinstance(output, StudentT):
            degrees, _, scale = output.read(forecasts.parameters)
            outputs |= {
                "degrees_of_freedom": degrees.numpy(),
                "scale": scale.numpy() * forecasts.std[:, None],
            }
        if isinstance(output, NegativeBinomial):
            outputs["dispersion"] = forecasts.parameters[..., 1].numpy()
        return outputs

    def in_units(self, outputs: Arrays) -> dict[str, NDArray[Any]]:
        """Returns outputs in deviations of their columns."""
        mean, std = self._stored.scaler.mean[: len(self._std)], self._std
        scaled = dict(outputs)
        scaled["forecast"] = (outputs["forecast"] - mean) / std
        if "quantiles" in outputs:
            scaled["quantiles"] = (outputs["quantiles"] - mean[:, None]) / std[:, None]
        if "scale" in outputs:
            scaled["scale"] = outputs["scale"] / std
        return scaled

    def figures(self, runner: Runner, form: Form) -> dict[str, Any]:
        """Returns windows per second, one at a time and 64 at once, on one thread."""
        speeds: dict[str, dict[str, float]] = {}
        with torch_settings_kept():
            torch.set_num_threads(1)
            for B in (1, 64):
                inputs = random_windows(self._stored, B, missing=0.0)
                speeds[str(B)] = {
                    "target": _windows_per_s(runner.run, inputs, B),
                    "fastlstm": _windows_per_s(self.run, inputs, B),
                }
        return {"windows_per_s": speeds}

    @property
    def _std(self) -> NDArray[np.float64]:
        return self._stored.scaler.std[: self._stored.network.config.num_targets]


def random_windows(
    stored: StoredForecaster, B: int, *, missing: float | None = None
) -> dict[str, NDArray[np.float32]]:
    """Returns random inputs of a forecaster's graph: `past`, and `future` and `static` if it has
    them.

    Args:
        stored: the forecaster.
        B: windows.
        missing: share of missing values; default is 0.3 of a model that knows them, else none.
            Where there are any, the first window has none in its first half and the last window
            none in its first column. Static columns lack 0.3 if this is not 0.
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
    return {name: array.astype(np.float32) for name, array in inputs.items()}


def _windows_per_s(run: Any, inputs: Arrays, B: int) -> float:
    run(inputs)
    num, started = 0, time.perf_counter()
    while (taken_s := time.perf_counter() - started) < _SPEED_S:
        run(inputs)
        num += B
    return num / taken_s
