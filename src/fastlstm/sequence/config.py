"""Options of a sequence model and its training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from fastlstm.sequence.answers import storable_class_weight
from fastlstm.system.fields import Precision, check_fields
from fastlstm.training.options import BOUNDS, TrainingOptions

DEFAULT_EPOCHS = 100.0
LEARNING_RATES = {"adamw": 3e-3, "adam": 3e-3, "nadam": 3e-3, "muon": 7e-3, "sgd": 0.1}
"""Peak learning rates."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Options that a sequence model shares with its network.

    Attributes:
        hidden_size: H, hidden units of each direction.
        num_layers: number of LSTM layers.
        embed_size: d, width of an embedded step.
        bidirectional: read the sequence in both directions.
        pooling: last takes the final state of each direction, mean takes the mean over all steps.
        dropout: dropout before the last layer, in [0, 1).
    """

    hidden_size: int = 64
    num_layers: int = 1
    embed_size: int = 64
    bidirectional: bool = False
    pooling: Literal["last", "mean"] = "last"
    dropout: float = 0.0


ARCHITECTURE = tuple(field.name for field in fields(Architecture))


@dataclass(frozen=True, kw_only=True)
class SequenceConfig(Architecture, TrainingOptions):
    """Options of `SequenceRegressor` and `SequenceClassifier`. `None`: decided at the start.

    Without `steps`, `epochs` or `budget`, training takes 100 epochs; by default the held-out
    sequences are evaluated after each epoch.

    Attributes:
        held_out: share of the sequences to hold out, drawn at random from each class; their loss
            decides which weights are kept.
        class_weight: of a classifier, weights of the classes in the loss: balanced divides by the
            number of training sequences of a class, a dict has the weight of each label, 1 if
            missing. They are divided by their mean over the training sequences.
    """

    held_out: float = 0.1
    class_weight: str | Mapping[Any, float] | None = None
    weight_decay: float = 0.01
    ema: float = 0.99
    patience: int = 20
    precision: Precision = "fp32"

    def __post_init__(self) -> None:
        check_fields(self, {**BOUNDS, **ARCHITECTURE_BOUNDS, "held_out": (1e-9, 1 - 1e-9)})
        self.check_schedule()
        object.__setattr__(self, "class_weight", storable_class_weight(self.class_weight))


ARCHITECTURE_BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("hidden_size", "num_layers", "embed_size"), (1, 10**6)),
    "dropout": (0.0, 0.999999),
}
