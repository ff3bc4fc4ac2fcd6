"""Floating-point operations and bytes of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastlstm.ops.call import LSTMCall


@dataclass(frozen=True)
class Cost:
    """Work of one call; a multiply-add counts two operations.

    Attributes:
        flop: floating-point operations of the matrix products, the part worth counting.
        bytes: least traffic: every operand and result moved once.
    """

    flop: int
    bytes: int


def lstm_flop(T: int, B: int, I: int, H: int, V: int | None = None) -> int:  # noqa: E741
    """Returns the operations of a layer's forward pass; the backward pass has twice as many.

    Args:
        T: steps.
        B: batch.
        I: input size.
        H: hidden size.
        V: rows of the embedding, where the input is tokens: it is multiplied once, not per step.
    """
    rows = T * B if V is None else V
    return 8 * H * (rows * I + T * B * H)


def lstm_cost(call: LSTMCall) -> Cost:
    """Returns the cost of `call`: forward, plus backward where it requires a gradient.

    Cost:
        Forward `8 T B H (I + H)`; backward forms the gradients of input and weights, twice that.
    """
    passes = 3 if call.requires_grad else 1
    size = call.dtype.itemsize
    weights = 4 * call.H * (call.I + call.H + 2)
    activations = call.T * call.B * (call.I + call.H)
    gates = call.T * call.B * 4 * call.H if call.requires_grad else 0
    return Cost(
        flop=passes * lstm_flop(call.T, call.B, call.I, call.H),
        bytes=size * (passes * (weights + activations) + 2 * gates),
    )
