"""`fastlstm serve` as a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path


class Process:
    """`fastlstm serve` as a user starts it."""

    def __init__(self, path: Path, *flags: str, code: str = "", **variables: str) -> None:
        start = [sys.executable, "-m", "fastlstm"]
        if code:
            start = [sys.executable, "-c", code]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("FASTLSTM_API")}
        self.process = subprocess.Popen(
            [*start, "serve", str(path), "--port", "0", *flags],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, **variables},
        )
        self.lines: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if match := re.search(r"at (http://\S+?)/ ", line):
                self.url = match[1].replace("0.0.0.0", "127.0.0.1")
                break

    def metric(self, name: str) -> float:
        text = urllib.request.urlopen(f"{self.url}/metrics").read().decode()
        found = re.search(rf"^fastlstm_{name} (.*)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def end(self, number: int = signal.SIGTERM) -> int:
        if number:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=60)
        self.lines += err.splitlines()
        self.output = out
        return self.process.returncode


def processes_of(path: Path) -> Iterator[Callable[..., Process]]:
    """Yields what starts servers of a run; what still runs in the end is killed."""
    started: list[Process] = []

    def begin(*flags: str, **more: str) -> Process:
        started.append(Process(path, *flags, **more))
        return started[-1]

    yield begin
    for one in started:
        with one.process:  # which closes the pipes, also of a server that has ended by itself
            one.process.kill()
