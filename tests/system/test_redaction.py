"""Secrets are hidden, and nothing else is."""

import pytest

from fastlstm.system import redaction
from fastlstm.system.redaction import hide, redacted, redacted_words


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch):
    monkeypatch.setattr(redaction, "_own", set())
    redacted.cache_clear()
    yield
    redacted.cache_clear()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cannot read https://h/x.csv?sig=abc%2F&x=1", "cannot read https://h/x.csv?sig=***&x=1"),
        ("https://h/x?X-Amz-Signature=d&X-Amz-Date=2", "https://h/x?X-Amz-Signature=***&X-Amz-Date=***"),
        ("s3://k/x?a=1&X-Amz-Security-Token=t0k", "s3://k/x?a=1&X-Amz-Security-Token=***"),
        ("https://h/?access_token=abc#x", "https://h/?access_token=***#x"),
        ("https://h/?key=abc", "https://h/?key=***"),
        ("postgres://user:pw@host/db", "postgres://***@host/db"),
        ("https://ghp_abc@github.com/x", "https://***@github.com/x"),
        ("Authorization: Bearer abcdef", "Authorization: Bearer ***"),
        ("{'api_key': 'abcdef'}", "{'api_key': '***'}"),
        ("AKIAABCDEFGHIJKLMNOP", "***"),
        ("https://hooks.slack.com/services/T0/B0/xyz", "https://hooks.slack.com/services/***"),
    ],
)  # fmt: skip
def test_a_secret_is_hidden(text, shown):
    assert redacted(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "give --api-key-file or --api-key", "design=5, assign=3, num_tokens=4, key=3",
        "abfs://container@account.dfs.core.windows.net/x", "http://host:80/a@b?x=1",
        "basic LSTM layers", "2,560 tokens: 1 token per step", "s3://bucket/key?scheme=http",
    ],
)  # fmt: skip
def test_other_text_is_unchanged(text):
    assert redacted(text) == text


def test_secrets_of_the_process_and_of_its_environment_are_hidden(monkeypatch):
    assert redacted("zzq8-hidden is there") == "zzq8-hidden is there"
    hide(["zzq8-hidden", "a"])
    assert redacted("zzq8-hidden is there") == "*** is there"
    monkeypatch.setenv("STORE_SECRET_ACCESS_KEY", "0123456789")
    monkeypatch.setenv("STORE_CREDENTIALS", "/home/me/keys.json")
    assert redacted("it has 0123456789 of /home/me/keys.json") == "it has *** of /home/me/keys.json"


def test_values_of_secret_flags_are_hidden_from_then_on():
    words = ["serve", "RUN", "--api-key", "k1", "--session-key=abcdefgh", "--api-key-file", "keys"]
    words += ["--alert", "https://host/secret-path", "--port", "80"]
    shown = ["serve", "RUN", "--api-key", "***", "--session-key=***", "--api-key-file", "keys"]
    assert redacted_words(words) == [*shown, "--alert", "***", "--port", "80"]
    assert redacted("abcdefgh, https://host/secret-path") == "***, ***"
