"""What a forecaster subtracts from the targets of a window, and divides them by, in a `Graph`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from fastlstm.exchange.columns import Columns
    from fastlstm.exchange.graph import GraphBuilder, Value
    from fastlstm.forecast.model.config import ForecasterConfig


class Levels(NamedTuple):
    """Normalised targets, and how forecasts are put back.

    Attributes:
        inputs: `(B, L, C)`, 0 where missing.
        shift: to be added to forecasts, `(B, 1, C)`, or None.
        scale: to multiply them by before that, `(B, 1, C)`, or None.
    """

    inputs: Value
    shift: Value | None = None
    scale: Value | None = None


def window_level(
    g: GraphBuilder, config: ForecasterConfig, is_counts: bool, targets: Columns
) -> Levels:
    """Returns the targets of windows as `ForecastNetwork.forward` normalises them."""
    values, L = targets.values, config.input_size
    if is_counts:
        mean = present_mean(g, targets)
        scale = g.binary("add", g.unary("relu", mean), 1.0)
        return Levels(g.binary("div", values, scale), None, scale)
    if config.normalize == "none":
        return Levels(values)
    if config.normalize == "standard":
        mean = present_mean(g, targets)
        offsets = _where_present(g, config, g.binary("sub", values, mean), targets.is_there)
        square = g.binary("mul", offsets, offsets)
        variance = present_mean(g, targets._replace(values=square), default=1.0)
        scale = g.unary("sqrt", g.binary("add", variance, 1e-5))
        return Levels(g.binary("div", offsets, scale), mean, scale)
    if config.has_missing:
        last = _pick(g, targets, np.arange(1, L + 1), axis=1)
    else:
        last = g.slice(values, 1, L - 1, L)
    offsets = _where_present(g, config, g.binary("sub", values, last), targets.is_there)
    return Levels(offsets, last)


def patch_levels(g: GraphBuilder, config: ForecasterConfig, targets: Columns) -> Levels:
    """Returns the targets of windows as `ForecastNetwork.read_chunk` normalises them: each patch
    by the last value before it, else by its own first one."""
    if config.normalize == "none":
        return Levels(targets.values)
    s, L, C = config.patch, config.input_size, config.num_targets
    n = L // s
    patches = targets._replace(
        values=g.reshape(targets.values, ("B", n, s, C)),
        is_there=g.reshape(targets.is_there, ("B", n, s, C)),
    )
    shape = "B", n, C
    if config.has_missing:
        order = np.arange(1, s + 1)
        first = g.reshape(_pick(g, patches, order[::-1], axis=2), shape)
        last = g.reshape(_pick(g, patches, order, axis=2), shape)
        some = g.reduce("max", g.cast(patches.is_there, "float32"), 2)
        last, some = _carried(g, last, g.reshape(some, shape), n)
        before = g.slice(some, 1, 0, n - 1) if n > 1 else None
    else:
        first = g.reshape(g.slice(patches.values, 2, 0, 1), shape)
        last = g.reshape(g.slice(patches.values, 2, s - 1, s), shape)
        before = None
    level = g.slice(first, 1, 0, 1)
    if n > 1:
        others = g.slice(last, 1, 0, n - 1)
        if before is not None:
            is_none = g.binary("equal", before, 0.0)
            others = g.where(is_none, g.slice(first, 1, 1, n), others)
        level = g.concat([level, others], 1)
    offsets = g.binary("sub", patches.values, g.reshape(level, ("B", n, 1, C)))
    offsets = g.reshape(offsets, ("B", L, C))
    offsets = _where_present(g, config, offsets, targets.is_there)
    return Levels(offsets, g.slice(last, 1, n - 1, n))


def _where_present(
    g: GraphBuilder, config: ForecasterConfig, values: Value, is_there: Value
) -> Value:
    return g.where(is_there, values, 0.0) if config.has_missing else values


def present_mean(g: GraphBuilder, targets: Columns, default: float = 0.0) -> Value:
    """Returns the mean over the steps `(B, L, C)` that are there, `(B, 1, C)`."""
    count = g.reduce("sum", g.cast(targets.is_there, "float32"), 1)
    total = g.reduce("sum", targets.values, 1)
    mean = g.binary("div", total, g.binary("maximum", count, 1.0))
    if default:
        mean = g.where(g.binary("less", count, 1.0), g.constant(np.float32(default)), mean)
    return mean


def _pick(g: GraphBuilder, targets: Columns, order: np.ndarray, axis: int) -> Value:
    """Returns the present value that comes last in an order of the steps, numbers above 0, along
    an axis, which stays with length 1; 0 if none is present."""
    numbers = order.astype(np.float32).reshape(-1, 1)
    of_present = g.where(targets.is_there, g.constant(numbers), 0.0)
    is_it = g.binary("equal", of_present, g.reduce("max", of_present, axis))
    return g.reduce("sum", g.where(is_it, targets.values, 0.0), axis)


def _carried(g: GraphBuilder, last: Value, some: Value, n: int) -> tuple[Value, Value]:
    """Returns the values `(B, n, C)` of which there are some, each where there is none replaced by
    the nearest before it; and whether there is one. In log2(n) steps of twice the distance."""
    distance = 1
    while distance < n:
        shifted = []
        for value in (last, some):
            start = g.slice(value, 1, 0, distance)
            none = g.binary("mul", start, 0.0)
            shifted.append(g.concat([none, g.slice(value, 1, 0, n - distance)], 1))
        last = g.where(g.binary("equal", some, 0.0), shifted[0], last)
        some = g.binary("maximum", some, shifted[1])
        distance *= 2
    return last, some
