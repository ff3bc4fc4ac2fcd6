"""What the campaigns share: a small training run as a real process, and how to compare two runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Literal, get_args

from safetensors.numpy import load_file

Kind = Literal["text", "forecaster", "sequence", "compressed"]
KINDS = get_args(Kind)

SMALL = [
    *("--preset", "tiny", "--rnn-size", "64", "--embed-size", "32", "--dropout", "0.2"),
    *("--batch-size", "8", "--seq-length", "32", "--ema", "0.99", "--precision", "fp32"),
    *("--threads", "1", "--device", "cpu", "--tensorboard=false", "--sample-every", "0"),
]

SMALL_SERIES = [
    *("--horizon", "12", "--input-size", "48", "--patch", "12", "--hidden-size", "32"),
    *("--dropout", "0.2", "--batch-size", "16", "--threads", "1", "--no-tensorboard"),
]

COMPRESSED = [
    *("--to", "int8", "--prune", "0.75", "--structured", "blocks", "--batch-size", "8"),
    *("--seq-length", "32", "--precision", "fp32", "--threads", "1", "--device", "cpu"),
    "--tensorboard=false",
]


def make_table(path: Path, num_rows: int) -> Path:
    """Writes hourly waves of three series, with some values missing."""
    import csv
    import datetime
    import math
    import random

    rng = random.Random(0)
    first = datetime.datetime(2020, 1, 1)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["unique_id", "ds", "y"])
        for series in range(3):
            for hour in range(num_rows):
                value = math.sin(hour * math.tau / 24) * (1 + series) + rng.gauss(0, 0.2)
                when = first + datetime.timedelta(hours=hour)
                shown = "" if rng.random() < 0.01 else f"{value:.4f}"
                rows.writerow([f"s{series}", when.isoformat(sep=" "), shown])
    return path


def make_text(path: Path, characters: int) -> Path:
    """Writes an English-like text that any Python holds: the standard library's documentation."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    path.write_text((text * (1 + characters // len(text)))[:characters], encoding="utf-8")
    return path


def make_source(kind: Kind, folder: Path) -> Path:
    """Returns what a run of this kind trains on; sequences are made by their own script.

    A compressed text model is made of a run, its own teacher.
    """
    if kind == "forecaster":
        return make_table(folder / "table.csv", 1_000)
    if kind == "sequence":
        return Path(__file__).with_name("sequence_run.py")
    text = make_text(folder / "text.txt", 120_000)
    if kind != "compressed":
        return text
    finish(train_command(text, folder / "source", "--steps", "100"))
    return folder / "source"


def train_command(source: Path, run: Path, *flags: str) -> list[str]:
    """A run on a text, on a table that `make_table` wrote, of a run, or by a script."""
    if source.suffix == ".py":
        return [sys.executable, str(source), "--out", str(run), *flags]
    if source.is_dir():
        command = [sys.executable, "-m", "fastlstm", "compress", str(source), "--out", str(run)]
        return [*command, "--distil", str(source), *COMPRESSED, *flags]
    small = SMALL_SERIES if source.suffix == ".csv" else SMALL
    command = [sys.executable, "-m", "fastlstm", "train", str(source), "--out", str(run)]
    return [*command, *small, *flags]


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
