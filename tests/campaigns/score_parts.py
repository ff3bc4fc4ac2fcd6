"""Scores a table in parts whose processes are killed at random; the merged file must be the same.

    python tests/campaigns/score_parts.py FOLDER [SERIES] [PARTS] [KILLS] [WORKERS] [SEED]

By default 400,000 series of 25 rows (10^7 rows, of which 10^7 are forecast), 64 parts by two
workers, and 20 SIGKILLs, each after a time drawn evenly from that of a part. A killed part is
started again until it is done. Then all parts are started once more (they are there), merged, and
compared with the file that one process wrote; the same with an evaluation of the training table.
A line of JSON per result: seconds of the wall clock, peak of resident memory in MB.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet as pq

ROWS = HORIZON = 25
TRAIN = [
    *("--horizon", str(HORIZON), "--input-size", "24", "--patch", "8", "--hidden-size", "32"),
    *("--steps", "50", "--threads", "1", "--no-tensorboard", "--split", "60/20/20"),
]


def main() -> None:
    folder = Path(sys.argv[1])
    given = [int(text) for text in sys.argv[2:]]
    series, parts, kills, workers, seed = (*given, *(400_000, 64, 20, 2, 0)[len(given) :])
    folder.mkdir(parents=True, exist_ok=True)
    os.environ |= {"FASTLSTM_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    table, small = folder / "table.parquet", folder / "small.parquet"
    make_table(table, series, ROWS)
    make_table(small, 300, 200)
    run = folder / "run"
    if not run.exists():
        one(["train", small, "--out", run, *TRAIN])
    score = ["forecast", run, table, "--out"]
    show("prepare", one(["forecast", run, table, "--out", folder / "cold.parquet"]))
    for suffix in (".parquet", ".csv", ".arrow"):
        show(f"one process {suffix}", one([*score, folder / f"one{suffix}"]))
    rng = random.Random(seed)
    lone = one([*score, folder / "lone", "--shard", f"0/{parts}"])
    show("one part", lone)
    began = time.monotonic()
    commands = [command(*score, folder / "parts", "--shard", f"{n}/{parts}") for n in range(parts)]
    rng.shuffle(commands)
    pool = Pool(commands, workers, kills, 0.9 * lone["seconds"], rng)
    show("parts", {"seconds": time.monotonic() - began, **pool.result})
    began = time.monotonic()
    Pool(commands, workers, 0, 0.0, rng)
    show("parts that are there", {"seconds": time.monotonic() - began})
    equal = [compare(folder, suffix) for suffix in (".parquet", ".csv", ".arrow")]
    equal.append(evaluation(folder, run, small))
    left = [path.name for path in (folder / "parts").iterdir() if path.name.startswith(".")]
    print(f"{sum(equal)} of {len(equal)} merged results equal; {pool.result}; left over: {left}")


def make_table(path: Path, num_series: int, num_rows: int) -> None:
    """Hourly waves around a level per series, written 20,000 series at a time."""
    if path.exists():
        return
    rng, writer = np.random.default_rng(0), None
    hours = np.arange(num_rows)
    times = hours.astype("timedelta64[h]") + np.datetime64("2024-01-01", "us")
    for first in range(0, num_series, 20_000):
        count = min(20_000, num_series - first)
        level = rng.normal(size=(count, 1)) * 5
        y = level + np.sin(hours * (2 * np.pi / 24)) + 0.1 * rng.normal(size=(count, num_rows))
        names = np.repeat([f"store-{first + n:06d}" for n in range(count)], num_rows)
        columns = {"unique_id": names, "ds": np.tile(times, count), "y": y.reshape(-1)}
        rows = pa.table({**columns, "y": pa.array(columns["y"].astype(np.float32))})
        writer = writer or pq.ParquetWriter(path, rows.schema)
        writer.write_table(rows)
    assert writer is not None
    writer.close()


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "fastlstm", *map(str, arguments)]


def one(arguments: Sequence[object]) -> dict[str, Any]:
    """Runs a command to its end; returns its seconds and peak memory."""
    began = time.monotonic()
    process = subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"{arguments} ended with {status}")
    return {"seconds": time.monotonic() - began, "peak_mb": usage.ru_maxrss // 1024}


class Pool:
    """Runs commands by several workers, some killed; each command until it has ended well."""

    def __init__(
        self, commands: list[list[str]], workers: int, kills: int, span: float, rng: random.Random
    ) -> None:
        self._todo, self._lock, self._rng, self._span = deque(commands), threading.Lock(), rng, span
        self._kills = kills
        self._started = self._killed = self._peak = 0
        self._errors: list[str] = []
        threads = [threading.Thread(target=self._work) for _ in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise SystemExit(self._errors[0])
        self.result = {"started": self._started, "killed": self._killed, "peak_mb": self._peak}

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._todo or self._errors:
                    return
                left = self._kills - self._killed
                is_doomed = self._rng.random() < left / len(self._todo)
                chosen = self._todo.popleft()
                self._started += 1
                wait = self._rng.uniform(0.0, self._span)
            process = subprocess.Popen(chosen, stdout=subprocess.DEVNULL)
            timer = threading.Timer(wait, process.kill)
            if is_doomed:
                timer.start()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            timer.cancel()
            with self._lock:
                self._peak = max(self._peak, usage.ru_maxrss // 1024)
                if process.returncode == -9:
                    self._killed += 1
                    self._todo.append(chosen)
                elif process.returncode != 0:
                    self._errors.append(f"{chosen} ended with {process.returncode}")


def compare(folder: Path, suffix: str) -> bool:
    """Merges the parts and compares the file with that of one process."""
    out = folder / f"merged{suffix}"
    taken = one(["merge", folder / "parts", "--out", out])
    is_equal = digest(out) == digest(folder / f"one{suffix}")
    show(f"merge {suffix}", {**taken, "bytes": out.stat().st_size, "is_equal": is_equal})
    return is_equal


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def evaluation(folder: Path, run: Path, table: Path) -> bool:
    """Evaluates in eight parts; returns whether the figures are those of one process."""
    found = []
    for number in range(8):
        one(["evaluate", run, table, "--out", folder / "sums", "--shard", f"{number}/8"])
    for arguments in (["evaluate", run, table], ["merge", folder / "sums"]):
        asked = command(*arguments, "--json")
        found.append(subprocess.run(asked, capture_output=True, check=True).stdout)
    show("evaluation", {"is_equal": found[0] == found[1]})
    return found[0] == found[1]


def show(what: str, values: dict[str, Any]) -> None:
    rounded = {k: round(v, 2) if isinstance(v, float) else v for k, v in values.items()}
    print(json.dumps({"what": what, **rounded}), flush=True)


if __name__ == "__main__":
    main()
