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


def families(metrics: Metrics) -> dict[str, dict[str, float]]:
    """Values by name of the family, then by name of the sample and its labels."""
    return {
        family.name: {
            sample.name + str(sorted(sample.labels.values())): sample.value
            for sample in family.samples
        }
        for family in text_string_to_metric_families(metrics.text().decode("utf-8"))
    }


def test_every_metric_is_there_under_its_name_and_kind():
    text = Metrics().text().decode("utf-8")
    kinds: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        if not family.name.endswith("_created"):
            kinds.setdefault(family.type, set()).add(family.name.removeprefix("fastlstm_"))
            assert family.documentation
    assert kinds == KINDS


def test_counts_carry_their_labels_and_belong_to_one_server():
    metrics, other = Metrics(), Metrics()
    metrics.requests.labels("200").inc()
    metrics.outcomes.labels("ok").inc(2)
    found = families(metrics)
    assert found["fastlstm_requests"]["fastlstm_requests_total['200']"] == 1
    assert found["fastlstm_outcomes"]["fastlstm_outcomes_total['ok']"] == 2
    assert "fastlstm_requests_total['200']" not in families(other)["fastlstm_requests"]


def test_durations_and_batches_have_buckets_of_their_own():
    metrics = Metrics()
    metrics.tick.observe(0.003)
    metrics.batch.observe(3)
    found = families(metrics)
    seconds, windows = found["fastlstm_tick_seconds"], found["fastlstm_batch_windows"]
    assert seconds["fastlstm_tick_seconds_bucket['0.002']"] == 0
    assert seconds["fastlstm_tick_seconds_bucket['0.005']"] == 1
    assert windows["fastlstm_batch_windows_bucket['2.0']"] == 0
    assert windows["fastlstm_batch_windows_bucket['4.0']"] == 1
    assert "fastlstm_batch_windows_bucket['4096.0']" in windows
