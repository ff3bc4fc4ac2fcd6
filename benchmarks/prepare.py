"""A large table from Parquet and CSV into the cache, and training on it: speed and memory.

usage: python benchmarks/prepare.py [--rows 100000000] [--csv-rows 10000000] [--folder DIR]
       [--results DIR]     default benchmarks/results/<machine>
The table is made first: 1,000 series of five float32 columns and a time each minute, written with
Parquet's defaults. Every reading is a process of its own; its peak of anonymous memory is sampled
(what the kernel keeps of files does not count). Training takes 300 steps of 64 windows of 336 + 24
rows, H = 256, on the table from Parquet. Stores one JSON line in prepare.jsonl.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from machine import describe_machine, results_folder
from pyarrow import csv
from pyarrow import parquet as pq

NUM_SERIES = 1000
WATCH = """
import json, sys, threading, time
def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))
peak = anonymous()
def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.02)
threading.Thread(target=watch, daemon=True).start()
begin = time.perf_counter()
"""
READ = """
from fastlstm.forecast.data.dataset import prepare_table
from fastlstm.forecast.data.roles import RoleRequest
imported = time.perf_counter()
roles = RoleRequest(target=("y0", "y1", "y2", "y3", "y4"))
found = prepare_table(sys.argv[1], request=roles, cache_dir=sys.argv[2])
end = time.perf_counter()
print(json.dumps({"rows": found.table.num_rows, "seconds": end - imported, "start_s": end - begin,
                  "from_cache": found.from_cache, "peak_anonymous_bytes": peak,
                  "windows": len(found.table.segments), "notes": found.notes}))
"""
TRAIN = """
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.train import train_forecaster
config = ForecastConfig(horizon=24, input_size=336, target=("y0", "y1", "y2", "y3", "y4"),
                        steps=300, batch_size=64, evaluations=2, cache_dir=sys.argv[2])
starts = []
def observe(event):
    if event["event"] == "start":
        starts.append(time.perf_counter() - begin)
found = train_forecaster(sys.argv[1], config, observers=[observe])
done = found.fitted
print(json.dumps({"rows": found.dataset.table.num_rows, "start_s": starts[0],
                  "windows": done.units, "train_s": done.train_s, "seconds": done.seconds,
                  "input_wait_share": done.input_wait_share, "peak_anonymous_bytes": peak}))
"""


def make(rows: int, parquet: Path | None, plain: Path | None) -> None:
    """Writes the table series by series; nothing of it is held."""
    per_series = rows // NUM_SERIES
    minutes = np.arange(per_series).astype("timedelta64[m]") + np.datetime64("2000-01-01", "us")
    rng = np.random.default_rng(0)
    wave = np.sin(np.arange(per_series, dtype=np.float32) * (2 * np.pi / 1440))
    writer: Any = None
    for number in range(NUM_SERIES):
        noise = rng.standard_normal((5, per_series), dtype=np.float32)
        names = pa.DictionaryArray.from_arrays(
            pa.array(np.zeros(per_series, dtype=np.int32)), [f"sensor-{number:04}"]
        )
        columns = {f"y{c}": wave * (c + 1) + noise[c] for c in range(5)}
        table = pa.table({"unique_id": names.cast(pa.string()), "ds": minutes, **columns})
        if writer is None:
            target = parquet or plain
            kind = pq.ParquetWriter if parquet is not None else csv.CSVWriter
            writer = kind(target, table.schema)
        writer.write_table(table)
    writer.close()


def run(script: str, path: Path, cache: Path) -> dict[str, Any]:
    command = [sys.executable, "-c", WATCH + script, str(path), str(cache)]
    found: dict[str, Any] = json.loads(subprocess.check_output(command, text=True))
    return found


def train(path: Path, cache: Path) -> dict[str, Any]:
    found = run(TRAIN, path, cache)
    print(
        f"  training: first step after {found['start_s']:.1f} s, {found['windows']:,} windows in"
        f" {found['train_s']:.1f} s, input wait {found['input_wait_share']:.2%},"
        f" anonymous {found['peak_anonymous_bytes'] / 1e6:.0f} MB",
        flush=True,
    )
    return found


def read(path: Path, cache: Path) -> dict[str, Any]:
    found = run(READ, path, cache)
    rate = found["rows"] / found["seconds"]
    print(
        f"  {path.name:12} {found['rows']:12,} rows  {found['seconds']:7.2f} s"
        f"  {rate / 1e6:6.2f} M rows/s"
        f"  start {found['start_s']:.2f} s  anonymous {found['peak_anonymous_bytes'] / 1e6:.0f} MB",
        flush=True,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--csv-rows", type=int, default=10_000_000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        result: dict[str, Any] = {"machine": describe_machine()}
        for kind, rows in (("parquet", options.rows), ("csv", options.csv_rows)):
            path = folder / f"table.{kind}"
            make(rows, path if kind == "parquet" else None, path if kind == "csv" else None)
            print(f"{kind}: {rows:,} rows, {path.stat().st_size / 1e9:.2f} GB")
            result[kind] = {
                "bytes": path.stat().st_size,
                "first": read(path, folder / "cache"),
                "second": read(path, folder / "cache"),
            }
            if kind == "parquet":
                result["train"] = train(path, folder / "cache")
            path.unlink()
    results = options.results or results_folder()
    with (results / "prepare.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
