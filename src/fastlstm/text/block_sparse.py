"""Weight matrices laid out without their zero blocks (csrc/cpu/block_sparse.h).

A block is 16 hidden units of one gate, or 16 tokens, x 4 inner values. The layout is the same for
every instruction set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastlstm.runs.weight_formats import QuantizedMatrix, block_grid, may_be_blocks

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PANEL = 4
"""Rows of blocks that the kernels take at once."""


class BlockSparse(NamedTuple):
    """The blocks of a matrix, row by row of blocks; the gates of 16 units follow each other."""

    lines: NDArray[Any]  # (n, 64) of float32, bf16 bits or int8: each block as the kernels read it
    starts: NDArray[np.int32]  # (rows of blocks + 1,) first line of each, then the end
    indices: NDArray[np.uint16]  # (n,) inner index / 4
    num_blocks: int  # of the matrix, zeros included


def block_sparse(
    w: NDArray[Any] | QuantizedMatrix, weight_format: str, min_share: float, *, is_gates: bool
) -> BlockSparse | None:
    """Returns the blocks of a matrix `(rows, columns)`; None if less than `min_share` are zero."""
    values: NDArray[Any] = w.codes if isinstance(w, QuantizedMatrix) else np.asarray(w, np.float32)
    if not may_be_blocks(values) or np.count_nonzero(values) > (1 - min_share) * values.size:
        return None
    if weight_format == "bf16":
        values = _bf16_bits(values)
    grid = block_grid(values, 4 if is_gates else 1)
    num_rows, across = grid.shape[:2]
    if is_gates:
        grid = grid.reshape(4, -1, *grid.shape[1:]).swapaxes(0, 1).reshape(grid.shape)
    is_stored = (grid != 0).any(axis=(2, 3))
    if is_stored.mean() > 1 - min_share:
        return None
    pair = 4 // grid.itemsize  # inner values that stand side by side
    lines = grid[is_stored].reshape(-1, 16, 4 // pair, pair).swapaxes(1, 2).reshape(-1, 64)
    starts = np.zeros(-(-num_rows // _PANEL) * _PANEL + 1, np.int32)
    starts[1 : num_rows + 1] = is_stored.sum(axis=1).cumsum()
    starts[num_rows + 1 :] = starts[num_rows]
    indices = np.nonzero(is_stored)[1].astype(np.uint16)
    return BlockSparse(lines, starts, indices, num_rows * across)


def _bf16_bits(w: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Returns the bits of the nearest bf16; a NaN stays one, -0 becomes 0."""
    bits = np.ascontiguousarray(w).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded[rounded == 0x8000] = 0
    return np.where(np.isnan(w), (bits >> 16) | 0x40, rounded).astype(np.uint16)
