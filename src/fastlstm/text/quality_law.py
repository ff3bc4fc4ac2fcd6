"""How good a language model gets: bits per character by size, characters read and steps.

The law was fitted to 185 complete runs on four texts (`benchmarks/sizes.py`, fit in
`benchmarks/fit_sizes.py`, errors in benchmarks/log), except for E, which runs of these lengths do
not determine::

    L = E + A (w H / 256)^-a + C (D' / 10^6)^-c (H / 256)^e + G (S' / 500 + s)^-g

H is the number of hidden units per layer, each worth w units of a model with one layer. S' is the
number of steps, counted in steps of Muon. D' is the number of characters, counted in fresh ones:
repeated characters count for less and less, and for less still in a model with many weights per
character::

    D' = N (1 + R log(1 + (epochs - 1) / R))    R = r (L (H / 256)^2 / (N / 10^6))^-q

Here N is the size of the text and L the number of layers. (Muennighoff et al., "Scaling
Data-Constrained Language Models", 2023, have 1 - exp in place of the logarithm, and a constant R;
it ranked runs of many epochs wrongly.) Epochs beyond 128 do not count: none was measured. Texts
differ by a factor common to all terms, so the law compares models on one text. One complete short
run on a text gives the factor of that text; `QualityPrediction` then says what longer runs end at.
The interval of a prediction comes from the fitted runs (errors at 4 and 10 times the characters
measured: benchmarks/log).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

_FLOOR, _SIZE, _SIZE_POWER = 0.6, 0.6679, 0.4029
_DATA, _DATA_POWER, _DATA_SIZE_POWER = 0.6525, 0.234, 0.1461
_STEPS, _STEPS_POWER, _FIRST_STEPS = 0.1202, 2.4452, 0.4215
_REPEATS, _REPEATS_POWER, _MOST_EPOCHS = 0.4972, 0.7387, 128.0
_LAYERS = (1.0, 1.5376, 1.7846)
"""How many units of a one-layer model a unit is worth in models of one, two and three layers."""
MOST_LAYERS = len(_LAYERS)
OPTIMIZERS: Final = {"muon": (1.0, 1.0), "adamw": (1.0387, 2.1497)}
"""By optimizer, at its default rate: factor on the bits per character, and how many steps of Muon
one step is worth. AdamW needs fewer steps and ends higher (16 of the runs). Other optimizers were
not measured."""

_SD_NEAR = 0.012
"""Standard deviation of the logarithm of a prediction at the length that was measured."""
_SD_PER_DECADE = 0.022
"""Standard deviation that is added in quadrature for ten times the characters."""
_Z90 = 1.645
FEWEST_STEPS = 120
"""Least steps of the measured run; with fewer, the law errs by 4 % (benchmarks/log)."""
_LONGEST = 1e4
"""Longest run that `seconds_to` looks at, in multiples of the measured characters."""


def relative_bits(
    rnn_size: int, num_layers: int, tokens: float, steps: float, optimizer: str, train_tokens: int
) -> float:
    """Returns what a run ends at, in units that are the same for every model on one text.

    `tokens` counts repetitions too; `train_tokens` is the size of the training split.
    """
    size, fresh = rnn_size / 256, min(tokens, train_tokens)
    again = min(tokens / train_tokens, _MOST_EPOCHS) - 1.0
    if again > 0.0:
        density = num_layers * size**2 / (train_tokens / 1e6)
        repeats = _REPEATS * density**-_REPEATS_POWER
        fresh += train_tokens * repeats * math.log1p(again / repeats)
    factor, step_worth = OPTIMIZERS[optimizer]
    bits: float = factor * (
        _FLOOR
        + _SIZE * (_LAYERS[min(num_layers, MOST_LAYERS) - 1] * size) ** -_SIZE_POWER
        + _DATA * (fresh / 1e6) ** -_DATA_POWER * size**_DATA_SIZE_POWER
        + _STEPS * (steps * step_worth / 500 + _FIRST_STEPS) ** -_STEPS_POWER
    )
    return bits


def interval_factor(times: float) -> float:
    """Returns the factor to either limit of the 90 % interval, for a run `times` as long."""
    decades = math.log10(max(times, 1.0))
    return math.exp(_Z90 * math.hypot(_SD_NEAR, _SD_PER_DECADE * decades))


@dataclass(frozen=True)
class Length:
    """How long a run is: characters trained on, with repetitions, and steps of the optimizer."""

    tokens: float
    steps: float

    def times(self, factor: float) -> Length:
        return Length(self.tokens * factor, self.steps * factor)


@dataclass(frozen=True)
class PredictedBits:
    """Bits per character that a run is expected to end at, with the limits of 90 % of such runs."""

    bits: float
    low: float
    high: float


@dataclass(frozen=True)
class QualityPrediction:
    """Predicts longer runs of one model on one text from a complete run, `measured`.

    That run ended at `measured_bits` validation bits per character. Its speed includes evaluations
    and checkpoints, not the set-up. An optimizer that `OPTIMIZERS` lacks counts as AdamW.
    """

    rnn_size: int
    num_layers: int
    optimizer: str
    train_tokens: int
    measured: Length
    measured_bits: float
    tokens_per_s: float
    setup_s: float

    def length_in(self, seconds: float) -> Length:
        """Returns the length of a run of so many seconds, at the measured speed."""
        tokens = self.tokens_per_s * max(seconds - self.setup_s, 0.0)
        return self.measured.times(tokens / self.measured.tokens)

    def seconds_for(self, length: Length) -> float:
        """Returns how many seconds a run takes, at the speed measured."""
        return self.setup_s + length.tokens / self.tokens_per_s

    def after(self, length: Length) -> PredictedBits:
        """Returns the bits per character that a run of this length ends at."""
        bits = self.measured_bits * self._law(length) / self._law(self.measured)
        width = interval_factor(length.tokens / self.measured.tokens)
        return PredictedBits(bits, bits / width, bits * width)

    def seconds_to(self, bits: float) -> float | None:
        """Returns how long a run must be to end at so many bits, or None if no length is enough."""
        low, high = 1e-3, _LONGEST
        if self.after(self.measured.times(high)).bits > bits:
            return None
        for _ in range(60):
            middle = math.sqrt(low * high)
            is_enough = self.after(self.measured.times(middle)).bits <= bits
            low, high = (low, middle) if is_enough else (middle, high)
        return self.seconds_for(self.measured.times(high))

    def _law(self, length: Length) -> float:
        name = self.optimizer if self.optimizer in OPTIMIZERS else "adamw"
        return relative_bits(
            self.rnn_size, self.num_layers, length.tokens, length.steps, name, self.train_tokens
        )
