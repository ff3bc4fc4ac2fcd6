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
    Levels,
    moments,
    patch_levels,
    repeated,
    scaled,
    unscaled,
    window_level,
)
from fastlstm.exchange.graph import (
    Graph,
    GraphBuilder,
    LSTMStack,
    State,
    Value,
    both_ways,
    lstm_layers,
)
from fastlstm.exchange.source import Arrays, Source, rounded_network
from fastlstm.forecast.calibration import LEVELS, MIN_SPREAD, require_known
from fastlstm.forecast.data.series_scale import CONSTANT
from fastlstm.forecast.files import StoredForecaster
from fastlstm.forecast.model.network import LINEAR
from fastlstm.forecast.model.outputs import QUANTILES as OUTPUT_QUANTILES
from fastlstm.forecast.model.outputs import NegativeBinomial, StudentT
from fastlstm.forecast.window_forecaster import WindowForecaster, float64_columns
from fastlstm.training.session import torch_settings_kept

QUANTILES = (0.025, 0.1, 0.5, 0.9, 0.975)
"""Levels that are exported where none are given."""
BATCHES = (1, 3, 64)
_LARGE = 1e30
"""Stands for an infinite residual while quantiles are sorted and interpolated."""
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
    output = stored.network.config.output
    if len(levels) and output in ("student_t", "negative_binomial"):
        raise ConfigError(
            f"an exported forecaster with `output={output!r}` has no quantiles but the parameters"
            " of its distribution; leave out `quantiles`"
        )
    require_known(levels)
    if columns := float64_columns(stored):
        raise ConfigError(
            f"'{columns[0]}' is so large beside its range that float32 loses its digits, and an"
            " exported forecaster computes in float32: subtract a constant from it before training"
        )
    return _Forecaster(stored, weights).graph(levels)


class _Forecaster:
    def __init__(self, stored: StoredForecaster, weights: Mapping[str, Any]) -> None:
        self._stored, self._network = stored, stored.network
        self._config, K = stored.network.config, stored.network.num_channels
        left_out = ("position", "channel", "past.", "future.", "statics.")
        kept = {name: w for name, w in weights.items() if not name.startswith(left_out)}
        self._g = GraphBuilder("fastlstm_forecast", kept)
        self._past_features, self._future_features, self._static_features = (
            Features(self._g, name, getattr(self._network, name))
            for name in ("past", "future", "statics")
        )
        self._rows = "B" if K == 1 else f"B*{K}"
        self._add_inputs()

    def _add_inputs(self) -> None:
        g, config = self._g, self._config
        L, h, F, S = config.input_size, config.horizon, config.num_future, config.num_static
        self._raw = g.input("past", ("B", L, config.num_targets + config.num_past + F))
        self._ahead = g.input("future", ("B", h, F)) if F else None
        self._static = None
        if S:
            values = scaled(g, g.input("static", ("B", S)), *self._stored.static_scale.T)
            features = self._static_features.of(values)
            self._static = g.linear(features, "static.weight", "static.bias")

    def graph(self, levels: Sequence[float]) -> Graph:
        """Returns the graph."""
        g, config, C = self._g, self._config, self._config.num_targets
        past = self._scaled(self._raw, 0)
        targets = Columns(*(g.slice(part, -1, 0, C) for part in past))
        unit, features, queries = None, None, self._queries()
        if self._stored.series is not None:  # a window does not say of which series it is
            targets, unit = self._of_windows(g.slice(self._raw, -1, 0, C))
        if self._past_features.width:
            covariates = (g.slice(part, -1, C, int(self._raw.shape[2])) for part in past)
            features = self._past_features.of(Columns(*covariates))
        if config.stateful:
            at = patch_levels(g, config, targets)
        else:
            at = window_level(g, config, self._network.output.counts, targets)
        is_there = targets.is_there if config.has_missing else None
        state, last = self._read(at.inputs, is_there, features)
        linear = self._linear(at.inputs) if config.linear else None
        if config.decoder == "autoregressive":
            decoded = self._autoregressive(queries, state, linear)
        else:
            decoded = self._decode(queries, *self._states(state, last))
        decoded = g.slice(decoded, 1, 0, config.horizon)
        if linear is not None:
            decoded = self._moved(decoded, linear)
        self._add_outputs(decoded, at, targets, levels, unit)
        g.graph.metadata.update(self._metadata(levels))
        return g.graph

    def _of_windows(self, raw: Value) -> tuple[Columns, tuple[Value, Value]]:
        """Returns targets in units of their window, and its mean and deviation `(B, 1, C)`; as
        `forecast.data.series_scale.scale_of_windows`."""
        g, C = self._g, self._config.num_targets
        plain = scaled(g, raw, np.zeros(C), np.ones(C))
        mean, offsets, variance = moments(g, plain)
        level = g.unary("sqrt", mean * mean)
        level = g.where(g.binary("equal", level, 0.0), g.constant(np.float32(1.0)), level)
        std = g.binary("maximum", g.unary("sqrt", variance), level * CONSTANT)
        return plain._replace(values=offsets / std), (mean, std)

    def _scaled(self, raw: Value, first: int) -> Columns:
        """Returns columns in units of their deviation, from the first of them on."""
        scaler, last = self._stored.scaler, first + int(raw.shape[-1])
        return scaled(self._g, raw, scaler.mean[first:last], scaler.std[first:last])

    def _read(
        self,
        targets: Value,
        is_there: Value | None,
        features: Value | None,
        state: State | None = None,
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
            shared = shared * np.ones((K, 1), np.float32)
            x = g.concat([x, g.reshape(shared, (n, rows, width))], -1)
        x = g.unary("relu", g.linear(x, "embed.weight", "embed.bias"))
        if self._static is not None:
            d = config.embed_size
            whole = g.reshape(x, (n, "B", K, d)) + g.reshape(self._static, ("B", 1, d))
            x = g.reshape(whole, (n, rows, d))
        D = 2 if config.bidirectional else 1
        stack = LSTMStack("lstm.", config.hidden_size, config.num_layers, D)
        y, state = lstm_layers(g, x, stack, state)
        return state, g.slice(y, 0, n - 1, n)

    def _linear(self, targets: Value) -> Value:
        """Returns the linear forecast `(B, h, C)` of normalised targets `(B, L, C)` and future
        covariates."""
        g, network = self._g, self._network
        share = network.linear_share
        for name in LINEAR[:2]:
            g.graph.weights[name] = (share * getattr(network, name)).cpu().numpy()
        own = g.linear(g.transpose(targets, (0, 2, 1)), "linear_weight", "linear_bias")
        own = g.transpose(own, (0, 2, 1))
        if network.future.num_numbers:
            numbers = g.slice(self._future(), -1, 0, network.future.num_numbers)
            weight = (share * network.linear_future).cpu().numpy()
            own = own + g.reduce("sum", numbers * weight, -1)
        return own

    def _future(self) -> Value:
        """Returns the features of future covariates, `(B, h, width)`."""
        assert self._ahead is not None
        first = self._config.num_targets + self._config.num_past
        return self._future_features.of(self._scaled(self._ahead, first))

    def _states(self, state: State, last: Value) -> tuple[Value, Value]:
        """Returns what is decoded from, h and c `(B * channels, H)`."""
        g, config, H = self._g, self._config, self._config.hidden_size
        if config.stateful:
            hidden = g.reshape(last, (self._rows, H))
            return hidden, g.linear(hidden, "cell_of_hidden.weight", "cell_of_hidden.bias")
        both = []
        for value, name in zip(state[-1], ("hidden_of_both", "cell_of_both"), strict=True):
            one = both_ways(g, value)
            if config.bidirectional:
                one = g.linear(one, f"{name}.weight", f"{name}.bias")
            both.append(one)
        return both[0], both[1]

    def _queries(self) -> Value:
        """Returns the query of every future patch, `(m, 1 or B, channels, d)`."""
        g, config, m = self._g, self._config, self._network.num_patches
        position, channel = (
            part.detach().numpy() for part in (self._network.position, self._network.channel)
        )
        places = [np.repeat(position[:, None], len(channel), 1), np.repeat(channel[None], m, 0)]
        queries = g.constant(np.concatenate(places, -1)[:, None])  # (m, 1, channels, d)
        s, h, d = config.patch, config.horizon, config.embed_size
        if self._ahead is not None:
            width, parts = self._future_features.width, [self._future()]
            if m * s > h:
                parts.append(repeated(g, self._raw, np.zeros((m * s - h, width))))
            patches = g.reshape(g.concat(parts, 1), ("B", m, s * width))
            known = g.linear(g.transpose(patches, (1, 0, 2)), "known.weight", "known.bias")
            queries = queries + g.reshape(known, (m, "B", 1, d))
        if self._static is not None:
            queries = queries + g.reshape(self._static, (1, "B", 1, d))
        return queries

    def _decode(self, queries: Value, hidden: Value, cell: Value) -> Value:
        """Returns `(B, m * s, C, parameters)`: a cell step per patch, all from one state."""
        g, config, K = self._g, self._config, self._network.num_channels
        m, H, each = int(queries.shape[0]), config.hidden_size, self._network.output.num_parameters
        s, C = config.patch, config.num_targets
        recurrent = g.reshape(g.linear(hidden, "cell_hh.weight"), (1, "B", K, 4 * H))
        gates = g.linear(queries, "cell_ih.weight", "cell_ih.bias") + recurrent
        i, f, u, o = (g.slice(gates, -1, k * H, (k + 1) * H) for k in range(4))
        kept = g.unary("sigmoid", f) * g.reshape(cell, (1, "B", K, H))
        new = kept + g.unary("sigmoid", i) * g.unary("tanh", u)
        out = g.unary("sigmoid", o) * g.unary("tanh", new)
        decoded = g.linear(out, "head.weight", "head.bias")  # (m, B, K, s * C / K * parameters)
        decoded = g.reshape(decoded, (m, "B", K, s, C // K * each))
        return g.reshape(g.transpose(decoded, (1, 0, 3, 2, 4)), ("B", m * s, C, each))

    def _autoregressive(self, queries: Value, state: State, linear: Value | None) -> Value:
        """Returns the same as `_decode`; the LSTM reads each patch's forecast before the next."""
        g, s = self._g, self._config.patch
        features = self._known_features() if self._past_features.width else None
        decoded: list[Value] = []
        for k in range(self._network.num_patches):
            if k:
                own = self._center(decoded[-1])
                if linear is not None:
                    own = own + g.slice(linear, 1, (k - 1) * s, k * s)
                rows = None if features is None else g.slice(features, 1, (k - 1) * s, k * s)
                state, _ = self._read(own, None, rows, state)
            query = g.slice(queries, 0, k, k + 1)
            decoded.append(self._decode(query, *self._states(state, queries)))
        return g.concat(decoded, 1)

    def _known_features(self) -> Value:
        """Returns features of the horizon's covariates, past ones missing, `(B, h, width)`."""
        config, parts = self._config, [] if self._ahead is None else [self._ahead]
        if config.num_past:
            unknown = np.full((config.horizon, config.num_past), math.nan)
            parts.insert(0, repeated(self._g, self._raw, unknown))
        values = self._scaled(self._g.concat(parts, -1), config.num_targets)
        return self._past_features.of(values)

    # outputs in the table's units

    def _parameter(self, parameters: Value, at: int) -> Value:
        part = self._g.slice(parameters, -1, at, at + 1)
        return self._g.reshape(part, parameters.shape[:-1])

    def _center(self, parameters: Value, at: Levels | None = None) -> Value:
        """Returns the point forecast `(B, steps, C)` of the network's numbers `(B, steps, C, ·)`;
        `at` puts it back."""
        g, output = self._g, self._network.output
        point = self._parameter(parameters, output.center_at)
        point = g.unary("softplus", point) if output.counts else point
        point = point if at is None else at.restored(g, point)
        return point + 1e-6 if output.counts else point

    def _moved(self, parameters: Value, offset: Value) -> Value:
        """Returns the network's numbers `(B, h, C, ·)` of values plus an offset `(B, h, C)`."""
        g, offset = self._g, self._g.reshape(offset, (*offset.shape, 1))
        if self._config.output != "student_t":
            return parameters + offset
        degrees, location, width = (g.slice(parameters, -1, k, k + 1) for k in range(3))
        return g.concat([degrees, location + offset, width], -1)

    def _add_outputs(
        self,
        parameters: Value,
        at: Levels,
        targets: Columns,
        levels: Sequence[float],
        unit: tuple[Value, Value] | None,
    ) -> None:
        """Adds the outputs of the network's numbers `(B, h, C, ·)` of targets that are normalised
        at a level; `unit` is mean and deviation of each window, `(B, 1, C)`, None: the scaler's."""
        g, config, scaler, C = self._g, self._config, self._stored.scaler, self._config.num_targets
        of_all = scaler.mean[:C], scaler.std[:C]
        mean, std = unit or of_all
        unknown = None if config.has_missing else _nan_if_missing(g, targets, config.channels)

        def output(name: str, value: Value) -> None:
            g.output(name, value if unknown is None else value + unknown)

        output("forecast", unscaled(self._center(parameters, at), mean, std))
        if config.output == "student_t":
            output("degrees_of_freedom", g.unary("softplus", self._parameter(parameters, 0)) + 2.0)
            width = at.restored(g, g.unary("softplus", self._parameter(parameters, 2)), True)
            none = g.constant(np.float32(0.0)) if unit else np.zeros(C)
            output("scale", unscaled(width + 1e-6, none, std))
        if config.output == "negative_binomial":
            output("dispersion", g.unary("softplus", self._parameter(parameters, 1)) + 1e-4)
        if len(levels):
            quantiles = self._calibrated(at.restored(g, parameters), targets, levels)
            of_windows = unit and [g.reshape(value, ("B", 1, C, 1)) for value in unit]
            quantiles = unscaled(quantiles, *(of_windows or (s[:, None] for s in of_all)))
            if unknown is not None:
                quantiles = quantiles + g.reshape(unknown, (*unknown.shape, 1))
            g.output("quantiles", quantiles)

    def _calibrated(self, base: Value, targets: Columns, levels: Sequence[float]) -> Value:
        """Returns quantiles as `Calibration.quantiles`, `(B, h, C, Q)`, of the network's ones or
        of points.

        How many residuals are infinite is known here, and so which quantiles are: these are added
        last.
        """
        g, config = self._g, self._config
        if config.output != "point":
            g.graph.weights["quantiles.interpolation"] = _interpolation(LEVELS, OUTPUT_QUANTILES)
            base = g.linear(g.sort(base), "quantiles.interpolation")
        spread = g.unary("sqrt", moments(g, targets, default=1.0)[2]) + MIN_SPREAD
        if config.normalize != "standard":
            spread = g.unary("sqrt", spread)
        residuals = self._stored.calibration.residuals.cpu().numpy()  # (25, h, C)
        weights = _interpolation(np.asarray(levels, np.float64).round(9), LEVELS)
        g.graph.weights["calibration.interpolation"] = weights
        finite = np.nan_to_num(residuals, posinf=_LARGE, neginf=-_LARGE).transpose(1, 2, 0)
        known = base + g.constant(finite) * g.reshape(spread, (*spread.shape, 1))
        between = g.linear(g.sort(known), "calibration.interpolation")
        ordered = np.sort(residuals, 0)  # what is infinite comes to the same places
        below, above = (weights > 0).argmax(1), len(LEVELS) - 1 - (weights > 0)[:, ::-1].argmax(1)
        low, high = (np.where(np.isinf(ordered[at]), ordered[at], 0.0) for at in (below, above))
        infinite = np.where(np.isinf(low), low, high).transpose(1, 2, 0)
        return between + infinite if infinite.any() else between

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


def _nan_if_missing(g: GraphBuilder, targets: Columns, channels: str) -> Value:
    """Returns `(B, 1, C)`: NaN for targets with missing values, of joint channels for all; or 0."""
    L, C = targets.values.shape[1:]
    present = g.reduce("sum", g.cast(targets.is_there, "float32"), 1)
    count = int(L)
    if channels == "joint":
        present, count = g.reduce("sum", present, 2), int(L) * int(C)
    none = g.constant(np.float32(0.0))
    return g.where(g.binary("equal", present, float(count)), none, math.nan)


def _interpolation(
    wanted: Sequence[float] | NDArray[np.float64], known: Sequence[float]
) -> NDArray[np.float32]:
    """Returns the shares of values at known levels in those at wanted ones, `(wanted, known)`."""
    shares = [np.interp(wanted, known, one) for one in np.eye(len(known))]
    return np.stack(shares, 1).astype(np.float32)
