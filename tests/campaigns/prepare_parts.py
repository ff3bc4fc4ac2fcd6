"""Prepares a table in parts whose processes are killed at random; the cache entry must be the same.

    python tests/campaigns/prepare_parts.py FOLDER [FILES] [ROWS] [PARTS] [KILLS] [WORKERS] [SEED]

By default 64 CSV files of 156,250 rows (10^7 in all), 8 parts by two workers, and 4 SIGKILLs, each
after a time drawn evenly from that of a part. Hourly rows of stores, a file for each day of all of
them, so that every series is spread over all files; some values are missing, some hours as well.
A line of JSON per result: seconds of the wall clock, peak of resident memory in MB.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import csv
from score_parts import Pool, command, digest, one, show

HOURS = 25


def main() -> None:
    folder = Path(sys.argv[1])
    given = [int(text) for text in sys.argv[2:]]
    files, rows, parts, kills, workers, seed = (*given, *(64, 156_250, 8, 4, 2, 0)[len(given) :])
    table, asked = folder / "sales", ["--gaps", "fill"]
    make_files(table, files, rows // HOURS)
    caches = {name: folder / name for name in ("one", "joined")}
    prepare = ["prepare", table, *asked]
    show("one process", one([*prepare, "--cache-dir", caches["one"]]))
    lone = one([*prepare, "--out", folder / "lone", "--shard", f"0/{parts}"])
    show("one part", lone)
    began, rng = time.monotonic(), random.Random(seed)
    place = folder / "parts"
    commands = [command(*prepare, "--out", place, "--shard", f"{n}/{parts}") for n in range(parts)]
    rng.shuffle(commands)
    pool = Pool(commands, workers, kills, 0.9 * lone["seconds"], rng)
    size = sum(path.stat().st_size for path in place.iterdir())
    show("parts", {"seconds": time.monotonic() - began, **pool.result, "bytes": size})
    began = time.monotonic()
    Pool(commands, workers, 0, 0.0, rng)
    show("parts that are there", {"seconds": time.monotonic() - began})
    show("merge", one(["merge", place, "--cache-dir", caches["joined"]]))
    found = [entries(cache) for cache in caches.values()]
    left = [path.name for path in place.iterdir() if path.name.startswith(".")]
    show("equal", {"is_equal": found[0] == found[1], "files": len(found[0]), "left": len(left)})


def make_files(table: Path, num_files: int, num_stores: int) -> None:
    """Each file has 25 hours of all stores; one value in 100 is missing, and one row."""
    if table.exists():
        return
    table.mkdir(parents=True)
    rng = np.random.default_rng(0)
    names = np.repeat([f"store-{n:05d}" for n in range(num_stores)], HOURS)
    for number in range(num_files):
        hours = np.tile(np.arange(HOURS) + HOURS * number, num_stores)
        times = hours.astype("timedelta64[h]") + np.datetime64("2024-01-01", "s")
        units = rng.poisson(20, len(hours)).astype(np.float64)
        units[rng.random(len(hours)) < 0.01] = np.nan
        price = np.round(rng.uniform(1, 99, len(hours)), 2)
        kept = rng.random(len(hours)) > 0.01
        columns = {"unique_id": names, "ds": times, "y": units, "price": price}
        arrays = {
            name: pa.array(values[kept], from_pandas=True) for name, values in columns.items()
        }
        csv.write_csv(pa.table(arrays), table / f"{number:05d}.csv")


def entries(cache: Path) -> dict[str, str]:
    """Returns the SHA-256 of a cache's files by name, which has the key."""
    paths = sorted(path for path in (cache / "series" / "entries").rglob("*") if path.is_file())
    return {str(path.relative_to(cache)): digest(path) for path in paths}


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
