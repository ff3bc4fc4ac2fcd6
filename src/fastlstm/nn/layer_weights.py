"""The weights of a layer as a call takes them, and whether input and state fit them."""

from __future__ import annotations

from operator import is_not
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastlstm.errors import ShapeError
from fastlstm.ops.call import LSTMWeights, is_autocast

if TYPE_CHECKING:
    from fastlstm.nn.lstm import LSTM, State


def layer_weights(layer: LSTM, flat: list[Any]) -> list[LSTMWeights]:
    """Returns the weights of `flat_weights` by layer and direction."""
    size = len(layer._all_weights[0])  # with that of a projection, which no kernel takes
    num = 4 if layer.bias else 2
    rows = [flat[k * size : k * size + num] for k in range(len(layer._all_weights))]
    return [LSTMWeights(*row, *[None] * (4 - num)) for row in rows]


def flat_weights(layer: LSTM) -> list[Any]:
    """Returns the weights in one list, as `nn.LSTM` keeps it; `weight_hook` has seen them."""
    flat, hook = _flat(layer), layer.weight_hook
    return flat if hook is None else list(map(hook, layer._flat_weights_names, flat))


def _flat(layer: LSTM) -> list[Any]:
    """The weights in one list; as in torch, entries written to `_flat_weights` are used.

    They are used until a parameter is replaced: then all parameters are.
    """
    own: dict[str, Any] = layer._parameters
    names = layer._flat_weights_names
    if torch.compiler.is_compiling() or any(name not in own for name in names):
        return [own[n] if n in own else getattr(layer, n) for n in names]
    seen = [None if ref is None else ref() for ref in layer._flat_weight_refs]
    if len(seen) != len(names) or any(map(is_not, seen, map(own.get, names))):
        layer._init_flat_weights()
    return layer._flat_weights


def fits(
    layer: LSTM,
    x: Tensor,
    hx: State | None,
    weights: list[LSTMWeights],
    batch_sizes: Tensor | None = None,
) -> bool:
    """Whether input, state and weights fit the layer, and none is empty.

    Raises:
        ShapeError: a weight of another shape.
    """
    weight = weights[0].w_ih
    device = weight.device
    is_cast = is_autocast(device.type)
    if (
        x.dim() not in ((2, 3) if batch_sizes is None else (2,))
        or x.shape[-1] != layer.input_size
        or 0 in x.shape
        or x.device != device
        or (x.dtype != weight.dtype and not (is_cast and x.dtype.is_floating_point))
    ):
        return False
    H, P = layer.hidden_size, layer.proj_size or layer.hidden_size
    I, directions = layer.input_size, 2 if layer.bidirectional else 1  # noqa: E741
    for index, layer_weight in enumerate(weights):
        expected = ((4 * H, I if index < directions else directions * P), (4 * H, P))
        shapes = (*expected, (4 * H,), (4 * H,))
        for k, (w, shape) in enumerate(zip(layer_weight, shapes, strict=True)):
            if w is None:
                continue
            if w.shape != shape:  # oneDNN would read beyond it
                name = layer._all_weights[index][k]
                raise ShapeError(f"{name} has shape {tuple(w.shape)}, expected {shape}")
            if w.device != device or (k < 2 and w.dtype != weight.dtype and not is_cast):
                return False
    if hx is None:
        return True
    if not isinstance(hx, tuple | list) or [isinstance(t, Tensor) for t in hx] != [True, True]:
        return False
    batch: tuple[int, ...] = ()
    if batch_sizes is not None:
        batch = (int(batch_sizes[0]),)
    elif x.dim() == 3:
        batch = (x.shape[0 if layer.batch_first else 1],)
    return all(
        t.shape == (len(weights), *batch, size)
        and t.device == device
        and t.dtype.is_floating_point
        and (t.dtype == x.dtype or is_cast)
        for t, size in zip(hx, (P, H), strict=True)
    )
