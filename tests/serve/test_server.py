"""`fastlstm serve` as a process: start, signals, end, imports."""

import fcntl
import json
import signal
import socket
import time

import httpx
import pytest

from fastlstm.errors import ConfigError
from fastlstm.serve.server import Listener, _listen
from fastlstm.serve.settings import Settings
from running_server import raw_request, wait_until
from served_process import Process, processes_of


@pytest.fixture(scope="module")
def run_path(tmp_path_factory):
    """A published run."""
    from stored_run import publish  # which needs torch

    return publish(tmp_path_factory.mktemp("served") / "book")


@pytest.fixture
def start(run_path):
    yield from processes_of(run_path)


@pytest.mark.parametrize("blocks", [True, False])
def test_an_unread_log_blocks_no_answer(start, blocks):
    code = f"""
import os, sys
from fastlstm.cli.main import main
from fastlstm.serve import log
log.MAX_LINES = 100
os.set_blocking(2, {blocks})
sys.exit(main(sys.argv[1:]))
"""
    server = start(code=code)
    fcntl.fcntl(server.process.stderr.fileno(), fcntl.F_SETPIPE_SZ, 4096)
    with httpx.Client(base_url=server.url, timeout=20) as client:
        for _ in range(500):
            assert client.get("/health/live").status_code == 200
        dropped = server.metric("log_dropped_total")
    assert dropped > 200
    assert server.end() == 0
    told = [line.split()[1] for line in server.lines if "log lines dropped" in line]
    said = [int(number.replace(",", "")) for number in told]
    num_lines = sum(line.startswith("{") for line in server.lines)
    assert num_lines + sum(said) == 501, "every request is logged or counted"


def test_a_request_is_answered_without_torch(start):
    code = """
import sys
from fastlstm.cli.main import main
code = main(sys.argv[1:])
print(code, [name for name in ("torch", "matplotlib", "jax") if name in sys.modules])
import threading
print([thread.name for thread in threading.enumerate() if thread is not threading.main_thread()])
"""
    server = start(code=code)
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 5})
    assert len(answer.json()["choices"][0]["text"]) == 5
    assert server.end() == 0
    assert server.output.splitlines() == ["0 []", "[]"]
    request_lines = [line for line in server.lines if line.startswith("{")]
    assert [json.loads(line)["status"] for line in request_lines] == [200]


@pytest.mark.usefixtures("hang_up_at_default")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_texts_end_and_refuses_new_ones(start, number):
    server = start("--grace", "60", "--max-tokens", "100000000")
    with httpx.Client(base_url=server.url, timeout=60) as client:
        body = {"prompt": "a", "max_tokens": 1_500_000, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            chunks = answer.iter_text()
            first = next(chunks)
            for _ in range(1 + (number == signal.SIGHUP)):  # the shell sends it too
                server.process.send_signal(number)
            end_s = time.monotonic() + 30
            while httpx.get(f"{server.url}/health/ready").status_code != 503:
                assert time.monotonic() < end_s
            assert httpx.get(f"{server.url}/health/live").status_code == 200
            refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 503
            rest = first + "".join(chunks)
    assert rest.endswith("data: [DONE]\n\n")
    assert server.end(0) == 0


def test_after_the_grace_texts_get_a_last_event(start):
    server = start("--grace", "0.3", "--max-tokens", "1000000000")
    body = {"prompt": "a", "max_tokens": 1_000_000_000, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        chunks = answer.iter_text()
        next(chunks)
        server.process.send_signal(signal.SIGTERM)
        start_s = time.monotonic()
        rest = "".join(chunks)
        assert time.monotonic() - start_s < 20
    last = rest.strip().split("\n\n")[-1]
    assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert server.end(0) == 0


QUICK_FLUSH = """
import sys
from fastlstm.cli.main import main
from fastlstm.serve import server
server._FLUSH_S = 0.3
sys.exit(main(sys.argv[1:]))
"""


def test_a_signal_while_a_body_arrives(start):
    server = start("--grace", "0.3")
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 30) as client:
        client.sendall(raw_request("/v1/completions", b"{" * 100)[:-99])
        wait_until(lambda: server.metric("queue_depth") == 1)
        server.process.send_signal(signal.SIGTERM)
        answer = b""
        while part := client.recv(4096):
            answer += part
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"shutting down" in answer
    assert server.end(0) == 0
    assert not any("Traceback" in line or "running task" in line for line in server.lines)


def test_a_signal_while_a_client_does_not_read(start):
    server = start("--grace", "0.1", "--max-tokens", "1000000000", code=QUICK_FLUSH)
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "a", "max_tokens": 1_000_000_000, "stream": True})
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.sendall(raw_request("/v1/completions", body.encode()))
        assert client.recv(12) == b"HTTP/1.1 200"
        written = -1.0
        while written != (now := server.metric("tokens_written_total")):
            written = now
            time.sleep(0.5)
        assert server.end() == 0
    assert not any("Traceback" in line or "running task" in line for line in server.lines)
    assert [json.loads(one)["outcome"] for one in server.lines if '"POST"' in one] == ["cancelled"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_grace_and_more_change_nothing(start, number):
    server = start("--grace", "1000", "--max-tokens", "1000000000", code=QUICK_FLUSH)
    body = {"prompt": "a", "max_tokens": 1_000_000_000, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        chunks = answer.iter_text()
        next(chunks)
        for _ in range(5):
            server.process.send_signal(number)
            time.sleep(0.02)
        assert "shutting down" in "".join(chunks)
    assert server.end(0) == 0


def test_a_public_address_without_a_key_gives_a_warning(start):
    server = start("--host", "0.0.0.0")
    assert any("WARNING" in line and "no API key" in line for line in server.lines)
    assert server.end() == 0
    quiet = start("--host", "0.0.0.0", "--api-key", "k")
    assert not any("WARNING" in line for line in quiet.lines)


def test_the_error_of_a_failed_start_is_one_line(run_path, tmp_path):
    missing = Process(tmp_path / "nothing")
    assert missing.end(0) == 2
    assert len(missing.lines) == 1
    first = Process(run_path)
    port = first.url.rpartition(":")[2]
    second = Process(run_path, "--port", port)
    assert second.end(0) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in second.lines[0]
    assert first.end() == 0


@pytest.mark.parametrize("host", ["a..b", "x" * 64, "caf\udce9"])
def test_a_host_that_is_no_name_is_refused(host):
    with pytest.raises(ConfigError, match=r"cannot listen on .*; choose another --host"):
        _listen(Settings(host=host))


def test_connections_closed_by_their_clients_are_dropped_at_accept():
    """One that has sent its request is answered, even if it sends nothing more."""
    with Listener() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        for _ in range(3):
            socket.create_connection(listener.getsockname()).close()
        with pytest.raises(BlockingIOError):
            listener.accept()
        socket.create_connection(listener.getsockname()).close()
        with (
            socket.create_connection(listener.getsockname()) as silent,
            socket.create_connection(listener.getsockname()) as asking,
        ):
            asking.sendall(b"GET")
            asking.shutdown(socket.SHUT_WR)
            for client in (silent, asking):
                connection, address = listener.accept()
                connection.close()
                assert address == client.getsockname()
