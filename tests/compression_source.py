"""A text to compress models of."""

from __future__ import annotations

import random

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "that", "rat", "eat", "oats", "at")


def text_of(num_words: int, seed: int = 0) -> str:
    """Random words in a line."""
    return " ".join(random.Random(seed).choices(WORDS, k=num_words)) + "\n"
