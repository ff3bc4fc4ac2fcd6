"""Features of numeric and categorical columns."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_MAX_EMBEDDING = 16


class CategoryEmbedding(nn.Embedding):
    """An embedding per category, and one for unknown values.

    Categories not seen in training, including unknown, use the mean of those seen.

    Args:
        size: categories; unknown values have the number `size`.
        width: of an embedding.

    Attributes:
        is_trained: categories seen in training, shape ``(size + 1,)``, bool.
    """

    is_trained: Tensor

    def __init__(self, size: int, width: int) -> None:
        super().__init__(size + 1, width)
        self.register_buffer("is_trained", torch.zeros(size + 1, dtype=torch.bool))

    def forward(self, codes: Tensor) -> Tensor:
        """Returns embeddings ``(…, width)`` of numbers ``(…)``."""
        if self.training:
            self.is_trained[codes] = True
            return super().forward(codes)
        is_trained = self.is_trained[:, None]
        known = torch.where(is_trained, self.weight, 0.0)
        mean = known.sum(0) / is_trained.sum().clamp(min=1)
        return nn.functional.embedding(codes, torch.where(is_trained, self.weight, mean))


class CategoricalFeatures(nn.Module):
    """Passes numbers through and embeds categories.

    Args:
        num_columns: of the input.
        categories: (position, size) of categorical columns; NaN and other numbers are unknown.

    Attributes:
        categories: as given.
        places: positions of the other columns, which hold numbers.
        num_numbers: how many these are.
        width: of the output.
    """

    def __init__(self, num_columns: int, categories: tuple[tuple[int, int], ...]) -> None:
        super().__init__()
        self.categories = categories
        self.places = sorted(set(range(num_columns)).difference(place for place, _ in categories))
        widths = [min(_MAX_EMBEDDING, (size + 3) // 2) for _, size in categories]
        self.embeddings = nn.ModuleList(
            CategoryEmbedding(size, width)
            for (_, size), width in zip(categories, widths, strict=True)
        )
        self.num_numbers = len(self.places)
        self.width = self.num_numbers + sum(widths)

    def numbers(self, values: Tensor) -> Tensor:
        """Returns the numbers ``(…, num_numbers)`` of values ``(…, num_columns)``; missing ones are
        0."""
        return values[..., self.places].nan_to_num(0.0)

    def forward(self, values: Tensor) -> Tensor:
        """Returns features ``(…, width)`` of values ``(…, num_columns)``; missing numbers are 0."""
        parts = [self.numbers(values)]
        for (place, size), embedding in zip(self.categories, self.embeddings, strict=True):
            codes = values[..., place].nan_to_num(float(size)).clamp(max=size)
            parts.append(embedding(torch.where(codes < 0, float(size), codes).long()))
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]
