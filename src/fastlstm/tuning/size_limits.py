"""Hard limits of a model, checked on random weights before any training."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastlstm.errors import UsageError
from fastlstm.report.terminal import short_bytes
from fastlstm.runs.weight_formats import encode_weights
from fastlstm.text.decoder import FORMATS, Decoder
from fastlstm.text.model import LanguageModel
from fastlstm.text.weight_report import writing_speed

if TYPE_CHECKING:
    from fastlstm.text.config import ModelConfig
    from fastlstm.tuning.job import Job, Show

_NUM_TIMED, _TIMED_S = 5, 0.07
_LEAST_NOISE = 1.1
"""The upper end is at least so many times the median: a busy moment is slower than all that was
measured at one moment."""


@dataclass(frozen=True)
class ModelCost:
    """What a model takes when it is used.

    Attributes:
        latency_s: seconds per token of one stream, or per forecast of one window: the median.
        num_bytes: of the file of weights.
        low_s, high_s: the second fastest measurement and the second slowest one, which is at least
            a tenth above the median, and above what a token takes when a text begins.
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
    """What a model may take; None is no limit.

    Attributes:
        max_latency_s: seconds per token of one stream, of a forecaster per window.
        max_bytes: of the file of weights.
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

        def latency_s(threads: int | None = None) -> float:
            return 1.0 / writing_speed(decoder, threads=threads, seconds=_TIMED_S)

        return self.measured(num_bytes, latency_s, latency_s(1))

    def measured(
        self, num_bytes: int, time: Callable[[], float], at_first_s: float = 0.0
    ) -> ModelCost:
        """Returns what a model takes, by `time`, which measures its latency once.

        One outlier does not count, and no more is measured than decides. A text that begins takes
        `at_first_s`, on one thread, until more are found faster.
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
        """Returns why a model is over a limit, or None; the upper end of its latency must keep it,
        as the limit holds at other moments too."""
        if self.max_latency_s is not None and cost.high_s > self.max_latency_s:
            limit_us = 1e6 * self.max_latency_s
            limit = f"the upper end is over the limit of {limit_us:.1f} us"
            return f"{cost.latency_text(per)}, {self.weights}; {limit}"
        if self.max_bytes is not None and cost.num_bytes > self.max_bytes:
            return (
                f"{short_bytes(cost.num_bytes)} of weights, {self.weights}; the limit is"
                f" {short_bytes(self.max_bytes)}"
            )
        return None


def sizes_within_limits(
    job: Job, wanted: Iterable[int], cost: Callable[[int], ModelCost], limits: SizeLimits,
    show: Show,
) -> list[dict[str, Any]]:  # fmt: skip
    """Returns every size with its latency and bytes, and `refusal`: why it is over a limit.

    Raises:
        UsageError: no size keeps the limits.
    """
    sizes = list[dict[str, Any]]()
    for units in wanted:
        measured = cost(units)
        refusal = limits.refusal(measured, job.per)
        sizes.append({
            job.size: units, "latency_s": measured.latency_s, "latency_high_s": measured.high_s,
            "num_bytes": measured.num_bytes, "refusal": refusal,
        })  # fmt: skip
        limit = limits.max_latency_s
        within = "" if limit is None else f", limit {1e6 * limit:.1f} us"
        about = f"{measured.latency_text(job.per)}{within}, {short_bytes(measured.num_bytes)}"
        show(f"{units} units", f"refused: {refusal}" if refusal else about)
    if all(size["refusal"] for size in sizes):
        smallest = min(sizes, key=lambda size: float(size["latency_s"]))
        raise UsageError(
            f"no size keeps the limits; the fastest has {smallest[job.size]} units:"
            f" {smallest['refusal']}"
        )
    return sizes
