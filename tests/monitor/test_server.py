from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastlstm.errors import ConfigError
from fastlstm.monitor import server as server_module
from fastlstm.monitor.run_summary import RunIndex
from fastlstm.monitor.server import LivePage, MonitorServer
from fastlstm.runs.run_directory import RunDirectory
from recorded_run import add_event


@pytest.fixture
def server(
    write_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MonitorServer]:
    monkeypatch.setattr(server_module, "_POLL_S", 0.0)
    write_run("a", is_ended=False)
    index = RunIndex([tmp_path])
    index.update()
    with MonitorServer(LivePage(index, tmp_path), 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def answer(server: MonitorServer, path: str, verb: str = "GET", **headers: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(verb, path, headers=headers)
    return connection.getresponse()


def test_the_page_and_its_body(server: MonitorServer) -> None:
    html = answer(server, "/").read().decode()
    part = answer(server, "/body").read().decode()
    assert part.startswith("<p")
    assert part in html
    assert "script-src 'sha256-" in html
    assert answer(server, "/none").status == 404
    assert answer(server, "/../../etc/passwd").status == 404
    assert server.server_address[0] == "127.0.0.1"


def test_only_reading_and_only_for_this_host(server: MonitorServer) -> None:
    assert answer(server, "/", Host="evil.example").status == 403
    assert answer(server, "/body", Host=f"evil.example:{server.server_port}").status == 403
    assert answer(server, "/", Host=f"localhost:{server.server_port}").status == 200
    for verb in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert answer(server, "/", verb).status == 501


def test_an_event_reaches_the_page(server: MonitorServer, tmp_path: Path) -> None:
    assert "1 dead" in answer(server, "/body").read().decode()
    add_event(tmp_path / "a", event="end", reason="stopped by a signal", units=1)
    assert "1 stopped" in answer(server, "/body").read().decode()


def test_runs_are_read_when_somebody_looks_and_not_by_every_page(
    server: MonitorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[int]()
    original = RunIndex.update
    monkeypatch.setattr(RunIndex, "update", lambda self: read.append(1) or original(self))
    assert not read
    answer(server, "/body").read()
    assert len(read) == 1
    monkeypatch.setattr(server_module, "_POLL_S", 1e9)
    for path in ("/body", "/", "/body"):
        assert b"1 dead" in answer(server, path).read()
    assert len(read) == 1


def test_a_state_changes_without_an_event(
    server: MonitorServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed writes nothing."""
    monkeypatch.setattr(server_module, "_REFRESH_S", 0.0)
    with RunDirectory(tmp_path / "a").lock():
        assert "1 running" in answer(server, "/body").read().decode()
    assert "1 dead" in answer(server, "/body").read().decode()


def test_a_port_that_is_taken_is_refused(server: MonitorServer) -> None:
    for port in (server.server_port, 70_000):
        with pytest.raises(ConfigError, match="cannot be used"):
            MonitorServer(server.live, port)


def test_a_disconnect_prints_no_traceback(
    server: MonitorServer, capfd: pytest.CaptureFixture[str]
) -> None:
    others = threading.enumerate()  # those of kept connections do not end
    client = socket.create_connection(server.server_address[:2])
    client.sendall(b"GET / HT")
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()  # with a reset
    assert answer(server, "/").status == 200
    for thread in threading.enumerate():
        if "process_request" in thread.name and thread not in others:
            thread.join(5)
    assert capfd.readouterr().err == ""


def test_only_so_many_connections_have_a_thread(
    server: MonitorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_MAX_THREADS", threading.active_count())
    with pytest.raises((OSError, http.client.HTTPException)):
        answer(server, "/")
    monkeypatch.undo()
    assert answer(server, "/").status == 200
