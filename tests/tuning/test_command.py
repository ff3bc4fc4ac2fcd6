from __future__ import annotations

import sys

import pytest

from fastlstm.errors import ConfigError
from fastlstm.tuning.command import STEP_WORKER, parse_command
from fastlstm.tuning.process import with_run_directory

PYTHON = sys.executable
SHELL = ("/bin/sh", "-c")


@pytest.mark.parametrize(
    ("text", "argv"),
    [
        ("sleep 1", ("sleep", "1")),
        ("echo 'a | b' \"c > d\" e\\&f", ("echo", "a | b", "c > d", "e&f")),
        ("X=1 sleep 1", ("env", "X=1", "sleep", "1")),
        ("sleep 1 | cat", (*SHELL, "sleep 1 | cat")),
        ("sleep $TIME", (*SHELL, "sleep $TIME")),
        ('echo "$HOME"', (*SHELL, 'echo "$HOME"')),
        ("cat *.txt", (*SHELL, "cat *.txt")),
    ],
)
def test_only_what_needs_a_shell_gets_one(text: str, argv: tuple[str, ...]) -> None:
    assert parse_command("A", text).argv == argv


@pytest.mark.parametrize(
    ("text", "training"),
    [
        (f"{PYTHON} -m fastlstm train a.txt", (PYTHON, "-m", STEP_WORKER, "a.txt")),
        (
            f"nice -n 5 {PYTHON} -m fastlstm train a --threads 1",
            ("nice", "-n", "5", PYTHON, "-m", STEP_WORKER, "a", "--threads", "1"),
        ),
        (f"X=1 {PYTHON} -m fastlstm train a", ("env", "X=1", PYTHON, "-m", STEP_WORKER, "a")),
        (f"{PYTHON} -m fastlstm train '*.txt'", (PYTHON, "-m", STEP_WORKER, "*.txt")),
        (f"{PYTHON} -m fastlstm train a > log", None),
        (f"{PYTHON} -m fastlstm train --help", None),
        (f"{PYTHON} -m fastlstm evaluate run a", None),
        ("echo fastlstm train a", None),
        ("sleep 1", None),
    ],
)
def test_training_runs_are_seen(text: str, training: tuple[str, ...] | None) -> None:
    assert parse_command("A", text).training == training


def test_fastlstm_without_a_path_is_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    command = parse_command("B", "fastlstm train a.txt")
    assert command.argv == (PYTHON, "-m", "fastlstm", "train", "a.txt")
    assert command.training == (PYTHON, "-m", STEP_WORKER, "a.txt")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a is empty"),
        ("echo 'a", "no closing quotation"),
        ("no-such-program-here 1", "there is no program 'no-such-program-here'"),
        (f"{PYTHON} -m fastlstm train a --resume", "A is a training run with resume"),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_command("A", text)


def test_the_last_out_is_the_temporary_one() -> None:
    assert with_run_directory(["a", "--out", "x"], "t") == ["a", "--out", "x", "--out", "t"]
    assert with_run_directory(["--out=x", "--", "-a"], "t") == ["--out=x", "--out", "t", "--", "-a"]
