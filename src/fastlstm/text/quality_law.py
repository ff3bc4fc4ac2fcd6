"""How good a language model gets: bits per character by size, characters read and steps.

The law was fitted to 148 complete runs of three texts (`benchmarks/sizes.py`, fit in
`benchmarks/fit_sizes.py`, errors in benchmarks/log), all but E, which runs of these lengths do not
tell::

    L = E + A (w H / 256)^-a + C (D' / 10^6)^-c (H / 256)^e + G (S' / 500 + s)^-g

with H hidden units a layer, each worth w units of a model with one layer, S' steps worth a step of
Muon, and D' characters worth as much as fresh ones (repeated ones count for less and less:
Muennighoff et al., "Scaling Data-Constrained Language Models", 2023). E differs from text to text
by a factor common to all terms, so the law compares models on one text; it does not say what a
text's figure will be.
"""

from __future__ import annotations

import math
from typing import Final

_FLOOR, _SIZE, _SIZE_POWER = 0.6, 0.5813, 0.4081
_DATA, _DATA_POWER, _DATA_SIZE_POWER = 0.7065, 0.2029, 0.1075
_STEPS, _STEPS_POWER, _FIRST_STEPS = 0.1069, 1.3626, 0.1656
_REPEATS = 1.2097
"""Epochs after the first one that count before further ones add little."""
_LAYERS = (1.0, 1.6086, 1.9009)
"""How many units of a model with one layer a unit is worth, with one, two and three layers."""
MOST_LAYERS = len(_LAYERS)
OPTIMIZERS: Final = {"muon": (1.0, 1.0), "adamw": (1.0457, 2.234)}
"""Of each optimizer at its default rate: factor of the bits per character, and steps of Muon that a
step of it is worth. AdamW needs fewer steps and ends higher (16 of the runs). Of those not listed
nothing is known."""


def relative_bits(
    rnn_size: int,
    num_layers: int,
    tokens: float,
    steps: float,
    optimizer: str,
    train_tokens: int,
) -> float:
    """Returns what a run ends at, in units that are the same for every model on one text.

    `tokens` counts repetitions, `train_tokens` is the training split.
    """
    size, fresh = rnn_size / 256, min(tokens, train_tokens)
    again = tokens / train_tokens - 1.0
    if again > 0.0:
        fresh += train_tokens * _REPEATS * -math.expm1(-again / _REPEATS)
    factor, step_worth = OPTIMIZERS[optimizer]
    bits: float = factor * (
        _FLOOR
        + _SIZE * (_LAYERS[min(num_layers, MOST_LAYERS) - 1] * size) ** -_SIZE_POWER
        + _DATA * (fresh / 1e6) ** -_DATA_POWER * size**_DATA_SIZE_POWER
        + _STEPS * (steps * step_worth / 500 + _FIRST_STEPS) ** -_STEPS_POWER
    )
    return bits
