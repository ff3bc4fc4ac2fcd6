"""Reading /metrics: what is no server of fastlstm, or none of a text, is said in one line."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from fastlstm.errors import CommandError, UsageError
from fastlstm.tuning import server_metrics
from fastlstm.tuning.server_load import ServerLoad
from fastlstm.tuning.server_metrics import Reading, ServerClient, change

GOOD = r"""# HELP fastlstm_requests_total Requests
fastlstm_requests_total{code="200"} 3.0
fastlstm_requests_total{code="429"} 1.0
fastlstm_tokens_written_total 40.0
fastlstm_engine_seconds_total{phase="model"} 1.5
fastlstm_engine_seconds_total{phase="idle"} 2.5e+01
fastlstm_engine_seconds_total{phase="output"} 0.0
fastlstm_engine_seconds_total{phase="blocked"} 0.0
fastlstm_text_seconds_total{phase="queue"} 4.0
fastlstm_text_seconds_total{phase="model"} 0.0
fastlstm_text_seconds_total{phase="output"} 0.0
fastlstm_text_seconds_total{phase="client"} 0.0
fastlstm_http_seconds_total{phase="parse"} 0.0
fastlstm_http_seconds_total{phase="encode"} 0.0
fastlstm_http_seconds_total{phase="other"} 0.0
fastlstm_http_seconds_total{phase="idle"} 0.0
fastlstm_request_seconds_total 0.0
fastlstm_send_wait_seconds_total 0.0
fastlstm_model_info{name="a \"b} \\ c",hash="ab",weights="int8",ABOUT} 1.0
python_info{version="3"} 1.0
fastlstm_broken nothing
""".replace("ABOUT", 'threads="auto",threads_used="1",max_streams="4",max_queue="8"')


@pytest.fixture
def answer() -> Iterator[Callable[..., ServerClient]]:
    """Starts servers that answer everything alike."""
    servers: list[HTTPServer] = []

    def start(text: str = GOOD, status: int = 200, key: str = "", **headers: str) -> ServerClient:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                seen.append(dict(self.headers.items()))
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args: object) -> None:
                del args

        seen: list[dict[str, str]] = []
        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        client = ServerClient(f"http://127.0.0.1:{servers[-1].server_port}/", key)
        client.seen = seen  # type: ignore[attr-defined]
        return client

    yield start
    for one in servers:
        one.shutdown()
        one.server_close()


def test_counters_are_summed_and_phases_kept_apart(answer: Callable[..., ServerClient]) -> None:
    found = answer().read()
    assert found.totals["requests"] == 4.0
    engine = {"model": 1.5, "idle": 25.0, "output": 0.0, "blocked": 0.0}
    assert found.phases["engine_seconds"] == engine
    assert (found.model["name"], found.model["weights"]) == ('a "b} \\ c', "int8")
    assert "broken" not in found.totals


def test_the_key_is_sent_to_the_server_only(answer: Callable[..., ServerClient]) -> None:
    target = answer()
    client = answer(status=302, key="secret", Location=f"{target.url}/metrics")
    with pytest.raises(UsageError, match="answered 302"):
        client.read()
    assert client.seen[0]["Authorization"] == "Bearer secret"  # type: ignore[attr-defined]
    assert target.seen == []  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "status", "key", "said"),
    [
        ("", 401, "", "it is missing: give --api-key-file"),
        ("", 401, "k", "it is wrong"),
        ("", 404, "", "answered 404"),
        ("<html>", 200, "", "of another program"),
        ("fastlstm_requests_total 1.0\n", 200, "", "older fastlstm"),
        (GOOD.replace("fastlstm_model_info", "other"), 200, "", "serves no text model"),
        ("x" * (5 << 20), 200, "", "of another program"),
        (GOOD.replace("tokens_written", "other"), 200, "", "is damaged or of another version"),
        (GOOD.replace('phase="client"', 'phase="x"'), 200, "", "is damaged or of another version"),
        (GOOD.replace(" 0.0", " NaN"), 200, "", "is damaged or of another version"),
        (GOOD.replace(" 0.0", " 1e308"), 200, "", "is damaged or of another version"),
        (GOOD.replace('hash="ab",', ""), 200, "", "is damaged or of another version"),
        (GOOD.replace('streams="4"', 'streams="x"'), 200, "", "is damaged or of another version"),
        (GOOD.replace('hash="ab"', 'hash="\0"'), 200, "", "is damaged or of another version"),
    ],
)
def test_what_cannot_be_profiled_is_said(
    answer: Callable[..., ServerClient], text: str, status: int, key: str, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        answer(text, status, key).read()


@pytest.mark.parametrize(
    "url",
    ["ftp://127.0.0.1", "http://", "http://h:port", "http://h/metrics", "http://u@h", "http://h?a"],
)
def test_a_url_that_is_none_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="expected one such as"):
        ServerClient(url)


def test_a_key_that_no_header_can_have_is_refused() -> None:
    with pytest.raises(UsageError, match="no header"):
        ServerClient("http://127.0.0.1:1", "a\nb")


def test_nothing_there_is_said(answer: Callable[..., ServerClient]) -> None:
    with pytest.raises(UsageError, match=r"no answer at .*fastlstm serve RUN"):
        ServerClient("http://127.0.0.1:9").read()


def serve_bytes(send: Callable[[socket.socket], None]) -> int:
    """Answers every connection by a function, until the test process ends; returns the port."""
    server = socket.create_server(("127.0.0.1", 0))

    def work() -> None:
        while True:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                send(connection)

    threading.Thread(target=work, daemon=True).start()
    return int(server.getsockname()[1])


def test_a_server_that_never_ends_its_answer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_metrics, "_TIMEOUT_S", 0.3)

    def drip(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
        for _ in range(50):
            connection.sendall(b"x")
            time.sleep(0.1)

    with pytest.raises(UsageError, match=r"no answer at .*timed out"):
        ServerClient(f"http://127.0.0.1:{serve_bytes(drip)}").read()


@pytest.mark.parametrize("line", [b"x" * 200_000, b"HTTP/1.1 " + b"9" * 5000])
def test_clients_go_on_where_the_answer_is_no_http(line: bytes) -> None:
    port = serve_bytes(lambda connection: connection.sendall(line + b"\r\n\r\n"))
    with ServerLoad(ServerClient(f"http://127.0.0.1:{port}"), 1) as load:
        end_s = time.monotonic() + 10.0
        while load.answers[0] < 2 and time.monotonic() < end_s:
            time.sleep(0.02)
    assert load.answers[0] >= 2


@pytest.mark.parametrize("host", ["192.0.2.1", "[2001:db8::1]", "0.0.0.0"])
def test_only_this_machine_is_driven(host: str) -> None:
    with pytest.raises(UsageError, match="this machine only"):
        ServerLoad(ServerClient(f"http://{host}:8000"), 2)


def test_this_machine_is_driven_by_any_of_its_names() -> None:
    for host in ("127.0.0.1", "127.1.2.3", "[::1]"):
        ServerLoad(ServerClient(f"http://{host}:8000"), 2)


def reading(tokens: float, model_s: float, name: str = "a") -> Reading:
    totals = {"tokens_written": tokens}
    return Reading(0.0, totals, {"engine_seconds": {"model": model_s}}, {"name": name})


def test_a_server_that_was_started_anew_is_noticed() -> None:
    assert change(reading(1, 1.0), reading(5, 3.0))[1] == {"engine_seconds": {"model": 2.0}}
    for later in (reading(0, 3.0), reading(5, -3.0), reading(5, 3.0, "b")):
        with pytest.raises(CommandError, match="started anew"):
            change(reading(1, 1.0), later)
