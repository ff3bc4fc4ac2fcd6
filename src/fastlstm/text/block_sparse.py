"""Weight matrices of which only the blocks are stored that are not all zero (csrc/cpu/block_sparse.h).

A block is 16 rows of torch's matrix (16 hidden units of one gate, 16 tokens) x 4 inner values. The
layout in memory is the same for every instruction set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROWS, INNER = 16, 4
_PANEL = 4
"""Strips of 16 rows that the kernels take at once."""


class BlockSparse(NamedTuple):
    """The blocks of a matrix, strip by strip of 16 rows, each in the order of the inner dimension.

    The gates of 16 hidden units are four strips in a row.
    """

    lines: NDArray[Any]  # (n, 64), every block as the kernels read it
    starts: NDArray[np.int32]  # (strips + 1,) first line of each strip, then the end
    indices: NDArray[np.uint16]  # (n,) inner index / 4
    share: float  # of the blocks that are all zero


def zero_share(w: NDArray[Any]) -> float:
    """Returns the share of zeros; that of zero blocks is no larger."""
    return 1.0 - np.count_nonzero(w) / w.size


def block_sparse(w: NDArray[Any], *, is_gates: bool) -> BlockSparse:
    """Returns the blocks of a matrix `(rows, columns)`.

    Args:
        w: int8 codes, float32, or uint16 bits of bf16.
        is_gates: rows are the gates of a layer, in torch's order.
    """
    gates = 4 if is_gates else 1
    rows, columns = w.shape[0] // gates, w.shape[1]
    strips = -(-rows // ROWS)
    if not is_gates:
        strips = -(-strips // _PANEL) * _PANEL
    num = -(-columns // INNER)
    padded = np.zeros((gates, strips * ROWS, num * INNER), w.dtype)
    padded[:, :rows, :columns] = w.reshape(gates, rows, columns)
    blocks = padded.reshape(gates, strips, ROWS, num, INNER).transpose(1, 0, 3, 2, 4)
    is_stored = (blocks != 0).any((3, 4)).reshape(strips * gates, num)
    lines = blocks.reshape(strips * gates, num, ROWS, INNER)[is_stored]
    pair = 4 // w.itemsize  # inner values that stand side by side
    lines = lines.reshape(-1, ROWS, INNER // pair, pair).swapaxes(1, 2).reshape(-1, ROWS * INNER)
    starts = np.zeros(len(is_stored) + 1, np.int32)
    np.cumsum(is_stored.sum(1), out=starts[1:])
    all_blocks = -(-w.shape[0] // ROWS) * num
    return BlockSparse(
        lines, starts, np.nonzero(is_stored)[1].astype(np.uint16), 1 - len(lines) / all_blocks
    )


def bf16_bits(w: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Returns float32 rounded to the nearest bf16, as bits; a NaN stays one."""
    bits = w.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(w), (bits >> 16) | 0x40, rounded).astype(np.uint16)
