"""Runs every command that `fastlstm profile` and `fastlstm tune` print, verbatim, by `sh -c`.

usage: python campaigns/printed_commands.py RESULTS.jsonl [NAME...]
Paths have spaces, quotes and leading dashes, a text is read from standard input, columns of a table
have spaces. Every profile is one line with its commands and what failed; one that is there is not
repeated. A command that trains or tunes gets Ctrl-C as soon as it works; others run to
their end.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from process import make_text

from fastlstm.errors import EXIT_OK, EXIT_STOPPED

_COMMAND = re.compile(
    r"^(?:command)? +((?:fastlstm|env -u|OMP_NUM_THREADS=|python -c) ?.*)$", re.MULTILINE
)
_LIMIT_S = 120.0
_POLL_S = 0.1
_HEALTHY = (EXIT_OK, EXIT_STOPPED, 128 + signal.SIGINT, -signal.SIGINT)
FOLDER = 'it\'s a "test" of $HOME'
TEXT, DASHED, TABLE = 'Bob\'s "book" & notes.txt', "-dashed text.txt", "oil & gas.csv"
TARGET = 'oil temp,it\'s "hot"'
SMALL = (
    "--rnn-size 16 --embed-size 8 --seq-length 16 --precision fp32 --device cpu --cache-dir cache"
)
LARGE = "--rnn-size 512 --embed-size 64 --seq-length 32 --batch-size 8 --cache-dir cache"
PLANTED = "--steps 400 --threads 1 --batch-size 2 --eval-every 2 --checkpoint-every 2"
FORECASTER = "--horizon 4 --hidden-size 8 --input-size 16 --precision fp32 --cache-dir cache"
QUICK = "--measure 2s"
BUDGET = "--budget 10s --tune-time 90s --axes lr"
RUN = 'runs/Bob\'s "run"'
SUBJECTS: dict[str, str] = {
    "text": f"profile {shlex.quote(TEXT)} {SMALL} {PLANTED} {QUICK}",
    "text that begins with a dash": f"profile {SMALL} {PLANTED} {QUICK} -- '{DASHED}'",
    "text from standard input": f"profile - {SMALL} {PLANTED} {QUICK} < {shlex.quote(TEXT)}",
    "several texts": f"profile {shlex.quote(TEXT)} './{DASHED}' {SMALL} {PLANTED} {QUICK}"
    " --out '-my runs/x y'",
    "wide output": f"profile {shlex.quote(TEXT)} {SMALL} --vocab bpe --vocab-size 2000 --steps 400"
    f" --batch-size 32 {QUICK}",
    "text by a budget": f"profile {shlex.quote(TEXT)} --budget 1m --threads 1 --eval-every 5"
    f" --cache-dir cache {QUICK}",
    "text with a high rate": f"profile {shlex.quote(TEXT)} {SMALL} --steps 400 --batch-size 32"
    f" --optimizer adamw --learning-rate 0.2 {QUICK}",
    "run": f"profile {shlex.quote(RUN)} --threads 1 --eval-every 2 {QUICK}",
    "table": f"profile {shlex.quote(TABLE)} --target {shlex.quote(TARGET)} {FORECASTER} {PLANTED}"
    f" {QUICK}",
    "table with a target that begins with a dash": f"profile {shlex.quote(TABLE)} --target=-low"
    f" {FORECASTER} {PLANTED} {QUICK}",
    "table by counted evaluations": f"profile {shlex.quote(TABLE)} --target -low {FORECASTER}"
    f" --steps 400 --evaluations 200 --batch-size 2 {QUICK}",
    "run of a table": f"profile 'runs/-a table' --threads 1 --checkpoint-every 2 {QUICK}",
    "instruction set": f"profile {shlex.quote(TEXT)} {SMALL} --rnn-size 128 --steps 400 {QUICK}",
    "tune of a text": f"tune {shlex.quote(TEXT)} {SMALL} --out 'tuning/a b' {BUDGET}",
    "tune of a table": f"tune {shlex.quote(TABLE)} --target {shlex.quote(TARGET)} {FORECASTER}"
    f" --out '-tuning' {BUDGET}",
}  # fmt: skip
"""What is run, by name: the words behind `fastlstm`."""


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    ends_by_exception()
    run_all(Path(sys.argv[1]), sys.argv[2:], [])


def ends_by_exception() -> None:
    """Has SIGTERM end the campaign as Ctrl-C does: with all that it started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def run_all(path: Path, names: list[str], plants: list[dict[str, Any]]) -> None:
    """Appends one line for each profile that the file has not, and sums the file up.

    Args:
        path: of the file.
        names: of the subjects; empty for all.
        plants: rows with the commands of profiles that were made before.
    """
    known = {row["name"] for row in rows_of(path)}
    for plant in plants:
        if plant["name"] not in known and plant["commands"]:
            with tempfile.TemporaryDirectory(prefix="fastlstm-printed-") as parent:
                keep(path, plant["name"], tried(plant["commands"], Path(parent)))
    wanted = [n for n in SUBJECTS if n not in known and (not names or n in names)]
    if wanted:
        with tempfile.TemporaryDirectory(prefix="fastlstm-printed-") as parent:
            folder = Path(parent, FOLDER)
            make_subjects(folder)
            for name in wanted:
                keep(path, name, subject(name, folder))
    report(rows_of(path))


def keep(path: Path, name: str, commands: list[dict[str, str]]) -> None:
    """Appends a line; without a command there is none, and the next call tries again."""
    failed = [f"{one['command']}: {one['failure']}" for one in commands if one["failure"]]
    if commands:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, "commands": commands}) + "\n")
    print(f"{name}: {len(commands)} commands; {failed or 'all run'}", flush=True)


def tried(commands: list[str], folder: Path, data: bytes = b"") -> list[dict[str, str]]:
    """Runs commands and returns each with its failure; arguments as of `failure_of`."""
    return [{"command": c, "failure": failure_of(c, folder, data)} for c in commands]


def report(rows: list[dict[str, Any]]) -> None:
    """Prints how many of all commands run."""
    tried = [command for row in rows for command in row.get("commands", ())]
    failed = [command for command in tried if command["failure"]]
    print(f"{len(tried)} printed commands: {len(tried) - len(failed)} run verbatim")
    for command in failed:
        print(f"  {command['command']}: {command['failure']}")


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(t) for t in path.read_text("utf-8").splitlines()] if path.exists() else []


def make_subjects(folder: Path) -> None:
    """Writes the texts and the table, and trains a run of each."""
    folder.mkdir()
    make_text(folder / TEXT, 120_000)
    make_text(folder / DASHED, 60_000)
    lines = ['oil temp,"it\'s ""hot""",-low']
    lines += [f"{math.sin(t / 5):.4f},{math.cos(t / 7):.4f},{t % 24}" for t in range(1_500)]
    (folder / TABLE).write_text("\n".join(lines) + "\n")
    target = shlex.quote(TARGET)
    for command in (
        f"fastlstm train {shlex.quote(TEXT)} {LARGE} --steps 30 --out {shlex.quote(RUN)}",
        f"fastlstm train {shlex.quote(TABLE)} --target {target} {FORECASTER} --steps 30"
        " --out 'runs/-a table'",
    ):
        subprocess.run(["sh", "-c", command], cwd=folder, check=True, capture_output=True)


def subject(name: str, folder: Path) -> list[dict[str, str]]:
    """Profiles or tunes, runs the commands that are printed and returns what became of them."""
    command = f"fastlstm {SUBJECTS[name]}"
    environment = {"FASTLSTM_ISA": "scalar"} if name == "instruction set" else {}
    done = printed(command, folder, environment)
    if done.returncode:
        return [{"command": command, "failure": f"exit {done.returncode}: {done.stderr[-300:]}"}]
    return tried(commands_in(done.stdout), folder, (folder / TEXT).read_bytes())


def printed(
    command: str, folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", command], cwd=folder, env={**os.environ, **environment}, capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip


def commands_in(output: str) -> list[str]:
    """Returns the commands in what a verb printed, as they are printed."""
    return [match.group(1) for match in _COMMAND.finditer(output)]


@contextmanager
def started(
    command: str, folder: Path, data: bytes = b""
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """Starts a command by a shell; it ends with the block, all its processes with it."""
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as output:
        source.write(data)
        source.seek(0)
        process = subprocess.Popen(
            ["sh", "-c", command], cwd=folder, stdin=source, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=default_signals,
        )  # fmt: skip
        try:
            yield process, output
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
                try:
                    process.wait(30.0)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def default_signals() -> None:
    """Has Ctrl-C end a command though the campaign itself may run in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_until(process: subprocess.Popen[bytes], works: Callable[[], bool]) -> bool:
    """Waits until something holds; returns False where the process ended or took too long."""
    until = time.monotonic() + _LIMIT_S
    while time.monotonic() < until:
        if works():
            return True
        if process.poll() is not None:
            return False
        time.sleep(_POLL_S)
    return False


def failure_of(command: str, folder: Path, data: bytes = b"") -> str:
    """Runs a printed command; returns why it failed, or an empty text.

    Args:
        command: verbatim.
        folder: where it was printed.
        data: its standard input.
    """
    with started(command, folder, data) as (process, output):
        works = sign_of_work(command, folder, output)
        if works is None:
            wait_until(process, lambda: False)
        else:
            has_worked = wait_until(process, works)
            if has_worked and process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
                wait_until(process, lambda: False)
        status = process.poll()
        output.seek(0)
        said = output.read().decode(errors="replace").strip()
    if status is None:
        return f"not over after {_LIMIT_S:.0f} s: {said[-300:]}"
    has_ended = status == EXIT_OK or (works is not None and has_worked and status in _HEALTHY)
    if has_ended and said:
        return ""
    return f"exit {status}: {said[-300:] or 'it printed nothing'}"


def sign_of_work(command: str, folder: Path, output: IO[bytes]) -> Callable[[], bool] | None:
    """Returns what says that a command does its work; None for one that runs to its end."""
    words = shlex.split(command)
    verb = words[words.index("fastlstm") + 1] if "fastlstm" in words else ""
    if verb == "tune":
        return lambda: os.fstat(output.fileno()).st_size > 0
    if verb != "train":
        return None
    metrics = folder / words[len(words) - words[::-1].index("--out")] / "metrics.jsonl"
    return lambda: metrics.exists() and b'"event":"step"' in metrics.read_bytes()


if __name__ == "__main__":
    main()
