"""What the campaigns share: a small training run as a real process, and how to compare two runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from safetensors.numpy import load_file

SMALL = [
    *("--preset", "tiny", "--rnn-size", "64", "--embed-size", "32", "--dropout", "0.2"),
    *("--batch-size", "8", "--seq-length", "32", "--ema", "0.99", "--precision", "fp32"),
    *("--threads", "1", "--device", "cpu", "--tensorboard=false", "--sample-every", "0"),
]


def make_text(path: Path, characters: int) -> Path:
    """Writes an English-like text that any Python holds: the standard library's documentation."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    path.write_text((text * (1 + characters // len(text)))[:characters], encoding="utf-8")
    return path


def train_command(text: Path, run: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "fastlstm", "train", str(text), "--out", str(run), *SMALL, *flags]


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(command: list[str], timeout_s: float = 600) -> str:
    """Runs to the end; raises with the output when the exit code is not 0."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode != 0:
        raise SystemExit(
            f"exit {done.returncode}: {' '.join(command)}\n{done.stdout}\n{done.stderr}"
        )
    return done.stdout + done.stderr


def checkpoints(run: Path) -> list[Path]:
    """Returns the checkpoints, oldest first; a save under way has another name."""
    found = [p for p in run.glob("checkpoint-*") if p.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda p: int(p.name.split("-")[1]))


def newest_checkpoint(run: Path) -> Path:
    return checkpoints(run)[-1]


def differences(left: Path, right: Path) -> list[str]:
    """Returns the tensors of two checkpoints that are not equal bit for bit."""
    found = []
    for file in sorted(left.glob("*.safetensors")):
        a, b = load_file(file), load_file(right / file.name)
        names = a.keys() | b.keys()
        same = {n for n in a.keys() & b.keys() if a[n].tobytes() == b[n].tobytes()}
        found += [f"{file.name}:{name}" for name in sorted(names - same)]
    return found


def temporaries(run: Path) -> list[str]:
    return [
        p.name for p in run.rglob("*") if any(mark in p.name for mark in (".tmp", ".del-", ".old-"))
    ]
