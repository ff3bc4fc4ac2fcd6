"""Operators of ONNX on the output of layers, other than the LSTM: each becomes a layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import FormatError
from fastlstm.exchange.onnx_file import FLOATS, INTEGERS, Operation
from fastlstm.exchange.onnx_values import Stream, Value, spread_columns
from fastlstm.sequence.layer_stack import Dense, Embedding, Function, LayerNorm, LSTMLayer, Merge

_FUNCTIONS = {
    "Relu": "relu", "Tanh": "tanh", "Sigmoid": "sigmoid", "Softsign": "softsign",
    "Softplus": "softplus", "Exp": "exponential", "Elu": "elu", "Gelu": "gelu",
    "HardSigmoid": "hard_sigmoid_0.2", "Softmax": "softmax", "LogSoftmax": "log_softmax",
}  # fmt: skip
_MAX_SQUARE = 8192
"""Columns of the largest square matrix that stands for one-hot input or for a product."""


def _gather(operation: Operation, inputs: list[Value]) -> Stream:
    table, tokens = inputs[:2]
    if not isinstance(table, np.ndarray) or not isinstance(tokens, Stream) or table.ndim != 2:
        raise FormatError(f"{operation.label} is no embedding: it needs a table (V, E) and tokens")
    if operation.attributes.get("axis", 0) != 0 or not tokens.is_tokens or tokens.layers:
        raise FormatError(f"{operation.label} is an embedding of what is not the model's input")
    weight = np.asarray(table, np.float32)
    return tokens.with_layer(Embedding(operation.name, weight), tokens.at, weight.shape[1])


def _one_hot(operation: Operation, inputs: list[Value]) -> Stream:
    tokens, depth, ends = inputs[:3]
    V = int(depth.ravel()[0]) if isinstance(depth, np.ndarray) and depth.size == 1 else 0
    is_plain = isinstance(ends, np.ndarray) and ends.ravel().tolist() == [0, 1]
    if not is_plain or operation.attributes.get("axis", -1) != -1 or not 0 < V <= _MAX_SQUARE:
        raise FormatError(
            f"{operation.label} is imported with the values 0 and 1, on the last axis, and no more"
            f" than {_MAX_SQUARE} columns"
        )
    return _gather(replace(operation, attributes={}), [np.eye(V, dtype=np.float32), tokens])


def _matmul(operation: Operation, inputs: list[Value]) -> Stream:
    x, weight = inputs[:2]
    if not isinstance(x, Stream) or not isinstance(weight, np.ndarray) or weight.ndim != 2:
        raise FormatError(f"{operation.label} is imported as steps times a matrix of the file")
    return _dense(operation, x, weight.T)


def _gemm(operation: Operation, inputs: list[Value]) -> Stream:
    x, weight, bias = [*inputs, None][:3]
    get = operation.attributes.get
    if (
        not isinstance(x, Stream)
        or not isinstance(weight, np.ndarray)
        or weight.ndim != 2
        or get("transA", 0)
    ):
        raise FormatError(f"{operation.label} is imported as steps times a matrix of the file")
    weight = weight if get("transB", 0) else weight.T
    alpha, beta = np.float32(get("alpha", 1.0)), np.float32(get("beta", 1.0))
    y = _dense(operation, x, weight if alpha == 1 else weight * alpha)
    if bias is None:
        return y
    if not isinstance(bias, np.ndarray):
        raise FormatError(f"{operation.label} is imported as steps times a matrix of the file")
    return _shifted(operation, y, bias if beta == 1 else bias * beta)


def _dense(operation: Operation, x: Stream, weight: NDArray[Any]) -> Stream:
    """Returns `weight (K, C)` times the columns of every step."""
    found = x.by_row()
    if found is None or len(found[1]) != weight.shape[1] or x.is_tokens:
        raise FormatError(
            f"{operation.label} has a matrix for {weight.shape[1]} columns and does not read the"
            " columns of each step"
        )
    spread = spread_columns(weight, found[1], x.width)
    layer = Dense(operation.name, spread, np.zeros(len(weight), np.float32))
    return x.with_layer(layer, found[0], len(weight))


def _add(operation: Operation, inputs: list[Value]) -> Stream:
    return _of_two(operation, inputs, "sum", _shifted)


def _mul(operation: Operation, inputs: list[Value]) -> Stream:
    return _of_two(operation, inputs, "mul", _scaled)


def _of_two(
    operation: Operation,
    inputs: list[Value],
    merge: Merge,
    with_constants: Callable[[Operation, Stream, Any], Stream],
) -> Stream:
    """Returns both ways of an LSTM as one output, or an output with constants."""
    a, b = inputs[:2]
    if isinstance(a, Stream) and isinstance(b, Stream):
        return _merged(operation, a, b, merge)
    x, array = (a, b) if isinstance(a, Stream) else (b, a)
    assert isinstance(x, Stream)
    return with_constants(operation, x, array)


def _sub(operation: Operation, inputs: list[Value]) -> Stream:
    x, array = inputs[:2]
    if not isinstance(x, Stream) or not isinstance(array, np.ndarray):
        raise FormatError(f"{operation.label} is imported as a constant that is taken away")
    return _shifted(operation, x, -array)


def _div(operation: Operation, inputs: list[Value]) -> Stream:
    x, array = inputs[:2]
    if not isinstance(x, Stream) or not isinstance(array, np.ndarray) or not array.all():
        raise FormatError(f"{operation.label} is imported as a division by a constant")
    return _scaled(operation, x, np.float32(1) / array)


def _merged(operation: Operation, a: Stream, b: Stream, merge: Merge) -> Stream:
    """Returns both ways of an LSTM as one output."""
    for ways in ((a, b), (b, a)):
        if a.layers is not b.layers or a.at.shape != b.at.shape:
            break
        both = replace(a, at=np.concatenate([way.at for way in ways], -1)).of_last_step()
        found, last = both.by_row(), both.layers[-1]
        if found is not None and isinstance(last, LSTMLayer) and last.backward is not None:
            columns, H = found[1], last.hidden_size
            if last.merge == "concat" and np.array_equal(columns, np.arange(2 * H)):
                before = replace(both, layers=both.layers[:-1])
                return before.with_layer(replace(last, merge=merge), found[0], H)
    raise FormatError(f"{operation.label} joins different paths; imported are models of one")


def _by_column(operation: Operation, x: Stream, array: Any, rest: float) -> NDArray[np.float32]:
    """Returns the constants `(width,)` that meet each column.

    Raises:
        FormatError: those of different steps differ.
    """
    vector = np.full(x.width, rest, np.float32)
    columns = x.at % x.width
    try:
        values = np.broadcast_to(np.asarray(array, np.float32), x.at.shape)
    except ValueError:
        raise FormatError(f"{operation.label} has constants of the shape {array.shape}") from None
    vector[columns] = values
    if x.is_tokens or not np.array_equal(vector[columns], values):
        raise FormatError(f"{operation.label} has constants that are not those of a column")
    return vector


def _shifted(operation: Operation, x: Stream, array: Any) -> Stream:
    shift = _by_column(operation, x, array, 0.0)
    last = x.layers[-1] if x.layers else None
    if isinstance(last, Dense):
        bias = last.bias + shift if last.bias.any() else shift
        return replace(x, layers=(*x.layers[:-1], replace(last, bias=bias)))
    return _diagonal(operation, x, np.ones(x.width, np.float32), shift)


def _scaled(operation: Operation, x: Stream, array: Any) -> Stream:
    scale = _by_column(operation, x, array, 1.0)
    last = x.layers[-1] if x.layers else None
    if isinstance(last, LSTMLayer) and last.merge == "sum" and (scale == 0.5).all():
        return replace(x, layers=(*x.layers[:-1], replace(last, merge="ave")))
    return _diagonal(operation, x, scale, np.zeros(x.width, np.float32))


def _diagonal(operation: Operation, x: Stream, scale: Any, shift: Any) -> Stream:
    if x.width > _MAX_SQUARE // 8:
        raise FormatError(f"{operation.label} scales {x.width} columns; behind a matrix it can be")
    layer = Dense(operation.name, np.diag(scale).astype(np.float32), shift)
    return replace(x, layers=(*x.layers, layer))


def _layer_norm(operation: Operation, inputs: list[Value]) -> Stream:
    x, weight, bias = [*inputs, None][:3]
    get = operation.attributes.get
    if not isinstance(x, Stream) or not isinstance(weight, np.ndarray) or isinstance(bias, Stream):
        raise FormatError(f"{operation.label} is imported with a constant scale and bias")
    if get("axis", -1) not in (-1, x.at.ndim - 1) or not x.has_all_columns():
        raise FormatError(f"{operation.label} is imported over the columns of each step")
    scale = np.asarray(weight, np.float32).reshape(-1)
    shift = np.zeros_like(scale) if bias is None else np.asarray(bias, np.float32).reshape(-1)
    layer = LayerNorm(operation.name, scale, shift, float(np.float32(get("epsilon", 1e-5))))
    return replace(x, layers=(*x.layers, layer))


def _function(operation: Operation, inputs: list[Value]) -> Stream:
    (x,), get = inputs[:1], operation.attributes.get
    assert isinstance(x, Stream)
    name = _FUNCTIONS[operation.kind]
    if operation.kind == "HardSigmoid":
        numbers = get("alpha", 0.2), get("beta", 0.5)
        is_new = np.allclose(numbers, (1 / 6, 0.5), atol=1e-6)
        name = "hard_sigmoid" if is_new else name
        is_known = is_new or np.allclose(numbers, (0.2, 0.5), atol=1e-6)
    else:
        is_known = get("alpha", 1.0) == 1 and get("approximate", b"none") == b"none"
    if not is_known or x.is_tokens:
        raise FormatError(f"{operation.label} has settings that are not imported")
    return replace(x, layers=(*x.layers, Function(operation.name, name)))


def _softmax(operation: Operation, inputs: list[Value]) -> Stream:
    (x,) = inputs[:1]
    assert isinstance(x, Stream)
    if operation.attributes["axis"] not in (-1, x.at.ndim - 1) or not x.has_all_columns():
        raise FormatError(f"{operation.label} is imported over the columns of each step")
    return replace(x, layers=(*x.layers, Function(operation.name, _FUNCTIONS[operation.kind])))


def _cast(operation: Operation, inputs: list[Value]) -> Stream:
    (x,) = inputs[:1]
    assert isinstance(x, Stream)
    to = operation.attributes.get("to")
    is_integer = to in INTEGERS
    is_back = x.is_truncated and not is_integer
    if to not in (*INTEGERS, *FLOATS) or (is_integer and x.layers) or is_back:
        raise FormatError(f"{operation.label} turns what it reads into another kind of values")
    is_truncated = x.is_truncated or (is_integer and not x.is_tokens)
    return replace(x, is_tokens=is_integer, is_truncated=is_truncated)


def _dropout(operation: Operation, inputs: list[Value]) -> Stream:
    x, _, training = [*inputs, None, None][:3]
    assert isinstance(x, Stream)
    if training is not None and (not isinstance(training, np.ndarray) or training.any()):
        raise FormatError(f"{operation.label} is in training mode; export the model after eval()")
    return x


OPERATORS: dict[str, Callable[[Operation, list[Value]], Value]] = {
    "Gather": _gather, "OneHot": _one_hot, "MatMul": _matmul, "Gemm": _gemm, "Add": _add,
    "Sub": _sub, "Mul": _mul, "Div": _div, "LayerNormalization": _layer_norm, "Cast": _cast,
    "Dropout": _dropout,
    **dict.fromkeys(_FUNCTIONS, _function), "Softmax": _softmax, "LogSoftmax": _softmax,
}  # fmt: skip
"""Operators on the output of layers; one more of these is a function and a line here."""
