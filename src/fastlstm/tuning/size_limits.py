"""Hard limits of a model, checked on random weights before any training."""

from __future__ import annotations

import statistics
from collections.abc import Callable
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
        latency_s: seconds per token of one stream, or per forecast of one window; median of three
            measurements; of one where a limit is missed clearly.
        num_bytes: of the file of weights.
    """

    latency_s: float
    num_bytes: int


@dataclass(frozen=True)
class SizeLimits:
    """What a model may take.

    Attributes:
        max_latency_s: seconds per token of one stream, of a forecaster per window; None is no
            limit.
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
        """Measures a text model with random weights."""
        model = LanguageModel(config)
        floats = {n: p.detach().numpy() for n, p in model.named_parameters()}
        # The file of fp16 is decoded as fp32.
        decoder = Decoder.of(model, self.weights if self.weights in FORMATS else "fp32")
        num_bytes = len(encode_weights(floats, self.weights))
        return self.measured(num_bytes, lambda: 1.0 / writing_speed(decoder))

    def measured(self, num_bytes: int, time: Callable[[], float]) -> ModelCost:
        """Returns what a model takes; `time` measures its latency once."""
        seconds = [time()]
        while len(seconds) < _NUM_TIMED and not self._is_far_over(seconds[0], num_bytes):
            seconds.append(time())
        return ModelCost(statistics.median(seconds), num_bytes)

    def _is_far_over(self, latency_s: float, num_bytes: int) -> bool:
        is_slow = self.max_latency_s is not None and latency_s > _FAR * self.max_latency_s
        return is_slow or (self.max_bytes is not None and num_bytes > self.max_bytes)

    def refusal(self, cost: ModelCost, per: str = "token") -> str | None:
        """Returns why a model is over a limit, or None; its latency is that of a `per`."""
        if self.max_latency_s is not None and cost.latency_s * _MARGIN > self.max_latency_s:
            return (
                f"{1e6 * cost.latency_s:.1f} us per {per}, {self.weights}; the limit is"
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
