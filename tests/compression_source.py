"""A text to compress models of."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "that", "rat", "eat", "oats", "at")


def text_of(num_words: int, seed: int = 0) -> str:
    """Random words in a line."""
    return " ".join(random.Random(seed).choices(WORDS, k=num_words)) + "\n"


class StopAfter:
    """A stop flag that is set after so many steps; `observe` counts them."""

    def __init__(self, steps: int) -> None:
        self.left, self.name = steps, "test"

    def __call__(self) -> bool:
        return self.left <= 0

    def observe(self, event: dict[str, Any]) -> None:
        self.left -= event["event"] == "step"
