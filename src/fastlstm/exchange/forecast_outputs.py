"""Outputs of a forecaster in a `Graph`: points, calibrated quantiles, distributions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from fastlstm.errors import ConfigError
from fastlstm.exchange.columns import present_mean, unscaled
from fastlstm.forecast.calibration import LEVELS, MIN_SPREAD, require_known
from fastlstm.forecast.model.config import ForecasterConfig
from fastlstm.forecast.model.outputs import QUANTILES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fastlstm.exchange.columns import Columns, Levels
    from fastlstm.exchange.graph import GraphBuilder, Value
    from fastlstm.forecast.config import OutputKind
    from fastlstm.forecast.files import StoredForecaster

_LARGE = 1e30
"""Stands for an infinite residual while quantiles are sorted and interpolated."""


def center(
    g: GraphBuilder,
    output: OutputKind,
    parameters: Value,
    scale: Value | None = None,
    shift: Value | None = None,
) -> Value:
    """Returns the point forecast `(B, steps, C)` of a network's numbers `(B, steps, C, ·)`."""
    at = {"quantiles": QUANTILES.index(0.5), "student_t": 1}.get(output, 0)
    is_counts = output == "negative_binomial"
    point = _parameter(g, parameters, at)
    point = g.unary("softplus", point) if is_counts else point
    point = _restored(g, point, scale, shift)
    return g.binary("add", point, 1e-6) if is_counts else point


def moved(g: GraphBuilder, output: OutputKind, parameters: Value, offset: Value) -> Value:
    """Returns a network's numbers `(B, h, C, ·)` of values plus an offset `(B, h, C)`."""
    offset = g.reshape(offset, (*offset.shape, 1))
    if output != "student_t":
        return g.binary("add", parameters, offset)
    degrees, location, width = (g.slice(parameters, -1, k, k + 1) for k in range(3))
    return g.concat([degrees, g.binary("add", location, offset), width], -1)


def _parameter(g: GraphBuilder, parameters: Value, at: int) -> Value:
    return g.reshape(g.slice(parameters, -1, at, at + 1), parameters.shape[:-1])


def _restored(g: GraphBuilder, value: Value, scale: Value | None, shift: Value | None) -> Value:
    if scale is not None:
        value = g.binary("mul", value, scale)
    return value if shift is None else g.binary("add", value, shift)


def add_outputs(
    g: GraphBuilder,
    stored: StoredForecaster,
    parameters: Value,
    normalised: Levels,
    targets: Columns,
    levels: Sequence[float],
    unit: tuple[Value, Value] | None,
) -> None:
    """Adds the outputs in the table's units.

    Args:
        g: the graph.
        stored: the forecaster.
        parameters: the network's numbers, normalised, `(B, h, C, ·)`.
        normalised: how the targets were.
        targets: in units of their deviation.
        levels: of the quantiles, none for points alone.
        unit: mean and deviation of the targets of each window, `(B, 1, C)`; None: the scaler's.
    """
    config, C = stored.network.config, stored.network.config.num_targets
    of_all = stored.scaler.mean[:C], stored.scaler.std[:C]
    mean, std = unit or of_all
    scale, shift = normalised.scale, normalised.shift
    unknown = None if config.has_missing else _nan_if_missing(g, targets, config.channels)

    def output(name: str, value: Value) -> None:
        g.output(name, value if unknown is None else g.binary("add", value, unknown))

    point = unscaled(g, center(g, config.output, parameters, scale, shift), mean, std)
    output("forecast", point)
    if config.output == "student_t":
        degrees = g.unary("softplus", _parameter(g, parameters, 0))
        output("degrees_of_freedom", g.binary("add", degrees, 2.0))
        width = _restored(g, g.unary("softplus", _parameter(g, parameters, 2)), scale, None)
        none = g.constant(np.float32(0.0)) if unit else np.zeros(C)
        output("scale", unscaled(g, g.binary("add", width, 1e-6), none, std))
    if config.output == "negative_binomial":
        dispersion = g.unary("softplus", _parameter(g, parameters, 1))
        output("dispersion", g.binary("add", dispersion, 1e-4))
    if len(levels):
        scale, shift = (v and g.reshape(v, ("B", 1, C, 1)) for v in (scale, shift))
        base = _at_calibrated_levels(g, _restored(g, parameters, scale, shift), config.output)
        residuals = stored.calibration.residuals.cpu().numpy()
        quantiles = _calibrated(g, base, _spread(g, targets, config), residuals, levels)
        of_windows = unit and [g.reshape(value, ("B", 1, C, 1)) for value in unit]
        quantiles = unscaled(g, quantiles, *(of_windows or (s[:, None] for s in of_all)))
        if unknown is not None:
            unknown = g.reshape(unknown, (*unknown.shape, 1))
            quantiles = g.binary("add", quantiles, unknown)
        g.output("quantiles", quantiles)


def check_levels(output: OutputKind, levels: Sequence[float]) -> None:
    """Raises ConfigError for levels of quantiles that an exported forecaster does not have."""
    if len(levels) and output in ("student_t", "negative_binomial"):
        raise ConfigError(
            f"an exported forecaster with `output={output!r}` has no quantiles but the parameters"
            " of its distribution; leave out `quantiles`"
        )
    require_known(levels)


def _nan_if_missing(g: GraphBuilder, targets: Columns, channels: str) -> Value:
    """Returns `(B, 1, C)`: NaN for targets with missing values, of joint channels for all; or 0."""
    L, C = targets.values.shape[1:]
    present = g.reduce("sum", g.cast(targets.is_there, "float32"), 1)
    count = int(L)
    if channels == "joint":
        present, count = g.reduce("sum", present, 2), int(L) * int(C)
    none = g.constant(np.float32(0.0))
    return g.where(g.binary("equal", present, float(count)), none, math.nan)


def _spread(g: GraphBuilder, targets: Columns, config: ForecasterConfig) -> Value:
    """Returns the spread of the windows as `calibration.spread`, `(B, 1, C, 1)`."""
    offsets = g.binary("sub", targets.values, present_mean(g, targets))
    offsets = g.where(targets.is_there, offsets, 0.0)
    square = g.binary("mul", offsets, offsets)
    variance = present_mean(g, targets._replace(values=square), default=1.0)
    spread = g.binary("add", g.unary("sqrt", variance), MIN_SPREAD)
    if config.normalize != "standard":
        spread = g.unary("sqrt", spread)
    return g.reshape(spread, (*spread.shape, 1))


def _at_calibrated_levels(g: GraphBuilder, parameters: Value, output: OutputKind) -> Value:
    """Returns the network's quantiles at `LEVELS`, `(B, h, C, 25)`, or points, `(B, h, C, 1)`."""
    if output == "point":
        return parameters
    g.graph.weights["quantiles.interpolation"] = _interpolation(LEVELS, QUANTILES)
    return g.linear(g.sort(parameters), "quantiles.interpolation")


def _calibrated(
    g: GraphBuilder,
    base: Value,
    spread: Value,
    residuals: NDArray[np.float32],
    levels: Sequence[float],
) -> Value:
    """Returns quantiles as `Calibration.quantiles`, `(B, h, C, Q)`; residuals are `(25, h, C)`.

    How many of them are infinite is known here, and so which quantiles are: these are added last.
    """
    weights = _interpolation(np.asarray(levels, np.float64).round(9), LEVELS)
    g.graph.weights["calibration.interpolation"] = weights
    finite = np.nan_to_num(residuals, posinf=_LARGE, neginf=-_LARGE).transpose(1, 2, 0)
    known = g.binary("add", base, g.binary("mul", g.constant(finite), spread))
    between = g.linear(g.sort(known), "calibration.interpolation")
    ordered = np.sort(residuals, 0)  # what is infinite comes to the same places
    below, above = (weights > 0).argmax(1), len(LEVELS) - 1 - (weights > 0)[:, ::-1].argmax(1)
    low, high = (np.where(np.isinf(ordered[at]), ordered[at], 0.0) for at in (below, above))
    infinite = np.where(np.isinf(low), low, high).transpose(1, 2, 0)
    return g.binary("add", between, g.constant(infinite)) if infinite.any() else between


def _interpolation(
    wanted: Sequence[float] | NDArray[np.float64], known: Sequence[float]
) -> NDArray[np.float32]:
    """Returns the shares of values at known levels in those at wanted ones, `(wanted, known)`."""
    shares = [np.interp(wanted, known, one) for one in np.eye(len(known))]
    return np.stack(shares, 1).astype(np.float32)
