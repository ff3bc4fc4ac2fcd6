"""Log lines of requests, as JSON and for a terminal, and their counters."""

from __future__ import annotations

import hashlib
import io
import json
import re
import socket
import sys
import time
from typing import Any

import pytest

from fastlstm.serve.http.access import Record, _duration, json_line, terminal_line

KEY = hashlib.sha256(b"secret-key").hexdigest()[:4]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def line(path: str = "/v1/completions", method: str = "POST", **about: Any) -> str:
    record = Record("an-id", **about)
    record.start_s = time.monotonic() - 0.0122
    return terminal_line(record, "127.0.0.1", method, path)


def test_a_terminal_line_is_short():
    text = line(status=200, completion_tokens=34, key="a1b2")
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d  POST /v1/completions  200  34 tokens  \d\d ms  key a1b2", text
    )


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"status": 200, "windows": 1}, "200  1 window  "),
        ({"status": 200, "completion_tokens": 12_345}, "200  12,345 tokens  "),
        ({"status": 404}, "404  "),
        ({"status": 400, "param": "a  b\n"}, "400  a%20%20b%0A  "),
        ({"status": 0, "failure": "disconnected"}, "499  "),
        ({"status": 200, "failure": "stalled"}, "  stalled"),
        ({"status": 500}, "  id an-id"),
        ({"status": 200, "failure": "failed"}, "  failed  id an-id"),
    ],
)
def test_a_terminal_line_shows_counts_failures_and_ids(about, words):
    assert words in line(**about)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0.0, "<1 ms"), (0.0006, "1 ms"), (0.9994, "999 ms"), (0.9996, "1.0 s")),
        *((59.94, "59.9 s"), (60.0, "1:00")),
    ],
)
def test_a_duration_is_short(seconds, text):
    assert _duration(seconds) == text


@pytest.mark.parametrize(
    "path",
    [
        *("/\r\n12:03:07  GET /admin  200  1 ms", "/\x1b[2J\x1b]0;title\x07"),
        *("/\u202e\u2028\x9b31m\x7f\x00", "/\ud800é", "/  200  5 tokens"),
    ],
)
def test_a_path_cannot_look_like_anything_else(path):
    text = line(path, status=404)
    assert text.isascii()
    assert text.isprintable()
    assert len(text.split("  ")) == 4, "time, request, status, duration"
    assert json.loads(json_line(Record("an-id", status=404), "::1", "GET", path))["path"] == path


def test_a_server_writes_lines_to_a_terminal(serve, monkeypatch):
    screen = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stderr", screen)
    server = serve(log=True, keys=("secret-key",))
    server.client.headers["authorization"] = "Bearer secret-key"
    server.post(prompt="a cat", max_tokens=3)
    with socket.create_connection(server.address) as raw:
        raw.sendall(b"GET /%0d%0a%1b[2Jx HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        while raw.recv(4096):
            pass
    server.end()
    lines = screen.getvalue().split("\n")
    assert len(lines) == 3
    assert re.search(rf"POST /v1/completions  200  3 tokens  <?\S+ m?s  key {KEY}$", lines[0])
    assert re.search(r"GET /%0D%0A%1B%5B2Jx  401  <?\S+ m?s$", lines[1])
    assert "secret" not in screen.getvalue()
