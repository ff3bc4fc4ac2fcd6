"""Replaces an output matrix by the product of two smaller ones (singular value decomposition)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fastlstm.compression.pruning import OUTPUT_SHARE
from fastlstm.errors import ConfigError
from fastlstm.runs.weight_formats import as_floats
from fastlstm.text.config import ModelConfig

OUTPUT, PROJECTION = "output.weight", "projection.weight"


def check_output_rank(config: ModelConfig, rank: int) -> None:
    """Raises ConfigError for tied weights, and for a rank that is not smaller."""
    if config.tie_weights:
        raise ConfigError(
            "the output matrix of the model is its embedding (tied weights), which keeps its rank;"
            " leave out `output_rank`"
        )
    largest = config.output_rank or min(config.vocab_size, config.rnn_size)
    if rank >= largest:
        raise ConfigError(
            f"`output_rank` is {rank}, expected less than {largest}, the rank of the model's output"
        )


def output_to_shrink(weights: Mapping[str, Any], config: ModelConfig) -> int | None:
    """Returns the columns of the output matrix, if a lower rank would shrink the model by much.

    Returns None if the matrix is tied, has a lower rank, is at most a tenth of the weights, or has
    fewer than two rows a column.
    """
    if config.tie_weights or config.output_rank:
        return None
    rows, columns = weights[OUTPUT].shape
    total = sum(math.prod(weight.shape) for weight in weights.values())
    is_large = rows >= 2 * columns and rows * columns > OUTPUT_SHARE * total
    return int(columns) if is_large else None


def with_output_rank(
    weights: Mapping[str, Any], config: ModelConfig, rank: int
) -> tuple[dict[str, Any], ModelConfig]:
    """Returns weights with the nearest output matrix of a rank, and the sizes of that model.

    The largest values of the singular value decomposition ``U S V^T``, in float64, stay: the output
    matrix is ``U sqrt(S)``, the projection before it ``sqrt(S) V^T``. An output that has a
    projection already is multiplied out first.
    """
    check_output_rank(config, rank)
    names = (OUTPUT, PROJECTION) if config.output_rank else (OUTPUT,)
    floats = as_floats({name: weights[name] for name in names})
    whole = np.asarray(floats[OUTPUT], np.float64)
    if config.output_rank:
        whole = whole @ np.asarray(floats[PROJECTION], np.float64)
    u, s, vt = np.linalg.svd(whole, full_matrices=False)
    root = np.sqrt(s[:rank])
    factors = {OUTPUT: u[:, :rank] * root, PROJECTION: root[:, None] * vt[:rank]}
    small = {name: np.ascontiguousarray(w, np.float32) for name, w in factors.items()}
    return {**weights, **small}, dataclasses.replace(config, output_rank=rank)
