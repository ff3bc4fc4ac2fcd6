"""LSTM layers of one width each: runs have layers of one size, imported models may differ."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastlstm.errors import FormatError
from fastlstm.sequence.layer_stack import CellWeights, LSTMLayer, Weights

_MAX_GROWTH, _SPARE_BYTES = 16, 64 << 20


@dataclass(frozen=True)
class EqualLayers:
    """Layers of H hidden units each way, which compute what those of other widths did.

    Units that a narrower layer lacks have weights of zero: their state is never read. Outputs of
    both ways that were added are side by side, and what reads them has its columns twice.

    Attributes:
        hidden_size: H.
        cells: of each layer, of one way or of both.
        head: what reads the last layer, `(K, H)` or `(K, 2H)`.
        is_padded: some layer was narrower.
    """

    hidden_size: int
    cells: list[tuple[CellWeights, ...]]
    head: Weights
    is_padded: bool


def equal_layers(layers: list[LSTMLayer], head: Weights) -> EqualLayers:
    """Returns the layers with one width.

    Args:
        layers: in order, all one way or all both ways.
        head: weights on the output of the last one, `(K, F)`.

    Raises:
        FormatError: outputs of both ways are multiplied, or there would be many times more weights.
    """
    H = max(layer.hidden_size for layer in layers)
    ways = 1 if layers[0].backward is None else 2
    own = sum(4 * c.weight_ih.size + 4 * c.weight_hh.size for la in layers for c in _ways(la))
    grown = sum(16 * H * ways * (max(layer.input_size, ways * H) + H) for layer in layers)
    if grown > _MAX_GROWTH * own + _SPARE_BYTES:
        raise FormatError(
            f"its LSTM layers have from {min(la.hidden_size for la in layers)} to {H} units; a run"
            " has layers of one width, and filling them with zeros would take"
            f" {grown / max(own, 1):.0f} times the weights"
        )
    cells: list[tuple[CellWeights, ...]] = []
    for k, layer in enumerate(layers):
        found = []
        for cell in _ways(layer):
            weight = cell.weight_ih if k == 0 else _spread(cell.weight_ih, layers[k - 1], H)
            hidden = _spread(cell.weight_hh, None, H)
            bias = _taller(cell.bias[:, None], H)[:, 0]
            found.append(CellWeights(_taller(weight, H), _taller(hidden, H), bias))
        cells.append(tuple(found))
    is_padded = any(layer.hidden_size < H for layer in layers)
    return EqualLayers(H, cells, _spread(head, layers[-1], H), is_padded)


def _ways(layer: LSTMLayer) -> list[CellWeights]:
    return [layer.forward] if layer.backward is None else [layer.forward, layer.backward]


def _taller(weight: Weights, H: int) -> Weights:
    """Returns `(4H, C)` of `(4h, C)`: every gate has rows of zeros below."""
    gates = weight.reshape(4, -1, weight.shape[1])
    out = np.zeros((4, H, weight.shape[1]), np.float32)
    out[:, : gates.shape[1]] = gates
    return out.reshape(4 * H, -1)


def _spread(weight: Weights, read: LSTMLayer | None, H: int) -> Weights:
    """Returns weights on the outputs of a layer of H units; `read` is as it was, None one way."""
    ways = 1 if read is None or read.backward is None else 2
    if read is not None and ways == 2 and read.merge != "concat":
        if read.merge == "mul":
            raise FormatError(f"the layer '{read.name}' multiplies its two outputs")
        weight = np.concatenate([weight, weight], 1)
        weight = weight / np.float32(2) if read.merge == "ave" else weight
    h = weight.shape[1] // ways
    out = np.zeros((len(weight), ways, H), np.float32)
    out[:, :, :h] = weight.reshape(len(weight), ways, h)
    return out.reshape(len(weight), ways * H)
