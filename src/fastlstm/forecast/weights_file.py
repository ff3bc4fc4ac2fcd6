"""model.safetensors of a forecaster: float32, or compressed, with the calibration of its quantiles.

Of a compressed one the parameters are stored as `runs.weight_formats` says. The residuals of the
calibration and what is no number stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import torch
from torch import Tensor

from fastlstm.errors import CorruptFileError
from fastlstm.forecast.model.network import LINEAR, ForecastNetwork
from fastlstm.runs.stored_values import described_state, restored_network
from fastlstm.runs.tensors import decode_tensors, encode_tensors
from fastlstm.runs.weight_formats import (
    QuantizedMatrix,
    as_floats,
    block_grid,
    decode_weights,
    encode_weights,
    may_be_blocks,
    num_gates,
)

RESIDUALS = "calibration.residuals"
_NETWORK = "network."
_MIN_ZERO_BLOCKS = 0.05
"""From this share of zero blocks on, the others are stored with their places."""


@dataclass(frozen=True)
class Compression:
    """How a forecaster was compressed.

    Attributes:
        about: `compression` in config.json; see docs/compress.md.
        matrices: of its file, by name; the network holds what they stand for.
    """

    about: Mapping[str, Any]
    matrices: Mapping[str, QuantizedMatrix] = field(default_factory=dict)

    @property
    def weights(self) -> str:
        """Format of the stored weights, one of `FORMATS_IN_FILES`."""
        return str(self.about["weights"])

    @property
    def note(self) -> str | None:
        """A line about what computes with these weights; None if they are as any other."""
        how = [] if self.weights == "fp32" else [f"weights are stored as {self.weights}"]
        if self.about["structured"] in ("none", "blocks"):
            how.append(f"{100 * self.about['prune']:g} % of the weights are zero")
        if not how:
            return None
        return f"{', '.join(how)}; forecasts are computed in fp32 with all of them: no faster"


def weights_file(
    network: ForecastNetwork, residuals: Tensor, compression: Compression | None
) -> bytes:
    """Returns model.safetensors."""
    state = {_NETWORK + name: tensor for name, tensor in network.state_dict().items()}
    if compression is None:
        return encode_tensors({**state, RESIDUALS: residuals})
    weights: dict[str, Any] = {}
    for name, parameter in network.named_parameters():
        values, matrix = parameter.detach().cpu().numpy(), compression.matrices.get(name)
        is_same = matrix is not None and np.array_equal(matrix.dequantized(), values)
        weights[_NETWORK + name] = matrix if is_same else values
    sparse = compression.about["structured"] == "blocks" and compression.weights != "int4"
    blocks = {name for name, w in weights.items() if sparse and _is_shorter_as_blocks(name, w)}
    data = encode_weights(weights, compression.weights, blocks)
    others = {name: t.cpu().numpy() for name, t in state.items() if name not in weights}
    others[RESIDUALS] = residuals.numpy()
    return bytes(safetensors.numpy.save({**safetensors.numpy.load(data), **others}))


def _is_shorter_as_blocks(name: str, matrix: Any) -> bool:
    values = matrix.codes if isinstance(matrix, QuantizedMatrix) else matrix
    if not may_be_blocks(values):
        return False
    is_zero = (block_grid(values, num_gates(name, len(values))) == 0).all(axis=(2, 3))
    return bool(is_zero.mean() > _MIN_ZERO_BLOCKS)


def read_weights_file(
    data: bytes,
    build: Callable[[], ForecastNetwork],
    compression: Compression | None,
    origin: Path,
    described_by: Path,
    num_parts: int,
) -> tuple[ForecastNetwork, Tensor, Compression | None]:
    """Returns the network, the residuals of its calibration, and its compression with the matrices.

    `build` makes the network that `described_by`, config.json, describes, of `num_parts` parts with
    weights; `origin` is model.safetensors.

    Raises:
        CorruptFileError: the file is damaged, or of another network.
        FormatError: it is of another network.
        NonFiniteError: a weight is NaN or Inf.
    """
    if compression is None:
        tensors = decode_tensors(data, origin)
    else:
        tensors, compression = _decoded(data, build, compression, origin, described_by, num_parts)
    if RESIDUALS not in tensors:
        raise CorruptFileError(f"{origin}: '{RESIDUALS}' is missing")
    residuals = tensors.pop(RESIDUALS)
    weights = {name.removeprefix(_NETWORK): tensor for name, tensor in tensors.items()}
    network = restored_network(build, weights, origin, described_by, num_parts)
    return network, residuals, compression


def _decoded(
    data: bytes,
    build: Callable[[], ForecastNetwork],
    compression: Compression,
    origin: Path,
    described_by: Path,
    num_parts: int,
) -> tuple[dict[str, Tensor], Compression]:
    """Returns the tensors of a compressed file as an ordinary one would hold them."""
    stored = {name: tensor.numpy() for name, tensor in decode_tensors(data, origin).items()}
    described = described_state(build, len(stored), described_by, num_parts)
    shapes = {
        _NETWORK + name: tuple(tensor.shape)
        for name, tensor in described.items()
        if tensor.is_floating_point() and name not in LINEAR
    }
    exact = {_NETWORK + name for name in described} - shapes.keys() | {RESIDUALS}
    others = {name: torch.from_numpy(stored.pop(name)) for name in exact & stored.keys()}
    data = bytes(safetensors.numpy.save(stored))
    weights = decode_weights(data, shapes, compression.weights, origin)
    matrices = {
        name.removeprefix(_NETWORK): w
        for name, w in weights.items()
        if isinstance(w, QuantizedMatrix)
    }
    floats = {name: torch.from_numpy(w.copy()) for name, w in as_floats(weights).items()}
    return {**floats, **others}, Compression(compression.about, matrices)
