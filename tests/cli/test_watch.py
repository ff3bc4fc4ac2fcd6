from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from fastlstm.cli import watch
from fastlstm.cli.main import main
from fastlstm.monitor import alert_delivery

NAME = "a'; touch planted; $(touch planted)\x1b[2J"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one run whose process is gone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(watch, "_EVERY_S", 0.01)
    run = tmp_path / "runs" / NAME
    run.mkdir(parents=True)
    (run / ".lock").write_text("1\n")
    (run / "metrics.jsonl").write_text('{"event":"start"}\n{"event":"step","loss":1.5}\n')
    return tmp_path / "runs"


def test_a_dead_run_is_told_once_and_by_the_exit_status(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(runs), "--once"]) == 3
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1
    assert "error (dead): no process writes this run any more" in out
    assert "\x1b" not in out
    assert main(["watch", str(runs), "--once", "--rule", "nan"]) == 0


def test_a_locked_run_is_alive(runs: Path) -> None:
    with (runs / NAME / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main(["watch", str(runs), "--once"]) == 0


def test_a_command_gets_the_alert_and_no_name_is_executed(runs: Path) -> None:
    command = 'cat > stdin.json; printf %s "$FASTLSTM_ALERT_RUN" > run'
    assert main(["watch", str(runs / NAME), "--once", "--exec", command]) == 3
    alert = json.loads(Path("stdin.json").read_text())
    assert (alert["rule"], alert["run"]) == ("dead", str(runs / NAME))
    assert Path("run").read_text() == alert["run"]
    assert "planted" not in os.listdir()


def test_a_command_that_fails_is_told(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(runs), "--once", "--exec", "exit 7"]) == 3
    assert "--exec ended with exit status 7" in capsys.readouterr().err


def test_a_web_address_gets_the_alert_again_until_it_is_taken(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alert_delivery, "_RETRIES_S", (0.0, 0.0))
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(503 if len(received) == 1 else 204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/"
        assert main(["watch", str(runs), "--once", "--webhook", url]) == 3
    finally:
        server.shutdown()
        server.server_close()
    assert [alert["rule"] for alert in received] == ["dead", "dead"]


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("file:///etc/passwd", "scheme"),
        ("nonsense", "scheme"),
        ("hush-hush:hooks/services", "scheme"),
        ("http://", "host"),
        ("http://[::1", "host"),
        ("http://host:99999", "port"),
        ("https://host:0/hush-hush", "port"),
        ("https://me:hush-hush/services", "port"),
    ],
)
def test_an_address_that_is_none_is_refused(
    runs: Path, url: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(runs), "--once", "--webhook", url]) == 2
    error = capsys.readouterr().err
    assert f"--webhook has no valid {part}, expected an address as https://host/path" in error
    assert "hush-hush" not in error


def test_no_directory_is_an_error(tmp_path: Path) -> None:
    assert main(["watch", str(tmp_path / "none")]) == 2


def test_watching_ends_with_the_run(runs: Path) -> None:
    with (runs / NAME / "metrics.jsonl").open("a") as file:
        file.write('{"event":"end"}\n')
    assert main(["watch", str(runs / NAME)]) == 0


def test_a_webhook_that_answers_garbage_is_told(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(alert_delivery, "_RETRIES_S", ())
    with socket.create_server(("127.0.0.1", 0)) as server:

        def garbage() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"no http\r\n\r\n")

        threading.Thread(target=garbage, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        assert main(["watch", str(runs), "--once", "--webhook", url]) == 3
    assert "did not take an alert (no http" in capsys.readouterr().err


def test_a_command_that_takes_too_long_is_ended_with_what_it_started(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(alert_delivery, "_TIMEOUT_S", 0.5)
    command = "sleep 60 & echo $! > pid; wait"
    assert main(["watch", str(runs), "--once", "--exec", command]) == 3
    assert "--exec was ended" in capsys.readouterr().err
    state = Path("/proc", Path("pid").read_text().strip(), "stat")
    for _ in range(200):  # it was killed; the kernel ends it when it gets a core
        try:
            if state.read_text().split()[2] in "ZX":
                return
        except OSError:
            return
        time.sleep(0.05)
    pytest.fail("the command goes on")


def test_a_run_that_is_removed_ends_the_watching(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs / NAME
    looks = iter(range(10))

    def sleep(seconds: float) -> None:
        del seconds
        if next(looks) == 4:
            shutil.rmtree(run)

    monkeypatch.setattr(watch.time, "sleep", sleep)
    assert main(["watch", str(run)]) == 0
    captured = capsys.readouterr()
    assert "over (dead)" in captured.out
    assert "was removed" in captured.err


def test_a_directory_that_vanishes_while_runs_are_looked_for(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = runs / NAME / "checkpoint-5"
    gone.mkdir()
    scandir = os.scandir

    def remove_first(path: str) -> Any:
        if str(path) == str(gone) and gone.exists():
            gone.rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", remove_first)
    assert main(["watch", str(runs), "--once"]) == 3
    assert not gone.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_of_an_alert(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """SIGTERM left it running, Ctrl-C waited half a minute for it."""
    monkeypatch.setattr(watch, "_INTERRUPTED_S", 0.1)
    monkeypatch.setattr(alert_delivery, "_TIMEOUT_S", 600.0)
    pids = tmp_path / "pid"
    command = f"echo $$ > {pids}.new; mv {pids}.new {pids}; exec sleep 600"

    def interrupt() -> None:
        deadline = time.monotonic() + 30
        while not pids.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        watch.run([str(runs), "--exec", command])
    deadline = time.monotonic() + 10
    place = Path(f"/proc/{pids.read_text().strip()}/stat")
    while place.exists() and ") Z " not in place.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not place.exists() or ") Z " in place.read_text()
