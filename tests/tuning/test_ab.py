"""Real processes, all of them short."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from fastlstm.cli.ab import rows, verdict_text
from fastlstm.cli.main import main
from fastlstm.errors import CommandError, ConfigError
from fastlstm.tuning import ab
from fastlstm.tuning.ab import Comparison, Pair, compare_commands
from fastlstm.tuning.command import Command, parse_command
from fastlstm.tuning.paired_times import LOOKS, Estimate, Verdict
from fastlstm.tuning.process import MeasuredProcess, StepWorker, run_whole, stop_all

TRAIN = (
    f"{sys.executable} -m fastlstm train {{}} --preset tiny --rnn-size 16 --embed-size 8"
    " --batch-size 2 --seq-length 8 --precision fp32 --threads 1 --device cpu --steps 50"
)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files, which has to be empty at the end, and a cache."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("FASTLSTM_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


def test_a_planted_difference_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ab", "--a", "sleep 0.01", "--b", "sleep 0.04", "--max-time", "20s"]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "verdict", "B / A", "measured", "pairs", "noise",
    ]  # fmt: skip
    assert "B is slower than A, by about" in lines[0]
    assert "seconds of the whole command" in lines[2]


def test_json_has_all_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["ab", "--a", "sleep 0.05", "--b", "sleep 0.01", "--max-time", "20s", "--json"]
    assert main(argv) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["verdict"] == "not slower"
    assert facts["found"]["high"] < 1
    assert len(facts["pairs"]) == facts["found"]["pairs"] + facts["found"]["dropped"]
    assert len(facts["pairs"]) in LOOKS
    assert facts["pairs"][0].keys() == {"a", "b", "group"}
    assert facts["machine"]["cores"] >= 1


def test_too_little_time_is_undecided(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ab", "--a", "sleep 0.1", "--b", "sleep 0.1", "--max-time", "1s"]) == 4
    assert "undecided: needs more pairs" in capsys.readouterr().out


def test_no_block_in_time() -> None:
    with pytest.raises(CommandError, match=r"no block of four turns fitted into 0\.5 s"):
        compare_commands("sleep 0.2", "sleep 0.2", max_time_s=0.5)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("sh -c 'echo first >&2; echo last >&2; exit 7'", "B failed with exit status 7"),
        ("sh -c 'kill -9 $$'", "B was killed by SIGKILL"),
        ("sh -c 'kill -40 $$'", "B was killed by signal 40"),
        ("sleep 9", "B took longer than 1 s and was stopped"),
    ],
)
def test_a_command_that_fails(
    command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ab", "--a", "true", "--b", command, "--max-time", "1s"]) == 1
    said = capsys.readouterr().err
    assert message in said
    if "exit status" in message:
        assert said.splitlines()[1:] == ["  first", "  last"]


@pytest.mark.parametrize("detect", ["0", "-1%", "x", "200%", "nan"])
def test_detect_is_checked(detect: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ab", "--a", "true", "--b", "true", f"--detect={detect}"]) == 2
    assert "--detect is" in capsys.readouterr().err


def test_a_stopped_command_leaves_no_process(tmp_path: Path) -> None:
    pids = tmp_path / "pid"
    command = parse_command("A", f"sleep 60 & echo $! > {pids}; wait")
    with pytest.raises(CommandError, match="took longer"):
        run_whole(command, 0.3)
    assert not is_running(int(pids.read_text()))


@pytest.mark.usefixtures("hang_up_at_default")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_process(tmp_path: Path, number: int) -> None:
    pids = tmp_path / "pid"
    text = f"echo $$ > {pids}; sleep 60"
    argv = [sys.executable, "-m", "fastlstm", "ab", "--a", text, "--b", "true"]
    process = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not (pids.exists() and pids.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, number)
    assert process.wait(20) == 128 + number
    assert not is_running(int(pids.read_text()))


def test_a_signal_while_the_clock_starts_is_not_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It once left a thread behind that the interpreter waited --max-time for."""
    start, started = threading.Timer.start, list[threading.Timer]()

    def interrupted(timer: threading.Timer) -> None:
        start(timer)
        started.append(timer)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Timer, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_whole(parse_command("A", "sleep 9"), 60)
    started[0].join(10)
    assert not started[0].is_alive()


def test_standard_error_takes_no_disk(temporary: Path) -> None:
    """A file for it grew without bounds; only its end is kept."""
    text = "i=0; while [ $i -lt 2000 ]; do echo xxxxxxxxx >&2; i=$((i+1)); done"
    with pytest.raises(CommandError) as caught:
        run_whole(parse_command("A", f"{text}; ls -l /proc/self/fd/2 >&2; exit 1"), 60)
    *_, last = caught.value.lines()
    assert "pipe:" in last
    assert len(caught.value.lines()) == 9


def test_workers_end_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each was waited for in turn: Ctrl-C took 10 s."""
    closed, stopped = list[int](), list[int]()
    close, stop = MeasuredProcess.close_pipes, MeasuredProcess.stop

    def closing(process: MeasuredProcess) -> None:
        closed.append(process.pid)
        close(process)

    def stopping(process: MeasuredProcess) -> None:
        stopped.append(len(set(closed)))
        stop(process)

    monkeypatch.setattr(MeasuredProcess, "close_pipes", closing)
    monkeypatch.setattr(MeasuredProcess, "stop", stopping)
    command = parse_command("A", "cat")
    for _ in range(2):
        MeasuredProcess(command, command.argv, 60, is_worker=True)
    stop_all()
    assert stopped == [2, 2]


def test_a_process_in_a_session_of_its_own_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pids = tmp_path / "pid"
    text = f"setsid sleep 60 & echo $! > {pids}; exit 7"
    assert main(["ab", "--a", text, "--b", "true"]) == 1
    pid = int(pids.read_text())
    try:
        assert f"left these processes running: sleep (pid {pid})" in capsys.readouterr().err
    finally:
        os.kill(pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    """Whether a process, which may have been killed just now, goes on."""
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_alive(pid)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_training_steps(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    """Workers of a made-up speed: times are per token, two blocks for each pair of workers."""

    class Worker:
        made: ClassVar[list[str]] = []

        def __init__(self, command: Command, folder: str, limit_s: float) -> None:
            assert list(Path(folder).iterdir()) == []
            self.made.append(command.name)
            self._units = {"A": 100, "B": 300}[command.name]

        def ready(self) -> str:
            return "tokens"

        def step(self, count: int) -> list[tuple[float, int]]:
            return [(0.1, self._units)] * (count - 1) + [(9.0, self._units)]

    monkeypatch.setattr(ab, "StepWorker", Worker)
    monkeypatch.setattr(ab, "stop_all", lambda: Worker.made.append("stopped"))
    monkeypatch.setattr(ab, "LOOKS", (6, 8))
    found = compare_commands("fastlstm train a", "fastlstm train b", max_time_s=60)
    assert found.measured == "seconds per 1,000 tokens in training steps, median step of a turn"
    assert [pair.group for pair in found.pairs] == [0] * 4 + [1] * 4
    for pair in found.pairs:
        assert (pair.a, pair.b) == (pytest.approx(1.0), pytest.approx(1 / 3))
    assert Worker.made == [*["A", "B", "stopped"] * 2, "stopped"]
    assert list(temporary.iterdir()) == []


def test_tokens_and_windows_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepWorker, "__init__", lambda self, command, *_: vars(self).update(
        unit={"A": "tokens", "B": "windows"}[command.name]))  # fmt: skip
    monkeypatch.setattr(StepWorker, "ready", lambda self: self.unit)
    monkeypatch.setattr(StepWorker, "stop", lambda self: None)
    with pytest.raises(ConfigError, match="A counts tokens and B windows"):
        compare_commands("fastlstm train a", "fastlstm train b")


def test_a_worker_takes_the_steps_of_the_run(text: Path, tmp_path: Path) -> None:
    command = parse_command("A", TRAIN.format(text) + f" --out {tmp_path}/mine")
    worker = StepWorker(command, str(tmp_path), 600)
    try:
        assert worker.ready() == "tokens"
        assert [units for _, units in worker.step(3)] == [2 * 8] * 3
        lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        assert {event["event"] for event in events} <= {"start", "step", "message"}
        assert not (tmp_path / "mine").exists()
    finally:
        worker.stop()


def test_a_worker_that_cannot_start(tmp_path: Path) -> None:
    failing = Command("A", "it", (), ("sh", "-c", "echo no such text >&2; exit 2"))
    worker = StepWorker(failing, str(tmp_path), 600)
    with pytest.raises(CommandError, match="A failed with exit status 2: it") as caught:
        worker.ready()
    worker.stop()
    assert caught.value.lines()[-1] == "no such text"


def test_detect_of_the_function_is_a_share() -> None:
    with pytest.raises(ConfigError, match="detect is 3, expected a share above 0, at most 1"):
        compare_commands("true", "true", detect=3)


def test_a_ratio_without_an_interval_claims_none() -> None:
    found = Estimate(1.0, 0.0, float("inf"), 12, 0, 1, 0.1)
    result = Comparison(
        "a",
        "b",
        0.03,
        "seconds",
        found,
        Verdict.UNDECIDED,
        None,
        (Pair(1.0, 1.0, 0),),
        1.0,
        None,
        {},
    )
    assert dict(rows(result))["B / A"] == "1.000, no interval yet"
    sure = replace(result, found=replace(found, low=0.9, high=1.1))
    assert dict(rows(sure))["B / A"] == "1.000 (0.900 to 1.100), 95 % interval over all looks"


def test_more_pairs_than_are_taken_are_not_asked_for() -> None:
    found = Estimate(1.0, 0.9, 1.1, 192, 0, 96, 0.1)
    result = Comparison(
        "a", "b", 0.03, "seconds", found, Verdict.UNDECIDED, 1608, (), 1.0, None, {}
    )
    assert "about 1,608 pairs, and at most 192 are taken; give a larger --detect" in (
        verdict_text(result)
    )
    assert verdict_text(replace(result, needed=96)).endswith("about 96 pairs, or a quieter machine")
