"""The metrics of a server, in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fastlstm import __version__
from fastlstm.serve.times import ENGINE_PHASES, TEXT_PHASES, HttpTimes

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_SIZES = tuple(1 << k for k in range(13))
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counters, gauges and histograms of one server.

    Attributes:
        http: seconds of the event loop and of requests.
        engine_s: seconds of the engine's thread, by phase, as of the last update.
        engine_text_s: texts times seconds, by phase.
        model: labels of `fastlstm_model_info`; empty while no text model is served.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"namespace": "fastlstm", "registry": self.registry}
        counter: Callable[..., Counter] = partial(Counter, **own)
        gauge: Callable[..., Gauge] = partial(Gauge, **own)
        histogram: Callable[..., Histogram] = partial(Histogram, **{"buckets": _SECONDS, **own})
        self.requests = counter("requests", "Requests answered, by status", ["code"])
        self.outcomes = counter("outcomes", "Requests ended, by outcome", ["outcome"])
        self.rejected = counter("rejected", "Requests refused for lack of room (429, 503)")
        self.disconnects = counter("disconnects", "Clients that left before the end")
        self.stalls = counter("stalls", "Clients cut off because they read nothing")
        self.refused = counter("connections_refused", "Connections beyond the limit, closed")
        self.dismissed = counter("connections_dismissed", "Idle connections closed for new")
        self.log_dropped = counter("log_dropped", "Log lines dropped, as nobody read them")
        self.tokens_written = counter("tokens_written", "Tokens written")
        self.tokens_read = counter("tokens_read", "Tokens of prompts read")
        self.tokens_known = counter("tokens_known", "Tokens of prompts not read again")
        self.failures = counter("failed_texts", "Texts that ended with an error")
        self.windows = counter("windows", "Windows forecast")
        self.active = gauge("streams_active", "Texts being written, windows being forecast")
        self.waiting = gauge("queue_depth", "Texts or windows that wait for a slot")
        self.slots = gauge("slots", "Texts or windows that fit in a call of the engine")
        self.sequences = gauge("sequences", "Sequences whose rows are kept")
        self.tick = histogram("tick_seconds", "Duration of a call of the engine")
        self.first_token = histogram("first_token_seconds", "From request to first chunk")
        self.between = histogram("inter_chunk_seconds", "Between two chunks of a stream")
        self.batch = Histogram(
            "batch_windows", "Windows forecast in one pass", buckets=_SIZES, **own
        )

        self.http = HttpTimes()
        self.engine_s = dict.fromkeys(ENGINE_PHASES, 0.0)
        self.engine_text_s = dict.fromkeys(TEXT_PHASES, 0.0)
        self.model: dict[str, str] = {}
        self.registry.register(_Times(self))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Times(Collector):
    """The seconds by phase, which are counted without the registry's locks."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        by_phase = (
            ("engine_seconds", "Seconds of the engine's thread, by phase", metrics.engine_s),
            ("text_seconds", "Texts in the engine times seconds, by phase", metrics.engine_text_s),
            ("http_seconds", "Seconds of the event loop, by phase", metrics.http.read()),
        )
        for name, text, seconds in by_phase:
            family = CounterMetricFamily(f"fastlstm_{name}", text, labels=["phase"])
            for phase, value in seconds.items():
                family.add_metric([phase], value)
            yield family
        yield CounterMetricFamily(
            "fastlstm_request_seconds",
            "Texts of requests under way times seconds",
            metrics.http.texts.seconds,
        )
        yield CounterMetricFamily(
            "fastlstm_send_wait_seconds",
            "Seconds that answers waited for their clients to read",
            metrics.http.sends.seconds,
        )
        about = {**metrics.model, "version": __version__} if metrics.model else {}
        info = GaugeMetricFamily("fastlstm_model_info", "The model served", labels=list(about))
        if about:
            info.add_metric(list(about.values()), 1.0)
        yield info
