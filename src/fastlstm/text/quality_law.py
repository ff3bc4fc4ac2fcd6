"""How good a language model gets: bits per character by size, characters read and steps.

The law was fitted to 148 complete runs of three texts (`benchmarks/sizes.py`, fit in
`benchmarks/fit_sizes.py`, errors in docs/log.md), all but E, which runs of these lengths do not
tell::

    L = E + A (n^l H / 256)^-a + C (D' / 10^6)^-c (H / 256)^e + G (S' / 500 + s)^-g

with n layers of H hidden units, S' steps worth a step of Muon, and D' characters worth as much as
fresh ones (repeated ones count for less and less: Muennighoff et al., "Scaling Data-Constrained
Language Models", 2023). E differs from text to text by a factor common to all terms, so the law
compares models on one text; it does not say what a text's figure will be.
"""

from __future__ import annotations

import math
from typing import Final

_FLOOR, _SIZE, _SIZE_POWER = 0.6, 0.5839, 0.4072
_DATA, _DATA_POWER, _DATA_SIZE_POWER = 0.7042, 0.2033, 0.1084
_STEPS, _STEPS_POWER, _FIRST_STEPS = 0.1066, 1.3753, 0.1684
_REPEATS = 1.2174
"""Epochs after the first one that count before further ones add little."""
_LAYERS_POWER = 0.6419
MOST_LAYERS = 3
"""Of the runs."""
OPTIMIZERS: Final = {"muon": (1.0, 1.0), "adamw": (1.0456, 2.2261)}
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

    Args:
        rnn_size: hidden units of a layer, H.
        num_layers: n.
        tokens: characters that are trained on, with repetitions.
        steps: of the optimizer.
        optimizer: one of `OPTIMIZERS`.
        train_tokens: characters of the training split.
    """
    size, fresh = rnn_size / 256, min(tokens, train_tokens)
    again = tokens / train_tokens - 1.0
    if again > 0.0:
        fresh += train_tokens * _REPEATS * -math.expm1(-again / _REPEATS)
    factor, step_worth = OPTIMIZERS[optimizer]
    bits: float = factor * (
        _FLOOR
        + _SIZE * (num_layers**_LAYERS_POWER * size) ** -_SIZE_POWER
        + _DATA * (fresh / 1e6) ** -_DATA_POWER * size**_DATA_SIZE_POWER
        + _STEPS * (steps * step_worth / 500 + _FIRST_STEPS) ** -_STEPS_POWER
    )
    return bits
