"""Columns of numbers and of names as features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_MAX_EMBEDDING = 16


class CategoricalFeatures(nn.Module):
    """Numbers as they are, categories by an embedding each.

    Args:
        num_columns: of the input.
        categories: (place, size) of the categorical ones; an unknown category is NaN.

    Attributes:
        width: of the output.
    """

    def __init__(self, num_columns: int, categories: tuple[tuple[int, int], ...]) -> None:
        super().__init__()
        self._places = [place for place, _ in categories]
        self._numbers = [place for place in range(num_columns) if place not in self._places]
        widths = [min(_MAX_EMBEDDING, (size + 3) // 2) for _, size in categories]
        self.embeddings = nn.ModuleList(
            nn.Embedding(size + 1, width)
            for (_, size), width in zip(categories, widths, strict=True)
        )
        self._unknown = [float(size) for _, size in categories]
        self.width = len(self._numbers) + sum(widths)

    def forward(self, values: Tensor) -> Tensor:
        """Returns features ``(…, width)`` of values ``(…, num_columns)``; missing numbers are 0."""
        parts = [values[..., self._numbers].nan_to_num(0.0)]
        for place, unknown, embedding in zip(
            self._places, self._unknown, self.embeddings, strict=True
        ):
            parts.append(embedding(values[..., place].nan_to_num(unknown).long()))
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]
