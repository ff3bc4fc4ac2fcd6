"""The metrics of a server, in a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_SIZES = tuple(1 << k for k in range(13))
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counters, gauges and histograms of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests answered, by status", ["code"])
        self.outcomes = self._counter("outcomes", "Requests ended, by outcome", ["outcome"])
        self.rejected = self._counter("rejected", "Requests refused for lack of room (429, 503)")
        self.disconnects = self._counter("disconnects", "Clients that left before the end")
        self.stalls = self._counter("stalls", "Clients cut off because they read nothing")
        self.refused = self._counter("connections_refused", "Connections beyond the limit, closed")
        self.dismissed = self._counter("connections_dismissed", "Idle connections closed for new")
        self.log_dropped = self._counter("log_dropped", "Log lines dropped, as nobody read them")
        self.tokens_written = self._counter("tokens_written", "Tokens written")
        self.tokens_read = self._counter("tokens_read", "Tokens of prompts read")
        self.tokens_known = self._counter("tokens_known", "Tokens of prompts not read again")
        self.failures = self._counter("failed_texts", "Texts that ended with an error")
        self.windows = self._counter("windows", "Windows forecast")
        self.active = self._gauge("streams_active", "Texts being written, windows being forecast")
        self.waiting = self._gauge("queue_depth", "Texts or windows that wait for a slot")
        self.slots = self._gauge("slots", "Texts or windows that fit in a call of the engine")
        self.sequences = self._gauge("sequences", "Sequences whose rows are kept")
        self.tick = self._histogram("tick_seconds", "Duration of a call of the engine")
        self.first_token = self._histogram("first_token_seconds", "From request to first chunk")
        self.between = self._histogram("inter_chunk_seconds", "Between two chunks of a stream")
        self.batch = self._histogram("batch_windows", "Windows forecast in one pass", _SIZES)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, help: str, labels: list[str] | None = None) -> Counter:
        return Counter(f"fastlstm_{name}", help, labels or [], registry=self.registry)

    def _gauge(self, name: str, help: str) -> Gauge:
        return Gauge(f"fastlstm_{name}", help, registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return Histogram(f"fastlstm_{name}", help, buckets=buckets, registry=self.registry)
