"""What is counted and logged of a request that never became one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from fastlstm.serve import log as log_module
from fastlstm.serve.http.access import Access, Record, count
from fastlstm.serve.http.errors import Disconnected
from fastlstm.serve.log import Log
from fastlstm.serve.metrics import Metrics


def test_a_client_that_left_before_there_was_a_status_counts_as_499() -> None:
    metrics = Metrics()
    count(metrics, Record("one", failure="disconnected"))
    count(metrics, Record("two", status=200))

    def counted(code: str) -> float | None:
        return metrics.registry.get_sample_value("fastlstm_requests_total", {"code": code})

    assert (counted("499"), counted("200"), counted("0")) == (1, 1, None)


def test_a_line_is_short_whatever_the_request(capfd: pytest.CaptureFixture[str]) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise Disconnected

    log = Log(Metrics().log_dropped)
    access: Any = Access(app, Metrics(), log=log)
    headers = [(b"x-request-id", b"i" * 5000), (b"user-agent", b"u" * 5000)]
    scope = {"type": "http", "headers": headers, "method": "M" * 5000, "path": "/" + "p" * 5000}
    asyncio.run(access(scope, None, None))
    log.close()
    text = capfd.readouterr().err
    assert len(text) < 1000
    line = json.loads(text)
    assert (line["method"], len(line["path"]), len(line["id"])) == ("M" * 16, 200, 32)


def test_the_terminal_is_looked_for_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    num_asked: list[object] = []
    monkeypatch.setattr(log_module, "is_terminal", lambda stream: not num_asked.append(stream))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        pass

    log = Log(Metrics().log_dropped)
    access: Any = Access(app, Metrics(), log=log)
    for _ in range(3):
        scope = {"type": "http", "headers": [], "method": "GET", "path": "/metrics"}
        asyncio.run(access(scope, None, None))
    log.close()
    lines = capfd.readouterr().err.splitlines()
    assert len(num_asked) == 1
    assert len(lines) == 3
    assert "GET /metrics" in lines[0], "plain text, as on a terminal"
