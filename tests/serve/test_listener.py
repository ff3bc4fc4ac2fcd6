"""More connections than the process may have open files."""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fastlstm.errors import ConfigError
from fastlstm.serve import listener
from fastlstm.serve.listener import Listener, max_connections
from forecast_server import wait_until
from served_process import processes_of

FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from fastlstm.cli.main import main
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
        bound.limit(2, lambda: refused.append(bound.num_open))

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
        bound.limit(10, lambda: refused.append(bound.num_open))
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
