"""The command as a process: start, signals, end; and that it does without torch."""

from __future__ import annotations

import fcntl
import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from fastlstm.cli import serve as command
from fastlstm.errors import ConfigError
from fastlstm.serve.settings import Settings
from served_process import Process, processes_of


@pytest.fixture(scope="module")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published run."""
    import torch

    from fastlstm.config import ModelConfig
    from fastlstm.data.tokenizer import CharTokenizer
    from fastlstm.nn.io import save_language_model
    from fastlstm.nn.language_model import LanguageModel
    from fastlstm.run_directory import RunDirectory

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
    said = [int(line.split()[1]) for line in server.lines if "log lines were dropped" in line]
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_texts_end_and_refuses_new_ones(start: Any, number: int) -> None:
    server = start("--grace", "60", "--max-tokens", "100000000")
    with httpx.Client(base_url=server.url, timeout=60) as client:
        body = {"prompt": "a", "max_tokens": 1_500_000, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            chunks = answer.iter_text()
            first = next(chunks)
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
        (["--api-key-file", str(latin)], r"latin: line 3 is not UTF-8; use keys"),
        (["--api-key-file", str(tmp_path / "none")], "cannot read"),
        (["--session-key-file", str(empty)], "the session key has 0 bytes"),
        (["--max-queue", "-1"], "--max-queue is -1"),
    ]:
        with pytest.raises(ConfigError, match=message):
            command.run([str(tmp_path), *flags])


@pytest.mark.parametrize("flag", ["--api-key-file", "--session-key-file"])
def test_keys_that_everyone_can_read_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    monkeypatch.setattr(command, "_serve_function", lambda: lambda *args: None)
    monkeypatch.setattr(command, "require_run", lambda _: None)
    file = tmp_path / "keys"
    file.write_text("0123456789abcdef\n")
    for mode, is_open in ((0o644, True), (0o604, True), (0o640, False), (0o600, False)):
        file.chmod(mode)
        assert command.run([str(tmp_path), flag, str(file)]) == 0
        warning = f"fastlstm: WARNING: every user of this machine can read {file};"
        assert capsys.readouterr().err == f"{warning} run: chmod 600 {file}\n" * is_open


def test_numpy_is_all_that_the_model_needs(run_path: Path) -> None:
    from fastlstm.infer.loading import load_decoder

    assert np.isfinite(load_decoder(run_path).decoder.nbytes)
