"""More connections than the process may have open files."""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fastlstm.errors import ConfigError
from fastlstm.serve.http import listener
from fastlstm.serve.http.keys import Keys
from fastlstm.serve.http.listener import IdleConnections, Listener, max_connections
from fastlstm.serve.server import _config
from fastlstm.serve.service import Service
from forecast_server import wait_until
from running_server import SETTINGS
from served_process import processes_of

FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from fastlstm.cli.main import main
from fastlstm.serve.http import listener
listener._WAITED_S = 600.0  # no connection is idle for so long
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def start(plain_path: Path) -> Iterator[Any]:
    yield from processes_of(plain_path)


def read_all(client: socket.socket) -> bytes:
    client.settimeout(10)
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(4096):
            found += part
    return found


def test_too_many_connections_are_refused_and_counted(start: Any) -> None:
    server = start(code=FEW_FILES)
    host, port = server.url.removeprefix("http://").split(":")
    taken, refused = [], 0
    for _ in range(90):
        client = socket.create_connection((host, int(port)), 10)
        client.setblocking(False)
        taken.append(client)
    answers = [b""]
    for client in taken[64:]:  # more than all files: these cannot have been taken
        answers.append(read_all(client))
        refused += 1
    assert any(answer.startswith(b"HTTP/1.1 503 ") for answer in answers)
    for client in taken:
        client.close()

    def counted() -> float:
        try:
            lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        except httpx.HTTPError:
            return 0.0
        name = "fastlstm_connections_refused_total "
        return next((float(line.split()[1]) for line in lines if line.startswith(name)), 0.0)

    wait_until(lambda: counted() >= refused)
    assert server.end() == 0
    lines = [line for line in server.lines if not line.startswith("{")]
    assert sum("connections are open" in line for line in lines) == 1
    assert len("".join(lines)) < 2000, lines[:20]


def test_the_limit_leaves_room_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def allow(number: int) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (number, number))

    allow(1_000_000)
    assert max_connections(6144) == 6144
    allow(resource.RLIM_INFINITY)
    assert max_connections(6144) == 6144
    allow(2000)
    assert 1 <= max_connections(6144) <= 2000 - listener._SPARE
    allow(20)
    with pytest.raises(ConfigError, match="the process may open 20 files"):
        max_connections(6144)


def test_a_connection_is_counted_until_it_is_closed() -> None:
    with Listener() as bound, contextlib.ExitStack() as stack:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        bound.setblocking(False)
        refused: list[int] = []
        bound.limit(2, lambda: False, lambda: refused.append(bound.num_open))

        def connect() -> socket.socket:
            return stack.enter_context(socket.create_connection(bound.getsockname(), 10))

        def accept() -> socket.socket:
            found: list[socket.socket] = []

            def is_there() -> bool:
                with contextlib.suppress(BlockingIOError):
                    found.append(bound.accept()[0])
                return bool(found)

            wait_until(is_there)
            return stack.enter_context(found[0])

        connect(), connect()
        first, _ = accept(), accept()
        third = connect()
        wait_until(lambda: tries(bound) and refused == [2])
        assert read_all(third).startswith(b"HTTP/1.1 503 ")
        first.close()
        first.close()  # once is counted
        assert bound.num_open == 1
        connect()
        accept()
        assert bound.num_open == 2
        assert refused == [2]


def test_without_a_file_left_a_connection_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failures = socket.socket.accept, [errno.EMFILE]

    def failing(self: socket.socket) -> Any:
        if failures:
            raise OSError(failures.pop(), "planted")
        return accept(self)

    with Listener() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        refused: list[int] = []
        bound.limit(10, lambda: False, lambda: refused.append(bound.num_open))
        monkeypatch.setattr(socket.socket, "accept", failing)
        bound.setblocking(False)
        for number in (1, 2):  # the file that made room is open again
            with socket.create_connection(bound.getsockname(), 10) as client:
                wait_until(lambda number=number: tries(bound) and len(refused) == number)  # type: ignore[misc]
                assert read_all(client).startswith(b"HTTP/1.1 503 ")
            failures.append(errno.EMFILE)
        failures[:] = [errno.EINVAL]
        with pytest.raises(OSError, match="planted"):
            bound.accept()


def tries(bound: Listener) -> bool:
    with contextlib.suppress(BlockingIOError):
        bound.accept()
    return True


def test_a_flood_leaves_the_event_loop_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "A_TURN", 8)
    with Listener() as bound, contextlib.ExitStack() as stack:
        bound.bind(("127.0.0.1", 0))
        bound.listen(100)
        bound.setblocking(False)
        refused: list[int] = []
        bound.limit(0, lambda: False, lambda: refused.append(1))
        for _ in range(20):
            stack.enter_context(socket.create_connection(bound.getsockname(), 10))
        turns = []
        while len(refused) < 20:
            before = len(refused)
            with pytest.raises(BlockingIOError):
                bound.accept()
            turns.append(len(refused) - before)
        assert turns == [8, 8, 4]


def test_the_kernel_keeps_more_than_a_turn_takes() -> None:
    service = Service(SETTINGS, Keys([]))
    turn = _config(SETTINGS, service).backlog
    assert turn == listener.A_TURN
    with Listener() as bound, contextlib.ExitStack() as stack:
        bound.bind(("127.0.0.1", 0))
        bound.listen(turn)
        for _ in range(turn + 36):
            stack.enter_context(socket.create_connection(bound.getsockname(), 2))


def test_connections_that_are_to_close_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_CLOSING", 3)
    with Listener() as bound, contextlib.ExitStack() as stack:
        bound.bind(("127.0.0.1", 0))
        bound.listen(100)
        bound.setblocking(False)
        bound.limit(2, lambda: True, lambda: None)
        for _ in range(10):
            stack.enter_context(socket.create_connection(bound.getsockname(), 10))
        taken = [stack.enter_context(bound.accept()[0]) for _ in range(2 + 3)]
        with pytest.raises(BlockingIOError):
            bound.accept()
        for connection in taken[:4]:
            connection.close()
        taken = [stack.enter_context(bound.accept()[0]) for _ in range(4)]
        with pytest.raises(BlockingIOError):
            bound.accept()


HELD = {
    "silent": b"",
    "trickling head": b"GET / HT",
    "answered": b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "answered, body to come": b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n{",
}


@pytest.mark.parametrize("sent", HELD.values(), ids=HELD)
def test_who_holds_all_connections_and_asks_nothing_keeps_nobody_out(
    serve: Any, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr("fastlstm.serve.server.max_connections", lambda _: 10)
    monkeypatch.setattr(listener, "_WAITED_S", 0.2)
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
        time.sleep(0.3)
        if sent == HELD["trickling head"]:
            for client in clients:
                client.sendall(b"T")  # one more byte makes no newcomer of it
        for _ in range(3):
            answer = httpx.post(
                f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 3}, timeout=10
            )
            assert answer.status_code == 200
        read_all(clients[0])  # comes to its end
    assert server.runner.service.metrics.dismissed._value.get() >= 1
    assert server.runner.service.metrics.refused._value.get() == 0


def test_a_connection_that_is_answered_is_not_closed_for_another(
    serve: Any, lm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastlstm.serve.server.max_connections", lambda _: 3)
    monkeypatch.setattr(listener, "_WAITED_S", 0.2)
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
        assert "as many connections as it takes" in refused.text
        for stream in streams:
            assert next(stream)
    assert server.runner.service.metrics.dismissed._value.get() == 0


def test_the_connection_that_has_waited_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])

    class Fake:
        is_sending = False

        def dismiss(self) -> bool:
            if not self.is_sending:
                closed.append(self)
            return not self.is_sending

    closed: list[Any] = []
    first, second, third, fourth = fakes = [Fake() for _ in range(4)]
    waiting = IdleConnections()
    for fake in fakes:
        waiting.begin(fake)  # type: ignore[arg-type]
        now_s[0] += 1
    waiting.begin(first)  # type: ignore[arg-type]
    waiting.end(second)  # type: ignore[arg-type]
    third.is_sending = True
    now_s[0] = 5.5
    assert waiting.make_room()
    assert closed == [fourth]
    now_s[0] = 4 + listener._WAITED_S - 0.1
    assert not waiting.make_room()  # the first has just begun again
    now_s[0] += 0.2
    assert waiting.make_room()
    assert closed == [fourth, first]
    assert not waiting.make_room()
