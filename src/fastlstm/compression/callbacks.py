"""What prunes and rounds during the training of a compression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastlstm.compression.fake_quantization import FakeQuantization
from fastlstm.compression.pruning import HeldZeros, Pruning

if TYPE_CHECKING:
    from fastlstm.compression.options import CompressConfig
    from fastlstm.training.callbacks import Callback

NEW_ROUNDING_BEGIN = 0.6
"""Share of the run from which a new student is rounded; a trained model is from the start."""


def compression_callbacks(
    config: CompressConfig, source: Mapping[str, Any] | None
) -> list[Callback]:
    """Returns the callbacks that prune, then round.

    Rounding begins where pruning is over. A source that was pruned keeps its zeros.

    Args:
        config: the options.
        source: `compression` of the source's config.json; None of an ordinary run.
    """
    callbacks: list[Callback] = []
    rounding_begin = NEW_ROUNDING_BEGIN if config.is_new_student else 0.0
    zeros = None if source is None else source.get("structured")
    if zeros in ("none", "blocks") and not config.is_new_student and config.structured != "units":
        callbacks.append(HeldZeros(zeros))
    if config.prune is not None and config.structured != "units":
        schedule = config.pruning_schedule()
        callbacks.append(Pruning(schedule, config.structured))
        rounding_begin = schedule.end
    if config.to != "fp32":
        callbacks.append(FakeQuantization(config.to, rounding_begin))
    return callbacks
