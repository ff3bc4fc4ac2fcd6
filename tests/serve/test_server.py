"""The command as a process: start, signals, end; and that it does without torch."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from fastlstm.cli import serve as command
from fastlstm.errors import ConfigError
from fastlstm.serve.server import Listener
from fastlstm.serve.settings import Settings
from served_process import Process, processes_of


@pytest.fixture(scope="module")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published run."""
    import torch

    from fastlstm.runs.run_directory import RunDirectory
    from fastlstm.text.config import ModelConfig
    from fastlstm.text.data.tokenizer import CharTokenizer
    from fastlstm.text.files import save_language_model
    from fastlstm.text.model import LanguageModel

    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(vocab_size=4, embed_size=8, rnn_size=16))
    run = RunDirectory(tmp_path_factory.mktemp("served") / "book")
    run.create()
    run.publish(save_language_model(model, CharTokenizer("\n abc"[1:]), train={}))
    return run.path


@pytest.fixture
def start(run_path: Path) -> Iterator[Any]:
    yield from processes_of(run_path)


@pytest.mark.parametrize("blocks", [True, False])
def test_a_log_that_nobody_reads_stops_no_answer(start: Any, blocks: bool) -> None:
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
        text = client.get("/metrics").text
    (dropped,) = re.findall(r"^fastlstm_log_dropped_total (.*)$", text, re.MULTILINE)
    assert float(dropped) > 200
    assert server.end() == 0
    said = [
        int(line.split()[1].replace(",", ""))
        for line in server.lines
        if "log lines dropped" in line
    ]
    num_lines = sum(line.startswith("{") for line in server.lines)
    assert num_lines + sum(said) == 501, "every request is logged or counted"


def test_a_request_is_answered_without_torch(start: Any) -> None:
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
def test_a_signal_lets_texts_end_and_refuses_new_ones(start: Any, number: int) -> None:
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


def test_after_the_grace_texts_get_a_last_event(start: Any) -> None:
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


def test_a_second_signal_leaves_out_the_grace(start: Any) -> None:
    server = start("--grace", "1000", "--max-tokens", "1000000000")
    body = {"prompt": "a", "max_tokens": 1_000_000_000, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        chunks = answer.iter_text()
        next(chunks)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGINT)
        assert "shutting down" in "".join(chunks)
    assert server.end(0) == 0


QUICK_FLUSH = """
import sys
from fastlstm.cli.main import main
from fastlstm.serve import server
server._FLUSH_S = 0.3
sys.exit(main(sys.argv[1:]))
"""


def test_a_signal_while_a_body_comes(start: Any) -> None:
    server = start("--grace", "0.3")
    host, port = server.url.removeprefix("http://").split(":")
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection((host, int(port)), 30) as client:
        client.sendall(f"{head}content-length: 100\r\n\r\n{{".encode())
        while "queue_depth 1.0" not in httpx.get(f"{server.url}/metrics").text:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        answer = b""
        while part := client.recv(4096):
            answer += part
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"shutting down" in answer
    assert server.end(0) == 0
    assert not any("Traceback" in line or "running task" in line for line in server.lines)


def test_a_signal_while_a_client_takes_nothing(start: Any) -> None:
    server = start("--grace", "0.1", "--max-tokens", "1000000000", code=QUICK_FLUSH)
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "a", "max_tokens": 1_000_000_000, "stream": True})
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        assert client.recv(12) == b"HTTP/1.1 200"
        written = -1.0
        while written != (now := metric(server, "tokens_written_total")):
            written = now
            time.sleep(0.5)
        assert server.end() == 0
    assert not any("Traceback" in line or "running task" in line for line in server.lines)
    assert [json.loads(one)["outcome"] for one in server.lines if '"POST"' in one] == ["cancelled"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_more_signals_change_nothing(start: Any, number: int) -> None:
    server = start("--grace", "0", "--max-tokens", "1000000000", code=QUICK_FLUSH)
    body = {"prompt": "a", "max_tokens": 1_000_000_000, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        chunks = answer.iter_text()
        next(chunks)
        for _ in range(5):
            server.process.send_signal(number)
            time.sleep(0.02)
        assert "shutting down" in "".join(chunks)
    assert server.end(0) == 0


def metric(server: Process, name: str) -> float:
    found = re.search(f"^fastlstm_{name} (.*)$", httpx.get(f"{server.url}/metrics").text, re.M)
    return float(found[1]) if found else 0.0


def test_keys_come_from_flag_file_and_environment(start: Any, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("from-file\n\nsecond\n")
    server = start("--api-key", "given", "--api-key-file", str(file), FASTLSTM_API_KEY="from-env")
    url = f"{server.url}/v1/models"
    for key in ("given", "from-file", "second", "from-env"):
        assert httpx.get(url, headers={"authorization": f"Bearer {key}"}).status_code == 200
    assert httpx.get(url).status_code == 401
    assert server.end() == 0


def test_a_public_address_without_a_key_is_warned_of(start: Any) -> None:
    server = start("--host", "0.0.0.0")
    assert any("WARNING" in line and "no API key" in line for line in server.lines)
    assert server.end() == 0
    quiet = start("--host", "0.0.0.0", "--api-key", "k")
    assert not any("WARNING" in line for line in quiet.lines)


def test_what_cannot_be_served_is_one_line(run_path: Path, tmp_path: Path) -> None:
    missing = Process(tmp_path / "nothing")
    assert missing.end(0) == 2
    assert len(missing.lines) == 1
    first = Process(run_path)
    port = first.url.rpartition(":")[2]
    second = Process(run_path, "--port", port)
    assert second.end(0) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in second.lines[0]
    assert first.end() == 0


@pytest.mark.parametrize("flag", ["max_streams", "stall", "port", "max_body", "watchdog"])
def test_settings_have_bounds(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')} is -1"):
        Settings(**{flag: -1})  # type: ignore[arg-type]


def test_keys_that_are_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    latin = tmp_path / "latin"
    latin.write_bytes(b"good\n\nk\xe9y\n")
    for flags, message in [
        (["--api-key", ""], "an API key is empty"),
        (["--api-key", "a b"], "an API key is empty or has blanks"),
        (["--api-key-file", str(empty)], "has no key"),
        (["--api-key-file", str(latin)], r"latin: line 3 is not UTF-8; make a key with"),
        (["--api-key-file", str(tmp_path / "none")], "cannot read"),
        (["--session-key-file", str(empty)], "the session key has 0 bytes"),
        (["--max-queue", "-1"], "--max-queue is -1"),
    ]:
        with pytest.raises(ConfigError, match=message):
            command.run([str(tmp_path), *flags])


@pytest.mark.parametrize("flag", ["--api-key-file", "--session-key-file"])
def test_keys_that_everyone_can_read_are_warned_of(
    run_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flag: str,
) -> None:
    monkeypatch.setattr(command, "_serve_function", lambda: lambda *args: None)
    monkeypatch.setattr(command, "require_run", lambda _: None)
    file = tmp_path / "keys"
    file.write_text("0123456789abcdef\n")
    for mode, is_open in ((0o644, True), (0o604, True), (0o640, False), (0o600, False)):
        file.chmod(mode)
        assert command.run([str(run_path), flag, str(file)]) == 0
        warning = f"fastlstm: WARNING: every user of this machine can read {file};"
        assert capsys.readouterr().err == f"{warning} run: chmod 600 {file}\n" * is_open


def test_a_session_key_of_any_bytes_is_taken_from_the_environment(
    run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[bytes] = []
    monkeypatch.setattr(command, "_serve_function", lambda: lambda *args: given.append(args[3]))
    key = b"\xe9\xff" + b"k" * 30
    monkeypatch.setitem(os.environb, b"FASTLSTM_SESSION_KEY", key)
    assert command.run([str(run_path)]) == 0
    assert given == [key]


def test_numpy_is_all_that_the_model_needs(run_path: Path) -> None:
    from fastlstm.text.loading import load_decoder

    assert np.isfinite(load_decoder(run_path).decoder.nbytes)


def test_connections_of_clients_that_have_gone_are_not_set_up() -> None:
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
