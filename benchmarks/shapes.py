"""The shapes every kernel benchmark uses: E embedding, H hidden, L layers, B batch, T steps."""

from __future__ import annotations

from typing import NamedTuple

V = 100
"""Vocabulary of the token model."""


class Shape(NamedTuple):
    """One token model on one batch."""

    E: int
    H: int
    L: int
    B: int
    T: int

    def __str__(self) -> str:
        return f"E={self.E} H={self.H} L={self.L} B={self.B} T={self.T}"

    @property
    def step_flop(self) -> float:
        """Floating-point operations that a training step of the token model needs.

        The product of embeddings and input weights counts once per token of the vocabulary, not
        per token of the batch: the rest of it is repetition.
        """
        rows = self.T * self.B
        layers = self.L * 8 * rows * self.H**2 + (self.L - 1) * 8 * rows * self.H**2
        return 3.0 * (layers + 8 * V * self.E * self.H + 2 * rows * self.H * V)


TOKEN_MODELS = (
    Shape(256, 256, 1, 128, 100),
    Shape(256, 512, 1, 128, 100),
    Shape(256, 512, 2, 64, 100),
    Shape(256, 1024, 1, 64, 100),
    Shape(64, 128, 1, 128, 100),
)
