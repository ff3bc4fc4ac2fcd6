"""A layer of an LSTM as LiteRT's elementary operations, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from fastlstm.exchange.litert_file import Tensor
    from fastlstm.exchange.litert_operations import LiteRTOperations
    from fastlstm.ops.cell_options import CellOptions

from fastlstm.exchange.graph import CELL_EPSILON as EPSILON

"""Added to the variance in the cell's layer norm, as `ops.cell_call` does (which loads torch)."""


def write_lstm(
    ops: LiteRTOperations,
    x: Tensor,
    h: Tensor,
    c: Tensor,
    lengths: Tensor | None = None,
    *,
    directions: Any,
    options: CellOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Writes `GraphBuilder.lstm`; returns its three results.

    All tensors keep three axes, `(1, B, …)` of one step: what is read of `h` needs no reshape.
    """
    T = x.shape[0]
    assert isinstance(T, int), "LiteRT has no loops here: T is known"
    masks = None if lengths is None else _masks(ops, lengths, T)
    outputs, hs, cs = [], [], []
    for d, direction in enumerate(directions):
        cell = _Cell(ops, direction, options)
        state = ops.slice(h, 0, d, d + 1), ops.slice(c, 0, d, d + 1)
        y, h_d, c_d = cell.run(x, state, masks, is_backward=d == 1)
        outputs.append(y)
        hs.append(h_d)
        cs.append(c_d)
    return ops.concat(outputs, 2), ops.concat(hs, 0), ops.concat(cs, 0)


def _masks(ops: LiteRTOperations, lengths: Tensor, T: int) -> list[Tensor]:
    """Returns for each step which sequences it is within, `(1, B, 1)` bool."""
    by_row = ops.reshape(lengths, (1, lengths.shape[0], 1))
    return [
        ops.op("LESS", [ops.constant(np.int32(t)), by_row], by_row.shape, "bool") for t in range(T)
    ]


class _Cell:
    """The cell of one direction of a layer."""

    def __init__(
        self,
        ops: LiteRTOperations,
        direction: tuple[str, str, tuple[str, ...]],
        options: CellOptions,
    ) -> None:
        self._ops, self._options = ops, options
        self._w_ih, self._w_hh, biases = direction
        self._norm = {
            name: ops.floats(self._w_ih.replace("weight_ih", name)) for name in options.parameters
        }
        total = sum((np.asarray(ops.weights[b], np.float32) for b in biases), np.float32(0))
        self._bias = ops.constant(np.asarray(total), f"{self._w_ih}.bias") if biases else None

    def run(
        self, x: Tensor, state: tuple[Tensor, Tensor], masks: list[Tensor] | None, is_backward: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the outputs `(T, B, H)` and the last state, `(1, B, H)` twice."""
        ops, T = self._ops, x.shape[0]
        assert isinstance(T, int)
        products = self._input_products(x)
        h, c = state
        outputs = []
        for t in reversed(range(T)) if is_backward else range(T):
            y, new_c = self._step(ops.slice(products, 0, t, t + 1), h, c)
            if masks is None:
                h, c = y, new_c
            else:
                h, c = ops.where(masks[t], y, h), ops.where(masks[t], new_c, c)
                y = ops.where(masks[t], y, 0.0)
            outputs.append(y)
        return ops.concat(outputs[::-1] if is_backward else outputs, 0), h, c

    def _input_products(self, x: Tensor) -> Tensor:
        """Returns what the input adds to the gates, bias included, of all steps at once."""
        if not self._norm:
            return self._ops.linear(x, self._w_ih, self._bias)
        products = self._normalised(self._ops.linear(x, self._w_ih, None), "gamma_ih")
        return products if self._bias is None else self._ops.binary("ADD", products, self._bias)

    def _step(self, products: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        ops, options = self._ops, self._options
        recurrent = ops.linear(h, self._w_hh, None)
        if self._norm:
            recurrent = self._normalised(recurrent, "gamma_hh")
        i, f, g, o = ops.split(ops.binary("ADD", products, recurrent), 2, 4)
        i, f, o = (self._activation(options.recurrent_activation, gate) for gate in (i, f, o))
        added = ops.binary("MUL", i, self._activation(options.activation, g))
        new_c = ops.binary("ADD", ops.binary("MUL", f, c), added)
        shown = new_c
        if self._norm:
            shown = ops.binary("ADD", self._normalised(new_c, "gamma_c"), self._norm["beta_c"])
        new_h = ops.binary("MUL", o, self._activation(options.activation, shown))
        keep_h, keep_c = options.zoneout
        return self._zoned_out(keep_h, h, new_h), self._zoned_out(keep_c, c, new_c)

    def _normalised(self, x: Tensor, gamma: str) -> Tensor:
        return self._ops.binary("MUL", self._ops.normalised(x, EPSILON), self._norm[gamma])

    def _zoned_out(self, keep: float, old: Tensor, new: Tensor) -> Tensor:
        ops = self._ops
        if keep == 0:
            return new
        return ops.binary("ADD", ops.binary("MUL", old, keep), ops.binary("MUL", new, 1 - keep))

    def _activation(self, name: str, x: Tensor) -> Tensor:
        ops = self._ops
        if name == "hard_sigmoid":
            line = ops.binary("ADD", ops.binary("MUL", x, 1 / 6), 0.5)
            return ops.binary("MINIMUM", ops.binary("MAXIMUM", line, 0.0), 1.0)
        if name == "softsign":
            return ops.binary("DIV", x, ops.binary("ADD", ops.unary("ABS", x), 1.0))
        kinds = {"sigmoid": "LOGISTIC", "tanh": "TANH", "relu": "RELU"}
        return ops.unary(kinds[name], x) if name in kinds else x
