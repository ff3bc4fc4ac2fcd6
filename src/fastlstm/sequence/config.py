"""Options of a sequence model and its training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastlstm.system.fields import Precision, check_fields
from fastlstm.training.options import BOUNDS, CHOICES, TrainingOptions

DEFAULT_EPOCHS = 100.0
LEARNING_RATES = {"adamw": 3e-3, "adam": 3e-3, "nadam": 3e-3, "muon": 7e-3, "sgd": 0.1}
"""Peak learning rates."""


@dataclass(frozen=True, kw_only=True)
class SequenceConfig(TrainingOptions):
    """Options of `SequenceRegressor` and `SequenceClassifier`. `None` means: decided at the start.

    Attributes:
        hidden_size: H, of each direction.
        num_layers: of the LSTM.
        embed_size: width of an embedded step.
        bidirectional: the sequence is read both ways.
        pooling: last takes the state that each direction ends in, mean the mean over all steps.
        dropout: before the last layer.
        held_out: share of the sequences, drawn at random, that validate.
    """

    hidden_size: int = 64
    num_layers: int = 1
    embed_size: int = 64
    bidirectional: bool = False
    pooling: Literal["last", "mean"] = "last"
    dropout: float = 0.0
    held_out: float = 0.1
    weight_decay: float = 0.01
    ema: float = 0.99
    patience: int = 20
    precision: Precision = "fp32"

    def __post_init__(self) -> None:
        check_fields(self, _BOUNDS, _CHOICES)
        self.check_schedule()


_BOUNDS: dict[str, tuple[float, float]] = {
    **BOUNDS,
    **dict.fromkeys(("hidden_size", "num_layers", "embed_size"), (1, 10**6)),
    "dropout": (0.0, 0.999999),
    "held_out": (1e-9, 1 - 1e-9),
}
_CHOICES: dict[str, tuple[str, ...]] = {**CHOICES, "pooling": ("last", "mean")}
