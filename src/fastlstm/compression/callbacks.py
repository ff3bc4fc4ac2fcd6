"""What prunes and rounds during the training of a compression."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastlstm.compression.fake_quantization import FakeQuantization
from fastlstm.compression.pruning import Pruning

if TYPE_CHECKING:
    from fastlstm.compression.options import CompressConfig
    from fastlstm.training.callbacks import Callback


def compression_callbacks(config: CompressConfig, rounding_begin: float) -> list[Callback]:
    """Returns the callbacks that prune, then round.

    Rounding begins where pruning is over; without pruning at the share `rounding_begin` of the run.
    """
    callbacks: list[Callback] = []
    if config.prune is not None and config.structured != "units":
        schedule = config.pruning_schedule()
        callbacks.append(Pruning(schedule, config.structured))
        rounding_begin = schedule.end
    if config.to != "fp32":
        callbacks.append(FakeQuantization(config.to, rounding_begin))
    return callbacks
