"""What a longer run of a language model ends at, from a short one: a law and one measurement.

`quality_law` says how bits per character fall with size, characters and steps; a complete short run
on the text says by which factor this text differs. The interval comes from the law's own data:
benchmarks/log has the errors at 4 and 10 times the characters measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastlstm.text.quality_law import OPTIMIZERS, relative_bits

_SD_NEAR = 0.012
"""Standard deviation of the logarithm of a prediction at the length that was measured."""
_SD_PER_DECADE = 0.022
"""What is added to it, in quadrature, for ten times the characters."""
_Z90 = 1.645
FEWEST_STEPS = 120
"""Of the run that is measured; from fewer the law errs by 4 % (benchmarks/log)."""
_LONGEST = 1e4
"""Times the characters measured: `seconds_to` looks no further."""


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
    """Predicts longer runs of one model on one text.

    Attributes:
        optimizer: one that `OPTIMIZERS` lacks counts as AdamW.
        measured_bits: validation bits per character that the complete run `measured` ended at.
        tokens_per_s: of that run, with its evaluations and checkpoints.
        setup_s: before its first step.
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
        """Returns how much a run of so many seconds trains on, at the speed measured."""
        tokens = self.tokens_per_s * max(seconds - self.setup_s, 0.0)
        return self.measured.times(tokens / self.measured.tokens)

    def seconds_for(self, length: Length) -> float:
        """Returns how many seconds a run takes, at the speed measured."""
        return self.setup_s + length.tokens / self.tokens_per_s

    def after(self, length: Length) -> PredictedBits:
        """Returns what a run of some length ends at."""
        bits = self.measured_bits * self._law(length) / self._law(self.measured)
        width = interval_factor(length.tokens / self.measured.tokens)
        return PredictedBits(bits, bits / width, bits * width)

    def seconds_to(self, bits: float) -> float | None:
        """Returns how long the run must be to end at so many bits, or None: no length is enough."""
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
