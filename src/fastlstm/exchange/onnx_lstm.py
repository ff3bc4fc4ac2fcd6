"""ONNX's LSTM operator as a layer of a stack."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import FormatError
from fastlstm.exchange.onnx_file import Operation
from fastlstm.ops.cell_options import Activation
from fastlstm.sequence.layer_stack import CellWeights, LSTMLayer

_TORCHS_ORDER = (0, 2, 3, 1)
"""Gates i, f, g, o in ONNX's order i, o, f, c."""
_NAMES: dict[str, Activation] = {
    "sigmoid": "sigmoid", "tanh": "tanh", "relu": "relu", "softsign": "softsign",
    "hardsigmoid": "hard_sigmoid", "affine": "linear",
}  # fmt: skip
_NUMBERS = {
    "affine": (1.0, 0.0), "hardsigmoid": (0.2, 0.5), "leakyrelu": (0.01, None),
    "thresholdedrelu": (1.0, None), "elu": (1.0, None), "scaledtanh": (1.0, 1.0),
}  # fmt: skip
"""Functions that take an alpha or a beta, with what these are where they are not given."""


def lstm_layer(operation: Operation, weights: list[Any]) -> LSTMLayer:
    """Returns the layer; what it reads and which of its outputs are used is not decided here.

    Args:
        operation: the node.
        weights: W `(D, 4H, I)`, R `(D, 4H, H)`, B `(D, 8H)` or None, P or None.

    Raises:
        FormatError: weights of wrong shapes, or a cell that is not here.
    """
    W, R, B, P = weights
    label, attributes = operation.label, operation.attributes
    direction = _text(attributes.get("direction", b"forward"))
    if direction not in ("forward", "reverse", "bidirectional"):
        raise FormatError(f"{label} has the direction {direction!r:.40}")
    D = 2 if direction == "bidirectional" else 1
    H = R.shape[-1] if R.ndim == 3 else 0
    shapes = [W.shape[:2] == (D, 4 * H), R.shape == (D, 4 * H, H), W.ndim == 3 and W.shape[2] > 0]
    if not H or not all(shapes) or (B is not None and B.shape != (D, 8 * H)):
        of_bias = "" if B is None else f", B {B.shape}"
        raise FormatError(
            f"{label} has W {W.shape}, R {R.shape}{of_bias}, expected"
            f" ({D}, 4H, I), ({D}, 4H, H) and ({D}, 8H)"
        )
    if attributes.get("hidden_size", H) != H:
        raise FormatError(f"{label} has hidden_size {attributes['hidden_size']} and R {R.shape}")
    if P is not None and P.any():
        raise FormatError(f"{label} has peepholes (its input P), which are not imported")
    for name in ("clip", "input_forget"):
        if attributes.get(name):
            raise FormatError(f"{label} has {name}, which is not imported")
    gates, candidate, scale, shift = _activations(operation, D)
    order = np.concatenate([np.arange(H) + k * H for k in _TORCHS_ORDER])
    is_gate = np.repeat([True, True, False, True], H)
    factor = np.where(is_gate, np.float32(scale), np.float32(1))
    cells = []
    for d in range(D):
        bias = np.zeros(4 * H, np.float32) if B is None else _float(B[d, : 4 * H] + B[d, 4 * H :])
        w, r, b = _float(W[d])[order], _float(R[d])[order], bias[order]
        if scale != 1:
            w, r, b = w * factor[:, None], r * factor[:, None], b * factor
        b = b + np.where(is_gate, np.float32(shift), np.float32(0)) if shift else b
        cells.append(CellWeights(w, r, b))
    return LSTMLayer(
        operation.name, cells[0], cells[1] if D == 2 else None,
        activation=candidate, recurrent_activation=gates,
    )  # fmt: skip


def _activations(operation: Operation, D: int) -> tuple[Activation, Activation, float, float]:
    """Returns functions of the gates and of the candidate, and what turns x into the argument of
    the first one: scale * x + shift.

    Raises:
        FormatError: functions that a layer here does not have.
    """
    attributes, label = operation.attributes, operation.label
    names = [_text(name).lower() for name in attributes.get("activations") or ()]
    names = names or ["sigmoid", "tanh", "tanh"] * D
    if len(names) != 3 * D:
        raise FormatError(f"{label} has {len(names)} activations, expected {3 * D}")
    alphas = list(attributes.get("activation_alpha") or ())
    betas = list(attributes.get("activation_beta") or ())
    functions = []
    for name in names:
        alpha, beta = _NUMBERS.get(name, (None, None))
        if alpha is not None and alphas:
            alpha = alphas.pop(0)
        if beta is not None and betas:
            beta = betas.pop(0)
        functions.append((name, alpha, beta))
    if functions[:3] != functions[-3:] or functions[1] != functions[2]:
        raise FormatError(
            f"{label} has the activations {', '.join(names)}: those of candidate and cell, and of"
            " both directions, are the same here"
        )
    for name, alpha, beta in functions:
        if name not in _NAMES or (name == "affine" and (alpha, beta) != (1.0, 0.0)):
            raise FormatError(
                f"{label} has the activation {name:.40}, expected one of Sigmoid, Tanh, Relu,"
                " Softsign, HardSigmoid, Affine (1, 0)"
            )
    (gates, alpha, beta), (candidate, *numbers) = functions[:2]
    scale, shift = 1.0, 0.0
    if gates == "hardsigmoid":
        assert alpha is not None
        assert beta is not None
        # clip(alpha x + beta) is clip(y / 6 + 0.5) at y = 6 alpha x + 6 (beta - 0.5)
        scale, shift = _near(6 * alpha, 1.0), _near(6 * (beta - 0.5), 0.0)
    if candidate == "hardsigmoid" and not np.allclose(
        np.array(numbers, float), (1 / 6, 0.5), atol=1e-6
    ):
        raise FormatError(
            f"{label} has HardSigmoid with alpha {numbers[0]:g} and beta {numbers[1]:g} as the"
            " function of the candidate, expected 1/6 and 0.5"
        )
    return _NAMES[gates], _NAMES[candidate], scale, shift


def _near(value: float, exact: float) -> float:
    """Returns what a number means that was stored in float32."""
    return exact if abs(value - exact) < 1e-6 else value


def _float(array: NDArray[Any]) -> NDArray[np.float32]:
    return np.asarray(array, np.float32)


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
