"""Limits of latency and bytes, checked on models with random weights before any training."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastlstm.report.terminal import short_bytes
from fastlstm.runs.weight_formats import encode_weights
from fastlstm.text.decoder import FORMATS, Decoder
from fastlstm.text.model import LanguageModel
from fastlstm.text.weight_report import writing_speed

if TYPE_CHECKING:
    from fastlstm.text.config import ModelConfig

_NUM_TIMED, _TIMED_S = 5, 0.07
_LEAST_NOISE = 1.1
"""Least ratio of the upper end to the median: later moments may be busier than the measured one."""


@dataclass(frozen=True)
class ModelCost:
    """Latency and bytes of a model in use.

    Attributes:
        latency_s: median seconds per token of one stream, or per forecast of one window.
        num_bytes: size of the file of weights.
        low_s, high_s: the second fastest and the second slowest measurement; `high_s` is at least a
            tenth above the median, and above the time of a token at the beginning of a text.
    """

    latency_s: float
    num_bytes: int
    low_s: float
    high_s: float

    def latency_text(self, per: str) -> str:
        """Returns "14.8 us per token (14.3 to 19.4)"."""
        low, high = 1e6 * self.low_s, 1e6 * self.high_s
        return f"{1e6 * self.latency_s:.1f} us per {per} ({low:.1f} to {high:.1f})"


@dataclass(frozen=True)
class SizeLimits:
    """Limits of a model with weights of a format, in the file and in use; None is no limit.

    The latency is per token of one stream, or per window of a forecaster; the bytes are the file's.
    """

    max_latency_s: float | None = None
    max_bytes: float | None = None
    weights: str = "fp32"

    def cost(self, config: ModelConfig) -> ModelCost:
        """Measures a text model with random weights."""
        model = LanguageModel(config)
        floats = {n: p.detach().numpy() for n, p in model.named_parameters()}
        # A file of fp16 is decoded as fp32.
        decoder = Decoder.of(model, self.weights if self.weights in FORMATS else "fp32")
        num_bytes = len(encode_weights(floats, self.weights))

        def latency_s(threads: int | None = None) -> float:
            return 1.0 / writing_speed(decoder, threads=threads, seconds=_TIMED_S)

        return self.measured(num_bytes, latency_s, latency_s(1))

    def measured(
        self, num_bytes: int, time: Callable[[], float], at_first_s: float = 0.0
    ) -> ModelCost:
        """Returns the cost of a model; `time` measures its latency once.

        One outlier does not count. Measuring ends as soon as the limits decide. A text begins on
        one thread, with `at_first_s` per token, before more threads are found faster.
        """
        limit_s = math.inf if self.max_latency_s is None else self.max_latency_s
        is_over = self.max_bytes is not None and num_bytes > self.max_bytes
        is_over |= _LEAST_NOISE * at_first_s > limit_s
        seconds = [time()]
        while len(seconds) < _NUM_TIMED and not is_over:
            seconds.append(time())
            is_over = sum(s > limit_s for s in seconds) >= 2
        median, ends = statistics.median(seconds), sorted(seconds)[1:-1] or seconds
        high_s = max(*ends, _LEAST_NOISE * max(median, at_first_s))
        return ModelCost(median, num_bytes, min(ends), high_s)

    def refusal(self, cost: ModelCost, per: str = "token") -> str | None:
        """Returns why a model is over a limit, or None. The upper end of its latency counts, as
        other moments may be busier."""
        if self.max_latency_s is not None and cost.high_s > self.max_latency_s:
            limit = f"the upper end is over the limit of {1e6 * self.max_latency_s:.1f} us"
            return f"{cost.latency_text(per)}, {self.weights}; {limit}"
        if self.max_bytes is not None and cost.num_bytes > self.max_bytes:
            return (
                f"{short_bytes(cost.num_bytes)} of weights, {self.weights}; the limit is"
                f" {short_bytes(self.max_bytes)}"
            )
        return None
