"""A text to compress models of."""

import random

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "that", "rat", "eat", "oats", "at")


def text_of(num_words, seed=0):
    """Random words in a line."""
    return " ".join(random.Random(seed).choices(WORDS, k=num_words)) + "\n"


class StopAfter:
    """A stop flag that is set after so many steps; `observe` counts them."""

    def __init__(self, steps):
        self.left, self.name = steps, "test"

    def __call__(self):
        return self.left <= 0

    def observe(self, event):
        self.left -= event["event"] == "step"
