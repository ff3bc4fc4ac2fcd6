"""Refusals while every place is taken: the same answer as through the routes."""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from fastlstm.serve.http.refusals import Refusals
from running_server import Running

KEY = "sk-1"
BODY = json.dumps({"prompt": "a", "max_tokens": 3}).encode()


def request(
    body: bytes = BODY, *headers: str, line: str = "POST /v1/completions HTTP/1.1"
) -> bytes:
    lines = [line, "Host: localhost", f"Content-Length: {len(body)}"]
    lines += ["Content-Type: application/json", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@pytest.fixture
def full(serve: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """A server whose only place is taken; `early` has the answers that were given unparsed."""
    server: Running = serve(max_streams=1, max_queue=0, max_tokens=10**9)
    early = server.early = []  # type: ignore[attr-defined]
    answer = Refusals.answer

    def counted(self: Refusals, data: bytes, client: str) -> bytes | None:
        found = answer(self, data, client)
        early.append(found)
        return found

    monkeypatch.setattr(Refusals, "answer", counted)
    body = {"prompt": "a", "max_tokens": 10**9, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as taken:
        lines = taken.iter_lines()  # without it the stream would be closed
        next(lines)
        early.clear()
        yield server


def exchange(server: Running, *parts: bytes) -> bytes:
    with socket.create_connection(server.address, 10) as client:
        for part in parts:
            client.sendall(part)
            time.sleep(0.05)
        return client.recv(65536)


def without_id(answer: bytes) -> tuple[list[bytes], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = [line for line in head.lower().split(b"\r\n") if not line.startswith(b"x-request-id")]
    return sorted(line for line in lines if not line.startswith(b"date")), body


def test_the_answer_is_the_routes_own(full: Running) -> None:
    early = exchange(full, request())
    late = exchange(full, request()[:30], request()[30:])
    assert [answer is not None for answer in full.early] == [True, False]  # type: ignore[attr-defined]
    assert without_id(early) == without_id(late)
    assert early.startswith(b"HTTP/1.1 429 ")
    assert b"retry-after: 1" in early


def test_a_connection_goes_on_after_it(full: Running) -> None:
    with socket.create_connection(full.address, 10) as client:
        for number in range(3):
            client.sendall(request(BODY, f"X-Request-Id: r{number}"))
            assert b"x-request-id: r%d" % number in client.recv(65536)
        client.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert full.metric('requests_total{code="429"}') == 3


@pytest.mark.parametrize(
    "data",
    [
        request(line="GET /v1/completions HTTP/1.1"),
        request(line="POST /v1/completions HTTP/1.0"),
        request(line="POST /v1/models HTTP/1.1"),
        request() + b"x",
        request()[:-1],
        request(BODY, "Content-Length: 1"),
        request(BODY, "Transfer-Encoding: chunked"),
        request(BODY, "Connection: close"),
        request(BODY, "Expect: 100-continue"),
        request(BODY, "A : b"),
        request(BODY, " folded"),
        request(BODY, "a: b\nc: d"),
        request(BODY, "a: b\rTransfer-Encoding: chunked"),
        request(BODY, "a: \x0b"),
        request(BODY, *["a: b"] * 100),
        request(BODY, "a: " + "b" * 33_000),
        request().replace(b"Host: localhost\r\n", b""),
        request().replace(b"Content-Length: ", b"Content-Length: +"),
        b"",
    ],
)
def test_what_is_not_plain_is_left_to_the_parser(full: Running, data: bytes) -> None:
    assert Refusals(full.runner.service).answer(data, "") is None


def test_what_every_client_sends_is_plain(full: Running) -> None:
    data = request(BODY, "Connection: keep-alive", "Accept: */*", "User-Agent: x/1 (y; z)")
    assert Refusals(full.runner.service).answer(data, "") is not None


def test_as_many_headers_are_taken_as_by_the_routes(full: Running) -> None:
    refusals = Refusals(full.runner.service)
    assert refusals.answer(request(BODY, *["a: b"] * 97), "") is not None  # 100 with its own three
    assert refusals.answer(request(BODY, *["a: b"] * 98), "") is None
    assert exchange(full, request(BODY, *["a: b"] * 98)).startswith(b"HTTP/1.1 431 ")


def test_with_room_nothing_is_refused(server: Running) -> None:
    assert Refusals(server.runner.service).answer(request(), "") is None


def test_the_log_line_is_the_routes_own(serve: Any, capfd: pytest.CaptureFixture[str]) -> None:
    server = serve(keys=(KEY, "sk-2"), log=True, max_streams=1, max_queue=0, max_tokens=10**9)
    server.client.headers["authorization"] = f"Bearer {KEY}"
    body = {"prompt": "a", "max_tokens": 10**9, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as taken:
        lines = taken.iter_lines()  # without it the stream would be closed
        next(lines)
        data = request(BODY, f"Authorization: Bearer {KEY}")
        assert exchange(server, data).startswith(b"HTTP/1.1 429 ")
        assert exchange(server, data[:30], data[30:]).startswith(b"HTTP/1.1 429 ")
    server.end()
    found = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line[0] == "{"]
    early, late = (line for line in found if line["status"] == 429)
    changes = ("time", "id", "seconds")
    assert {k: v for k, v in early.items() if k not in changes} == {
        k: v for k, v in late.items() if k not in changes
    }
    assert early["key"] == hashlib.sha256(KEY.encode()).hexdigest()[:4]


def test_who_takes_no_answers_gets_no_more(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server, early = serve(), []

    def answer(self: Refusals, data: bytes, client: str) -> bytes | None:
        if not data.startswith(b"POST"):
            return None
        early.append(data)
        return b"x" * (4 << 20)  # more than the kernel holds

    monkeypatch.setattr(Refusals, "answer", answer)
    with socket.create_connection(server.address, 10) as client:
        for _ in range(20):
            client.sendall(request())
            time.sleep(0.01)
            server.client.get("/health/live")
        assert len(early) == 1


def test_who_has_no_key_is_not_told(serve: Any) -> None:
    server = serve(keys=(KEY,), max_streams=1, max_queue=0, max_tokens=10**9)
    headers = {"authorization": f"Bearer {KEY}"}
    body = {"prompt": "a", "max_tokens": 10**9, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body, headers=headers) as taken:
        lines = taken.iter_lines()  # without it the stream would be closed
        next(lines)
        refusals = Refusals(server.runner.service)
        assert refusals.answer(request(), "") is None
        assert refusals.answer(request(BODY, "Authorization: Bearer no"), "") is None
        assert refusals.answer(request(BODY, f"Authorization: Bearer {KEY}"), "") is not None
