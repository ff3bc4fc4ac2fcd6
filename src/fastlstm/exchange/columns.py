"""Columns of windows in a `Graph`: scaled, missing values filled, names embedded; what a forecaster
subtracts from the targets of a window, and divides them by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fastlstm.exchange.graph import GraphBuilder, Value
from fastlstm.forecast.model.categorical import CategoricalFeatures
from fastlstm.forecast.model.config import ForecasterConfig


class Columns(NamedTuple):
    """Columns of some rows.

    Attributes:
        values: `(…, columns)`, in units of the network; 0 where missing.
        is_there: bool, of the same shape.
    """

    values: Value
    is_there: Value


def scaled(
    g: GraphBuilder, raw: Value, mean: NDArray[np.float64], std: NDArray[np.float64]
) -> Columns:
    """Returns columns `(…, columns)` in units of their deviation; NaN is missing."""
    is_there = g.unary("not", g.unary("is_nan", raw))
    values = g.where(is_there, raw, 0.0)
    high, low = _split(mean)
    for part in (high, low):  # float32 alone would move large columns
        if part.any():
            values = values - part
    if (std != 1).any():
        values = values / std.astype(np.float32)
    if mean.any():
        values = g.where(is_there, values, 0.0)
    return Columns(values, is_there)


def unscaled(values: Value, mean: Any, std: Any) -> Value:
    """Returns targets in the table's units; mean and std, arrays or values of the graph, are
    broadcast to them."""
    if isinstance(mean, Value) and isinstance(std, Value):
        return values * std + mean
    if (std != 1).any():
        values = values * std.astype(np.float32)
    for part in reversed(_split(mean)):
        if part.any():
            values = values + part
    return values


def _split(mean: NDArray[np.float64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    high = mean.astype(np.float32)
    return high, (mean - high).astype(np.float32)


class Features:
    """`CategoricalFeatures` in a graph; `width` counts output channels."""

    def __init__(self, g: GraphBuilder, name: str, module: CategoricalFeatures) -> None:
        self._g, self._module, self.width = g, module, module.width
        self._names = [f"{name}.embeddings.{k}.trained" for k in range(len(module.categories))]
        with torch.no_grad():
            parts = zip(self._names, module.embeddings, module.categories, strict=True)
            for table, embedding, (_, table_size) in parts:
                rows = torch.arange(table_size + 1)  # not trained ones have the mean
                g.graph.weights[table] = embedding(rows).numpy()

    def of(self, columns: Columns) -> Value:
        """Returns features `(…, width)` of columns `(…, num_columns)`."""
        g, module = self._g, self._module
        parts = [g.slice(columns.values, -1, a, b) for a, b in _runs(module.places)]
        for (place, size), table in zip(module.categories, self._names, strict=True):
            codes, is_there = (g.slice(part, -1, place, place + 1) for part in columns)
            is_negative = g.binary("less", codes, 0.0)
            codes = g.where(is_there, g.binary("minimum", codes, float(size)), float(size))
            codes = g.where(g.unary("not", is_negative), codes, float(size))
            parts.append(g.gather(table, g.cast(g.reshape(codes, codes.shape[:-1]), "int32")))
        return g.concat(parts, -1)


def repeated(g: GraphBuilder, rows: Value, array: Any) -> Value:
    """Returns an array `(k, n)` once for each of the rows `(B, …, …)`: `(B, k, n)`."""
    is_nan = g.unary("is_nan", g.slice(g.slice(rows, 1, 0, 1), 2, 0, 1))
    return g.cast(is_nan, "float32") * 0.0 + np.asarray(array, np.float32)


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """Returns first and last (exclusive) of each run of successive numbers."""
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and runs[-1][1] == place:
            runs[-1] = runs[-1][0], place + 1
        else:
            runs.append((place, place + 1))
    return runs


# levels of windows ------------------------------------------------------------------------------


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

    def restored(self, g: GraphBuilder, value: Value, is_width: bool = False) -> Value:
        """Returns values `(B, h, C)` or `(B, h, C, ·)` put back; a width is not shifted."""
        for kind, part in (("mul", self.scale), ("add", None if is_width else self.shift)):
            if part is not None:
                rest = (1,) * (len(value.shape) - 3)
                value = g.binary(kind, value, g.reshape(part, (*part.shape, *rest)))
        return value


def window_level(
    g: GraphBuilder, config: ForecasterConfig, is_counts: bool, targets: Columns
) -> Levels:
    """Returns the targets of windows as `ForecastNetwork.forward` normalises them."""
    values, L = targets.values, config.input_size
    if is_counts:
        scale = g.unary("relu", present_mean(g, targets)) + 1.0
        return Levels(values / scale, None, scale)
    if config.normalize == "none":
        return Levels(values)
    if config.normalize == "standard":
        mean, offsets, variance = moments(g, targets, default=1.0)
        scale = g.unary("sqrt", variance + 1e-5)
        return Levels(offsets / scale, mean, scale)
    if config.has_missing:
        last = _pick(g, targets, np.arange(1, L + 1), axis=1)
    else:
        last = g.slice(values, 1, L - 1, L)
    return Levels(g.where(targets.is_there, values - last, 0.0), last)


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
    offsets = patches.values - g.reshape(level, ("B", n, 1, C))
    offsets = g.where(targets.is_there, g.reshape(offsets, ("B", L, C)), 0.0)
    return Levels(offsets, g.slice(last, 1, n - 1, n))


def present_mean(g: GraphBuilder, targets: Columns, default: float = 0.0) -> Value:
    """Returns the mean over the steps `(B, L, C)` that are there, `(B, 1, C)`."""
    count = g.reduce("sum", g.cast(targets.is_there, "float32"), 1)
    mean = g.reduce("sum", targets.values, 1) / g.binary("maximum", count, 1.0)
    if default:
        mean = g.where(g.binary("less", count, 1.0), g.constant(np.float32(default)), mean)
    return mean


def moments(g: GraphBuilder, targets: Columns, default: float = 0.0) -> tuple[Value, Value, Value]:
    """Returns mean `(B, 1, C)`, offsets from it `(B, L, C)` and variance of the steps that are
    there; `default` is the variance of none."""
    mean = present_mean(g, targets)
    offsets = g.where(targets.is_there, targets.values - mean, 0.0)
    variance = present_mean(g, targets._replace(values=offsets * offsets), default)
    return mean, offsets, variance


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
            none = g.slice(value, 1, 0, distance) * 0.0
            shifted.append(g.concat([none, g.slice(value, 1, 0, n - distance)], 1))
        last = g.where(g.binary("equal", some, 0.0), shifted[0], last)
        some = g.binary("maximum", some, shifted[1])
        distance *= 2
    return last, some
