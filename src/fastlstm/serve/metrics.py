"""The Prometheus metrics of a server."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest

from fastlstm import __version__

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_SIZES = tuple(1 << k for k in range(13))
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counters, gauges and histograms of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"namespace": "fastlstm", "registry": self.registry}
        counter: Callable[..., Counter] = partial(Counter, **own)
        gauge: Callable[..., Gauge] = partial(Gauge, **own)
        histogram: Callable[..., Histogram] = partial(Histogram, **{"buckets": _SECONDS, **own})
        self.requests = counter("requests", "Requests answered, by status", ["code"])
        self.outcomes = counter("outcomes", "Requests ended, by outcome", ["outcome"])
        self.dismissed = counter("connections_dismissed", "Idle connections closed for new ones")
        self.log_dropped = counter("log_dropped", "Log lines dropped because nobody read them")
        self.tokens_written = counter("tokens_written", "Tokens written")
        self.tokens_read = counter("tokens_read", "Tokens of prompts read")
        self.tokens_known = counter("tokens_known", "Tokens of prompts not read again")
        self.failures = counter("failed_texts", "Texts that ended with an error")
        self.windows = counter("windows", "Windows forecast")
        self.active = gauge("streams_active", "Texts being written, windows being forecast")
        self.waiting = gauge("queue_depth", "Texts or windows that wait for a slot")
        self.slots = gauge("slots", "Texts or windows that fit in a call of the engine")
        self.sequences = gauge("sequences", "Sequences kept on the server")
        self.tick = histogram("tick_seconds", "Duration of a call of the engine")
        self.first_token = histogram("first_token_seconds", "From request to first chunk")
        self.between = histogram("inter_chunk_seconds", "Between two chunks of a stream")
        self.batch = Histogram(
            "batch_windows", "Windows forecast in one pass", buckets=_SIZES, **own
        )
        self._model = Info("model", "The model served", **own)

    def describe(self, **about: str) -> None:
        """Sets the labels of `fastlstm_model_info`."""
        self._model.info({**about, "version": __version__})

    def text(self) -> bytes:
        return generate_latest(self.registry)
