"""What a running training of a language model will end at, and what another hour would give.

Most of what a run gains late comes with the falling learning rate. With the default schedule the
logarithm of the validation loss exceeds its value at the end by ``0.21 (1 - p)^1.5``, p being
the share of the run that is done (runs of 45 s to 20 min on three texts, benchmarks/log).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fastlstm.text.quality_prediction import Length, QualityPrediction
from fastlstm.training.callbacks import Callback

if TYPE_CHECKING:
    from fastlstm.runs.events import Event
    from fastlstm.text.config import ModelConfig
    from fastlstm.training.trainer import Trainer

_DROP, _DROP_SD, _POWER = 0.21, 0.06, 1.5
_NOISE = 0.01
"""Standard deviation of the logarithm of the end, in addition to the drop's."""
_FIRST, _LAST = 0.12, 0.97
"""Shares of a run between which something is said."""
_SCHEDULE = 0.7
"""Cooldown of the runs that were measured."""
_Z90 = 1.645
_HOUR_S = 3600.0


def expected_end(share: float, loss: float) -> tuple[float, float]:
    """Returns the loss at the end and half the width of its 90 % interval.

    Earlier evaluations than the newest, `loss`, say more about the start than about the end.
    """
    left = (1.0 - share) ** _POWER
    end = loss * math.exp(-_DROP * left)
    return end, end * math.expm1(_Z90 * math.hypot(_NOISE, _DROP_SD * left))


class Outlook(Callback):
    """Emits after an evaluation an `outlook`: the end expected, and the one an hour later."""

    def __init__(self, model: ModelConfig, train_tokens: int) -> None:
        self._size = model.rnn_size, model.num_layers
        self._train_tokens = train_tokens

    def on_event(self, trainer: Trainer, event: Event) -> None:
        if event["event"] != "eval" or event.get("split") != "valid":
            return
        share = trainer.done()
        if not _FIRST <= share <= _LAST:
            return
        bits, error = expected_end(share, event["bits_per_char"])
        trainer.emit({
            "event": "outlook", "step": trainer.progress.step, "bits_per_char": bits,
            "error": error, "hour_more_bits_per_char": self._hour_more(trainer, share, bits),
        })  # fmt: skip

    def _hour_more(self, trainer: Trainer, share: float, bits: float) -> float:
        """Returns what a run that is an hour longer would end at."""
        progress, options = trainer.progress, trainer.plan.options
        end = Length(progress.tokens / share, progress.step / share)
        law = QualityPrediction(
            *self._size, options.optimizer, self._train_tokens, end, bits,
            progress.tokens / progress.train_s, 0.0,
        )  # fmt: skip
        return law.after(law.length_in(law.seconds_for(end) + _HOUR_S)).bits


def has_outlook(cooldown: float, patience: int, vocab: str) -> bool:
    """Returns whether the curve was measured for such runs."""
    return cooldown == _SCHEDULE and patience == 0 and vocab != "bpe"
