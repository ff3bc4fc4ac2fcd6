"""Connections: chunked bodies, time limits, and the limit of open files."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import h11
import httpx
import pytest

from fastlstm.errors import ConfigError
from fastlstm.serve.http import connections
from fastlstm.serve.http.connections import Connection, Watch, max_connections
from fastlstm.serve.metrics import Metrics
from fastlstm.serve.server import _handle
from running_server import SETTINGS, wait_until

FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from fastlstm.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def is_live(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health/live", timeout=30).status_code == 200
    return False


def has_ended(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        while client.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


def test_more_connections_than_files_block_no_request(start):
    server = start("--header-timeout", "600", code=FEW_FILES)
    host, port = server.url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stack:
        for _ in range(90):
            with contextlib.suppress(ConnectionResetError):  # closed at once
                stack.enter_context(socket.create_connection((host, int(port)), 10))
        # Those that ask nothing are closed once they have waited for a second.
        wait_until(lambda: is_live(server.url))
        answers = [httpx.get(f"{server.url}/metrics", timeout=30) for _ in range(3)]
    assert [one.status_code for one in answers] == [200] * 3
    assert "fastlstm_connections_dismissed_total 0.0" not in answers[0].text
    assert server.end() == 0
    lines = [line for line in server.lines if not line.startswith("{")]
    assert sum("connections are open" in line for line in lines) == 1
    assert len("".join(lines)) < 2000, lines[:20]


def test_running_out_of_files_is_one_line_a_minute():
    lines: list[str] = []
    watch = Watch(SETTINGS, 10, Metrics(), lines.append)
    others: list[Any] = []
    loop: Any = SimpleNamespace(default_exception_handler=others.append)
    handle = partial(_handle, watch)
    for _ in range(5):
        handle(loop, {"exception": OSError(errno.EMFILE, "planted")})
    assert [line.startswith("fastlstm: WARNING: 10 connections are") for line in lines] == [True]
    handle(loop, {"exception": ValueError("planted")})
    assert len(others) == 1


def test_the_limit_leaves_room_for_files(monkeypatch):
    def allow(number: int) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (number, number))

    allow(1_000_000)
    assert max_connections(6144) == 6144
    allow(resource.RLIM_INFINITY)
    assert max_connections(6144) == 6144
    allow(2000)
    assert 1 <= max_connections(6144) <= 2000 - connections._SPARE_FILES
    allow(20)
    with pytest.raises(ConfigError, match="the process may open 20 files"):
        max_connections(6144)


HELD = {
    "silent": b"",
    "trickling head": b"GET / HT",
    "answered": b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "answered, body to come": b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n{",
}


@pytest.mark.parametrize("sent", HELD.values(), ids=HELD)
def test_idle_connections_are_closed_to_make_room(serve, monkeypatch, sent):
    monkeypatch.setattr("fastlstm.serve.server.max_connections", lambda _: 10)
    monkeypatch.setattr(connections, "_WAITED_S", 0.2)
    server = serve(header_timeout=60.0, body_timeout=60.0)
    server.client.close()
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(server.address, 10)) for _ in range(10)
        ]
        for client in clients:
            client.sendall(sent)
            if sent.endswith(b"\n") or b"POST" in sent:
                assert client.recv(5) == b"HTTP/"
        time.sleep(0.1)
        if sent == HELD["trickling head"]:
            for client in clients:
                client.sendall(b"T")  # one more byte makes no newcomer of it
        time.sleep(0.4)
        for _ in range(3):
            answer = httpx.post(
                f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 3}, timeout=10
            )
            assert answer.status_code == 200
        wait_until(lambda: any(map(has_ended, clients)))
    assert server.runner.service.metrics.dismissed._value.get() >= 1


def test_a_connection_under_way_is_not_closed_for_a_new_one(serve, lm, monkeypatch):
    monkeypatch.setattr("fastlstm.serve.server.max_connections", lambda _: 3)
    monkeypatch.setattr(connections, "_WAITED_S", 0.2)
    monkeypatch.setattr(connections, "_EXTRA", 2)
    server = serve(max_tokens=1 << 40)
    server.client.close()
    body = {"prompt": "a", "max_tokens": 1 << 40, "stream": True}
    with contextlib.ExitStack() as stack:
        streams = []
        for _ in range(3):
            client = stack.enter_context(httpx.Client(base_url=server.url, timeout=20))
            answer = stack.enter_context(client.stream("POST", "/v1/completions", json=body))
            streams.append(answer.iter_text())
            next(streams[-1])
        time.sleep(0.4)
        refused = httpx.get(f"{server.url}/health/live", timeout=10)
        assert refused.status_code == 503
        # Many more are closed at once, whether they ask or not.
        with contextlib.suppress(ConnectionResetError):
            for _ in range(20):
                silent = stack.enter_context(socket.create_connection(server.address, 10))
            wait_until(lambda: has_ended(silent))
        for stream in streams:
            assert next(stream)
    assert server.runner.service.metrics.outcomes.labels("stalled")._value.get() == 0


class Fake:
    """A connection in one state."""

    def __init__(self, waits_for: str, since_s: float = 0.0, is_answering: bool = False) -> None:
        self.waits_for, self.since_s = (waits_for,), since_s
        self.is_idle = waits_for in ("head", "request", "body") and not is_answering
        self.transport = SimpleNamespace(close=lambda: self.ends.append("closed"))
        self.ends: list[Any] = []

    def look(self, now_s: float) -> None:
        pass


def test_the_connections_that_have_waited_longest_make_room():
    watch = Watch(SETTINGS, 16, Metrics(), lambda text: None)  # keeps room for two
    idle = [Fake("request", since_s=7.0 + k) for k in range(3)]
    busy = [Fake("answer") for _ in range(12)] + [Fake("body", is_answering=True)]
    watch.look([*busy, idle[2], idle[0], idle[1]], 9.0)  # type: ignore[list-item]
    assert [one.ends for one in idle] == [["closed"], ["closed"], []]
    assert [one for one in busy if one.ends] == []
    newcomers = [Fake("head", since_s=8.5) for _ in range(16)]
    watch.look(newcomers, 9.0)  # type: ignore[arg-type]
    assert [one for one in newcomers if one.ends] == []
    watch.look([Fake("request") for _ in range(14)], 9.0)  # type: ignore[misc]


def test_only_progress_restarts_a_waiting_time():
    connection: Any = Connection.__new__(Connection)
    size, state = [0], [h11.IDLE]
    connection.transport = SimpleNamespace(get_write_buffer_size=lambda: size[0])
    connection.waits_for, connection.since_s, connection.cycle = ("head", None), 0.0, None

    def looked(now_s: float) -> tuple[str, float]:
        type(connection.conn).their_state = property(lambda self: state[0])
        connection.look(now_s)
        return connection.waits_for[0], connection.since_s

    connection.conn = type("Conn", (), {"trailing_data": (b"", False)})()
    assert looked(1.0) == ("head", 0.0)
    connection.conn.trailing_data = (b"GET /", False)
    assert looked(2.0) == ("head", 0.0)  # a byte more is no progress
    state[0], connection.cycle = h11.SEND_BODY, object()
    assert looked(3.0) == ("body", 3.0)
    assert looked(4.0) == ("body", 3.0)
    state[0] = h11.DONE
    assert looked(5.0) == ("answer", 5.0)
    size[0] = 100
    assert looked(6.0) == ("reader", 6.0)
    assert looked(7.0) == ("reader", 6.0)
    size[0] = 90
    assert looked(8.0) == ("reader", 8.0)
    size[0], state[0], connection.conn.trailing_data = 0, h11.IDLE, (b"", False)
    assert looked(9.0) == ("request", 9.0)
    connection.conn.trailing_data = (b"G", False)
    assert looked(10.0) == ("head", 10.0)


def test_the_kernel_queues_more_connections_than_one_turn_accepts(serve):
    from fastlstm.serve import server as server_module

    server = serve()
    held = asyncio.run_coroutine_threadsafe(hold(2.0), server.loop)
    with contextlib.ExitStack() as stack:
        for _ in range(server_module._A_TURN * 8):
            stack.enter_context(socket.create_connection(server.address, 1))
    held.result()


async def hold(seconds: float) -> None:
    """Keeps the event loop from accepting."""
    time.sleep(seconds)
