"""Hard limits of a model, checked on random weights before any training."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fastlstm.report.terminal import short_bytes
from fastlstm.runs.weight_formats import encode_weights
from fastlstm.text.decoder import FORMATS, Decoder
from fastlstm.text.model import LanguageModel
from fastlstm.text.weight_report import writing_speed

if TYPE_CHECKING:
    from fastlstm.text.config import ModelConfig

_MARGIN = 1.1
"""Of the latency: the same model is that much slower at another moment of a shared machine."""
_NUM_TIMED = 3
_FAR = 1.5
"""Times the limit from which one measurement is enough."""


@dataclass(frozen=True)
class ModelCost:
    """What a model takes when it is used.

    Attributes:
        latency_s: seconds per token of one stream, median of three measurements; of one where a
            limit is missed clearly.
        num_bytes: of the file of weights.
    """

    latency_s: float
    num_bytes: int


@dataclass(frozen=True)
class SizeLimits:
    """What a model may take.

    Attributes:
        max_latency_s: seconds per token of one stream; None is no limit.
        max_bytes: of the file of weights; None is no limit.
        weights: format of the weights in the file and in use.
    """

    max_latency_s: float | None = None
    max_bytes: float | None = None
    weights: str = "fp32"

    @property
    def has_any(self) -> bool:
        return self.max_latency_s is not None or self.max_bytes is not None

    def cost(self, config: ModelConfig) -> ModelCost:
        """Measures a model with random weights."""
        model = LanguageModel(config)
        floats = {n: p.detach().numpy() for n, p in model.named_parameters()}
        # The file of fp16 is decoded as fp32.
        decoder = Decoder.of(model, self.weights if self.weights in FORMATS else "fp32")
        num_bytes = len(encode_weights(floats, self.weights))
        seconds = [1.0 / writing_speed(decoder)]
        while len(seconds) < _NUM_TIMED and not self._is_far_over(seconds[0], num_bytes):
            seconds.append(1.0 / writing_speed(decoder))
        return ModelCost(statistics.median(seconds), num_bytes)

    def _is_far_over(self, latency_s: float, num_bytes: int) -> bool:
        is_slow = self.max_latency_s is not None and latency_s > _FAR * self.max_latency_s
        return is_slow or (self.max_bytes is not None and num_bytes > self.max_bytes)

    def refusal(self, cost: ModelCost) -> str | None:
        """Returns why a model is over a limit, or None."""
        if self.max_latency_s is not None and cost.latency_s * _MARGIN > self.max_latency_s:
            return (
                f"{1e6 * cost.latency_s:.1f} us per token, {self.weights}; the limit is"
                f" {1e6 * self.max_latency_s:.1f} us, less a tenth for a busy moment"
            )
        if self.max_bytes is not None and cost.num_bytes > self.max_bytes:
            return (
                f"{short_bytes(cost.num_bytes)} of weights, {self.weights}; the limit is"
                f" {short_bytes(self.max_bytes)}"
            )
        return None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
