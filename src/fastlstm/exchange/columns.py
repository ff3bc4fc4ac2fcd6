"""Columns of a table in a `Graph`: scaled, missing values filled, names embedded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from fastlstm.exchange.graph import GraphBuilder, Value


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
    """Returns columns in units of their deviation.

    Args:
        g: the graph.
        raw: `(…, columns)` in the table's units; NaN is missing.
        mean: of each column.
        std: its deviation.
    """
    is_there = g.unary("not", g.unary("is_nan", raw))
    values = g.where(is_there, raw, 0.0)
    high, low = _split(mean)
    for part in (high, low):  # float32 alone would move large columns
        if part.any():
            values = g.binary("sub", values, g.constant(part))
    if (std != 1).any():
        values = g.binary("div", values, g.constant(std.astype(np.float32)))
    if mean.any():
        values = g.where(is_there, values, 0.0)
    return Columns(values, is_there)


def unscaled(
    g: GraphBuilder,
    values: Value,
    mean: Any,
    std: Any,
) -> Value:
    """Returns targets in the table's units; mean and std, arrays or values of the graph, are
    broadcast to them."""
    if not isinstance(mean, np.ndarray):
        return g.binary("add", g.binary("mul", values, std), mean)
    if (std != 1).any():
        values = g.binary("mul", values, g.constant(std.astype(np.float32)))
    for part in reversed(_split(mean)):
        if part.any():
            values = g.binary("add", values, g.constant(part))
    return values


def _split(mean: NDArray[np.float64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    high = mean.astype(np.float32)
    return high, (mean - high).astype(np.float32)


class Features:
    """`forecast.model.categorical.CategoricalFeatures` in a graph.

    Args:
        g: the graph; the tables of embeddings are added to its weights.
        name: of the module in the network.
        num_columns: of the input.
        categories: (position, size) of categorical columns.
        tables: float32 embeddings of each, unknown values last.

    Attributes:
        width: of the output.
    """

    def __init__(
        self,
        g: GraphBuilder,
        name: str,
        num_columns: int,
        categories: tuple[tuple[int, int], ...],
        tables: Sequence[NDArray[np.float32]],
    ) -> None:
        self._g, self._categories = g, categories
        self._names = [f"{name}.embeddings.{k}.trained" for k in range(len(tables))]
        g.graph.weights.update(zip(self._names, tables, strict=True))
        self._numbers = sorted(set(range(num_columns)).difference(p for p, _ in categories))
        self.width = len(self._numbers) + sum(table.shape[1] for table in tables)

    def of(self, columns: Columns) -> Value:
        """Returns features `(…, width)` of columns `(…, num_columns)`."""
        g, values = self._g, columns.values
        parts = [g.slice(values, -1, first, last) for first, last in _runs(self._numbers)]
        for (place, size), table in zip(self._categories, self._names, strict=True):
            one = (g.slice(part, -1, place, place + 1) for part in columns)
            parts.append(g.gather(table, _codes(g, Columns(*one), size)))
        return g.concat(parts, -1)


def _codes(g: GraphBuilder, column: Columns, size: int) -> Value:
    """Returns numbers of names `(B, …)` int32, `size` for unknown ones."""
    codes = column.values
    is_negative = g.binary("less", codes, 0.0)
    codes = g.where(column.is_there, g.binary("minimum", codes, float(size)), float(size))
    codes = g.where(g.unary("not", is_negative), codes, float(size))
    return g.cast(g.reshape(codes, codes.shape[:-1]), "int32")


def repeated(g: GraphBuilder, rows: Value, array: Any) -> Value:
    """Returns an array `(k, n)` once for each of the rows `(B, …, …)`: `(B, k, n)`."""
    is_nan = g.unary("is_nan", g.slice(g.slice(rows, 1, 0, 1), 2, 0, 1))
    none = g.binary("mul", g.cast(is_nan, "float32"), 0.0)
    return g.binary("add", none, g.constant(np.asarray(array, np.float32)))


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """Returns first and last (exclusive) of each run of successive numbers."""
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and runs[-1][1] == place:
            runs[-1] = runs[-1][0], place + 1
        else:
            runs.append((place, place + 1))
    return runs
