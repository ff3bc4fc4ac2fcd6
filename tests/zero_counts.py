"""Zero weights, or blocks of zeros, of pruned matrices."""

from fastlstm.runs.weight_formats import block_grid, num_gates


def zero_counts(matrices, structured="none"):
    """Returns the number of zero weights, or blocks, of each matrix, and of all."""
    counts = {}
    for name, matrix in matrices.items():
        is_zero = matrix.detach().cpu().numpy() == 0
        if structured == "blocks":
            is_zero = ~block_grid(~is_zero, num_gates(name, len(matrix))).any(axis=(2, 3))
        counts[name] = int(is_zero.sum()), is_zero.size
    return counts
