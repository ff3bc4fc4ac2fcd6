"""A forecaster to export: rows of a table in, forecasts in the table's units out.

The graph computes what `forecast.window_forecaster.WindowForecaster` does, with the network of
`forecast.model.network.ForecastNetwork`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastlstm.errors import ConfigError
from fastlstm.exchange.columns import (
    Columns,
    Features,
    patch_levels,
    present_mean,
    repeated,
    scaled,
    window_level,
)
from fastlstm.exchange.forecast_outputs import add_outputs, center, check_levels, moved
from fastlstm.exchange.graph import Graph, GraphBuilder, LSTMStack, State, Value, lstm_layers
from fastlstm.exchange.source import Arrays, Source, rounded_network
from fastlstm.forecast.data.series_scale import CONSTANT
from fastlstm.forecast.files import StoredForecaster
from fastlstm.forecast.model.network import LINEAR
from fastlstm.forecast.model.outputs import NegativeBinomial, StudentT
from fastlstm.forecast.window_forecaster import WindowForecaster, float64_columns
from fastlstm.runs.weight_formats import as_floats
from fastlstm.training.session import torch_settings_kept

QUANTILES = (0.025, 0.1, 0.5, 0.9, 0.975)
"""Levels that are exported where none are given."""
BATCHES = (1, 3, 64)
_SPEED_S = 0.3


class ForecastSource(Source):
    """A forecaster; levels of its quantiles are by default `QUANTILES`, none of a distribution."""

    kind = "forecaster"

    def __init__(
        self, stored: StoredForecaster, weight_format: str, quantiles: Sequence[float] | None
    ) -> None:
        super().__init__(weight_format)
        own = {} if stored.compression is None else stored.compression.matrices
        self._given = stored
        network, self._weights = rounded_network(stored.network, weight_format, own)
        self._stored = dataclasses.replace(stored, network=network)
        self._model = WindowForecaster(self._stored, "")
        is_plain = network.output.is_calibrated and not isinstance(network.output, StudentT)
        if quantiles is None:
            quantiles = QUANTILES if is_plain else ()
        self._levels = tuple(quantiles)

    def graph(self) -> Graph:
        return forecast_graph(self._stored, self._weights, self._levels)

    def unrounded(self) -> ForecastSource | None:
        compression = self._given.compression
        own = "fp32" if compression is None else compression.weights
        if self.weight_format in ("fp32", own):
            return None
        return ForecastSource(self._given, "fp32", self._levels)

    def cases(self) -> Iterator[dict[str, NDArray[Any]]]:
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

    def figures(self, runner: Any) -> dict[str, Any]:
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
    them, B windows.

    A share of values is missing, by default 0.3 for a model that knows them. Then the first window
    lacks its first half, the last one its first column; static columns lack 0.3 if it is not 0.
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


def forecast_graph(
    stored: StoredForecaster, weights: Mapping[str, Any], levels: Sequence[float] = ()
) -> Graph:
    """Describes a forecaster.

    Inputs are float32 in the table's units, names as their numbers: `past` `(B, L, columns)`, with
    future covariates `future` `(B, h, F)`, with static ones `static` `(B, S)`. NaN is a missing
    value; of a model without missing values a missing target makes its forecast NaN. A number
    that no name has is an unknown name.

    Outputs: `forecast` `(B, h, C)`; with `levels` `quantiles` `(B, h, C, Q)`. The output student_t
    adds `degrees_of_freedom` and `scale` `(B, h, C)` of Student's t around the forecast,
    negative_binomial adds `dispersion`: the variance is forecast + dispersion * forecast².
    Weights have the names of the network; matrices may be `QuantizedMatrix`.
    """
    check_levels(stored.network.config.output, levels)
    if columns := float64_columns(stored):
        raise ConfigError(
            f"'{columns[0]}' is so large beside its range that float32 loses its digits, and an"
            " exported forecaster computes in float32: subtract a constant from it before training"
        )
    return _Forecaster(stored, weights).graph(levels)


class _Forecaster:
    def __init__(self, stored: StoredForecaster, weights: Mapping[str, Any]) -> None:
        self._stored, self._network = stored, stored.network
        self._config = stored.network.config
        plain = as_floats({n: weights[n] for n in ("position", "channel")})
        first = np.repeat(plain["position"][:, None], self._network.num_channels, 1)
        second = np.repeat(plain["channel"][None], self._network.num_patches, 0)
        self._places = np.concatenate([first, second], -1)[:, None]  # (m, 1, channels, d)
        embeddings = {name: w for name, w in weights.items() if ".embeddings." in name}
        left_out = {*embeddings, *plain}
        kept = {name: w for name, w in weights.items() if name not in left_out}
        self._g = GraphBuilder("fastlstm_forecast", kept)
        self._past_features = self._features("past", embeddings)
        self._future_features = self._features("future", embeddings)
        self._static_features = self._features("statics", embeddings)
        K = self._network.num_channels
        self._rows = "B" if K == 1 else f"B*{K}"
        directions = 2 if self._config.bidirectional else 1
        self._stack = LSTMStack(
            "lstm.", self._config.hidden_size, self._config.num_layers, directions
        )

    def _features(self, name: str, weights: Mapping[str, Any]) -> Features:
        """Returns features with the mean of the trained embeddings in place of the others."""
        config = self._config
        columns, categories = {
            "past": (config.num_past + config.num_future, _from(config, config.num_targets)),
            "future": (config.num_future, _from(config, config.num_targets + config.num_past)),
            "statics": (config.num_static, config.static_categories),
        }[name]
        modules = getattr(self._network, name).embeddings
        names = [f"{name}.embeddings.{k}.weight" for k in range(len(modules))]
        floats = as_floats({n: weights[n] for n in names})
        tables = []
        for module, table in zip(modules, floats.values(), strict=True):
            is_trained = module.is_trained.cpu().numpy()[:, None]
            mean = np.where(is_trained, table, 0).sum(0) / max(is_trained.sum(), 1)
            tables.append(np.where(is_trained, table, mean).astype(np.float32))
        return Features(self._g, name, columns, categories, tables)

    def graph(self, levels: Sequence[float]) -> Graph:
        """Returns the graph."""
        g, config, scaler = self._g, self._config, self._stored.scaler
        L, h, C, S = config.input_size, config.horizon, config.num_targets, config.num_static
        columns = C + config.num_past + config.num_future
        raw = g.input("past", ("B", L, columns))
        ahead = g.input("future", ("B", h, config.num_future)) if config.num_future else None
        raw_static = g.input("static", ("B", S)) if S else None
        past = scaled(g, raw, scaler.mean, scaler.std)
        targets = Columns(*(g.slice(part, -1, 0, C) for part in past))
        covariates = Columns(*(g.slice(part, -1, C, columns) for part in past))
        unit = None
        if self._stored.series is not None:  # a window does not say of which series it is
            targets, unit = self._of_windows(g.slice(raw, -1, 0, C))
        static = None
        if raw_static is not None:
            values = scaled(g, raw_static, *self._stored.static_scale.T)
            static = g.linear(self._static_features.of(values), "static.weight", "static.bias")
        features = self._past_features.of(covariates) if self._past_features.width else None
        queries = self._queries(raw, ahead, static)
        if config.stateful:
            at = patch_levels(g, config, targets)
        else:
            at = window_level(g, config, self._network.output.counts, targets)
        is_there = targets.is_there if config.has_missing else None
        state, last = self._read(at.inputs, is_there, features, static, None)
        linear = self._linear(at.inputs, ahead) if config.linear else None
        if config.decoder == "autoregressive":
            decoded = self._autoregressive(queries, state, raw, ahead, static, linear)
        else:
            decoded = self._decode(queries, *self._states(state, last))
        decoded = g.slice(decoded, 1, 0, h)
        if linear is not None:
            decoded = moved(g, config.output, decoded, linear)
        add_outputs(g, self._stored, decoded, at, targets, levels, unit)
        g.graph.metadata.update(self._metadata(levels))
        return g.graph

    def _of_windows(self, raw: Value) -> tuple[Columns, tuple[Value, Value]]:
        """Returns targets in units of their window, and its mean and deviation `(B, 1, C)`; as
        `forecast.data.series_scale.scale_of_windows`."""
        g, C = self._g, self._config.num_targets
        plain = scaled(g, raw, np.zeros(C), np.ones(C))
        mean = present_mean(g, plain)
        offsets = g.where(plain.is_there, g.binary("sub", plain.values, mean), 0.0)
        square = g.binary("mul", offsets, offsets)
        variance = present_mean(g, plain._replace(values=square))
        level = g.unary("sqrt", g.binary("mul", mean, mean))
        level = g.where(g.binary("equal", level, 0.0), g.constant(np.float32(1.0)), level)
        least = g.binary("mul", level, CONSTANT)
        std = g.binary("maximum", g.unary("sqrt", variance), least)
        return plain._replace(values=g.binary("div", offsets, std)), (mean, std)

    def _read(
        self,
        targets: Value,
        is_there: Value | None,
        features: Value | None,
        static: Value | None,
        state: State | None,
    ) -> tuple[State, Value]:
        """Runs the LSTM over patches of normalised targets `(B, steps, C)`; returns its state and
        the last step's output `(1, B * channels, D * H)`."""
        g, config, K = self._g, self._config, self._network.num_channels
        s, C, steps = config.patch, config.num_targets, int(targets.shape[1])
        n, rows = steps // s, self._rows
        parts = [g.reshape(targets, ("B", steps, C, 1))]
        if config.has_missing:
            present = repeated(g, targets, np.ones((steps, C)))
            if is_there is not None:
                present = g.cast(is_there, "float32")
            parts.append(g.reshape(present, ("B", steps, C, 1)))
        own = C // K * len(parts)
        patches = g.reshape(g.concat(parts, -1), ("B", n, s, K, own))
        patches = g.transpose(patches, (1, 0, 3, 2, 4))
        x = g.reshape(patches, (n, rows, s * own))
        if features is not None:
            width = s * self._past_features.width
            shared = g.transpose(g.reshape(features, ("B", n, 1, width)), (1, 0, 2, 3))
            shared = g.binary("mul", shared, g.constant(np.ones((K, 1), np.float32)))
            x = g.concat([x, g.reshape(shared, (n, rows, width))], -1)
        x = g.unary("relu", g.linear(x, "embed.weight", "embed.bias"))
        if static is not None:
            d = config.embed_size
            whole = g.reshape(x, (n, "B", K, d))
            whole = g.binary("add", whole, g.reshape(static, ("B", 1, d)))
            x = g.reshape(whole, (n, rows, d))
        y, state = lstm_layers(g, x, self._stack, state)
        return state, g.slice(y, 0, n - 1, n)

    def _linear(self, targets: Value, ahead: Value | None) -> Value:
        """Returns the linear forecast `(B, h, C)` of normalised targets `(B, L, C)` and future
        covariates `(B, h, F)`."""
        g, network = self._g, self._network
        share = network.linear_share
        for name in LINEAR[:2]:
            g.graph.weights[name] = (share * getattr(network, name)).cpu().numpy()
        rows = g.linear(g.transpose(targets, (0, 2, 1)), "linear_weight", "linear_bias")
        own = g.transpose(rows, (0, 2, 1))
        if ahead is not None and network.future.num_numbers:
            features = self._future_features.of(self._scaled_ahead(ahead))
            for place, weight in enumerate((share * network.linear_future).T.cpu().numpy()):
                one = g.slice(features, -1, place, place + 1)
                own = g.binary("add", own, g.binary("mul", one, g.constant(weight[:, None])))
        return own

    def _scaled_ahead(self, ahead: Value) -> Columns:
        first, scaler = self._config.num_targets + self._config.num_past, self._stored.scaler
        return scaled(self._g, ahead, scaler.mean[first:], scaler.std[first:])

    def _states(self, state: State, last: Value) -> tuple[Value, Value]:
        """Returns what is decoded from, h and c `(B * channels, H)`."""
        g, config, H = self._g, self._config, self._config.hidden_size
        if config.stateful:
            hidden = g.reshape(last, (self._rows, H))
            return hidden, g.linear(hidden, "cell_of_hidden.weight", "cell_of_hidden.bias")
        both = []
        for value, name in zip(state[-1], ("hidden_of_both", "cell_of_both"), strict=True):
            ways = [g.slice(value, 0, k, k + 1) for k in range(self._stack.num_directions)]
            one = g.concat([g.reshape(way, (self._rows, H)) for way in ways], -1)
            if len(ways) == 2:
                one = g.linear(one, f"{name}.weight", f"{name}.bias")
            both.append(one)
        return both[0], both[1]

    def _queries(self, raw: Value, ahead: Value | None, static: Value | None) -> Value:
        """Returns the query of every future patch, `(m, 1 or B, channels, d)`."""
        g, config, m = self._g, self._config, self._network.num_patches
        queries = g.constant(self._places)
        s, h, d = config.patch, config.horizon, config.embed_size
        if ahead is not None:
            width = self._future_features.width
            parts = [self._future_features.of(self._scaled_ahead(ahead))]
            if m * s > h:
                parts.append(repeated(g, raw, np.zeros((m * s - h, width))))
            patches = g.reshape(g.concat(parts, 1), ("B", m, s * width))
            known = g.linear(g.transpose(patches, (1, 0, 2)), "known.weight", "known.bias")
            queries = g.binary("add", queries, g.reshape(known, (m, "B", 1, d)))
        if static is not None:
            queries = g.binary("add", queries, g.reshape(static, (1, "B", 1, d)))
        return queries

    def _decode(self, queries: Value, hidden: Value, cell: Value) -> Value:
        """Returns `(B, m * s, C, parameters)`: a cell step per patch, all from one state."""
        g, config, K = self._g, self._config, self._network.num_channels
        m, H, each = int(queries.shape[0]), config.hidden_size, self._network.output.num_parameters
        s, C = config.patch, config.num_targets
        recurrent = g.reshape(g.linear(hidden, "cell_hh.weight"), (1, "B", K, 4 * H))
        gates = g.binary("add", g.linear(queries, "cell_ih.weight", "cell_ih.bias"), recurrent)
        i, f, u, o = (g.slice(gates, -1, k * H, (k + 1) * H) for k in range(4))
        kept = g.binary("mul", g.unary("sigmoid", f), g.reshape(cell, (1, "B", K, H)))
        new = g.binary("mul", g.unary("sigmoid", i), g.unary("tanh", u))
        out = g.unary("tanh", g.binary("add", kept, new))
        out = g.binary("mul", g.unary("sigmoid", o), out)
        decoded = g.linear(out, "head.weight", "head.bias")  # (m, B, K, s * C / K * parameters)
        decoded = g.reshape(decoded, (m, "B", K, s, C // K * each))
        return g.reshape(g.transpose(decoded, (1, 0, 3, 2, 4)), ("B", m * s, C, each))

    def _autoregressive(
        self,
        queries: Value,
        state: State,
        raw: Value,
        ahead: Value | None,
        static: Value | None,
        linear: Value | None,
    ) -> Value:
        """Returns the same as `_decode`; the LSTM reads each patch's forecast before the next."""
        g, config, s = self._g, self._config, self._config.patch
        features = self._known_features(raw, ahead) if self._past_features.width else None
        decoded: list[Value] = []
        for k in range(self._network.num_patches):
            if k:
                own = center(g, config.output, decoded[-1])
                if linear is not None:
                    own = g.binary("add", own, g.slice(linear, 1, (k - 1) * s, k * s))
                rows = None if features is None else g.slice(features, 1, (k - 1) * s, k * s)
                state, _ = self._read(own, None, rows, static, state)
            query = g.slice(queries, 0, k, k + 1)
            decoded.append(self._decode(query, *self._states(state, queries)))
        return g.concat(decoded, 1)

    def _known_features(self, raw: Value, ahead: Value | None) -> Value:
        """Returns features of the horizon's covariates, past ones missing, `(B, h, width)`."""
        g, config = self._g, self._config
        C, h = config.num_targets, config.horizon
        parts = [] if ahead is None else [ahead]
        if config.num_past:
            unknown = np.full((h, config.num_past), math.nan)
            parts.insert(0, repeated(g, raw, unknown))
        scaler = self._stored.scaler
        values = scaled(g, g.concat(parts, -1), scaler.mean[C:], scaler.std[C:])
        return self._past_features.of(values)

    def _metadata(self, levels: Sequence[float]) -> dict[str, str]:
        stored, config = self._stored, self._config
        columns = stored.schema.columns
        values = {
            "columns": columns,
            "targets": columns[: config.num_targets],
            "future": columns[len(columns) - config.num_future :],
            "static": stored.config.static,
            "categories": stored.schema.categories,
            "levels": [float(level) for level in levels],
        }
        texts = {name: json.dumps(value) for name, value in values.items()}
        return {**texts, "frequency": str(stored.schema.frequency), "output": config.output}


def _from(config: Any, first: int) -> tuple[tuple[int, int], ...]:
    """Returns the categorical columns from one on, their places counted from there."""
    return tuple((place - first, size) for place, size in config.categories if place >= first)
