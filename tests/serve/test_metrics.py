"""Metrics in Prometheus's text format: names, labels, buckets."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from fastlstm.serve.metrics import Metrics

KINDS = {
    "counter": {
        *("requests", "outcomes", "connections_dismissed", "log_dropped", "tokens_written"),
        *("tokens_read", "tokens_known"),
        *("failed_texts", "windows"),
    },
    "gauge": {"streams_active", "queue_depth", "slots", "sequences", "model_info"},
    "histogram": {"tick_seconds", "first_token_seconds", "inter_chunk_seconds", "batch_windows"},
}


def test_every_metric_is_there_under_its_name_and_kind():
    text = Metrics().text().decode("utf-8")
    kinds: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        if not family.name.endswith("_created"):
            kinds.setdefault(family.type, set()).add(family.name.removeprefix("fastlstm_"))
            assert family.documentation
    assert kinds == KINDS
    for bucket in ('tick_seconds_bucket{le="0.0005"}', 'batch_windows_bucket{le="4096.0"}'):
        assert f"fastlstm_{bucket}" in text
