"""Windows per second through the public loader, beside tf.data, Keras, torch and plain NumPy.

usage: python benchmarks/windows.py [--rounds 5]
       [--peer-python PATH]     an interpreter with tensorflow and keras
       [--results DIR]          default benchmarks/results/<machine>
Every pipeline is a process of its own, they take turns; medians. Beside them stands how fast this
machine copies memory. Stores one JSON line in windows.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from alternation import Worker, alternate
from machine import describe_machine, results_folder
from windows_worker import BATCH, BATCHES, COLUMNS, LENGTH, ROWS

from fastlstm.system import hardware


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-python")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    workers = []
    for name in BATCHES:
        needs_peer = name.startswith(("tf.data", "keras"))
        if needs_peer and options.peer_python is None:
            continue
        python = options.peer_python if needs_peer else sys.executable
        worker = str(Path(__file__).parent / "windows_worker.py")
        workers.append(Worker(name, [python, worker, name]))
    seconds = alternate(workers, options.rounds, 1)
    rates = {
        name: BATCHES[name] * BATCH / statistics.median(found) for name, found in seconds.items()
    }
    copy_gb_s = hardware.native().copy_gb_s(1, 64 << 20)
    own = rates["fastlstm"]
    for name, rate in rates.items():
        print(f"  {name:38} {rate:14,.0f} windows/s   {own / rate:8.1f}x slower than fastlstm")
    bytes_per_s = own * LENGTH * COLUMNS * 4
    print(
        f"  fastlstm copies {bytes_per_s / 1e9:.1f} GB/s; memory on one thread {copy_gb_s:.1f} GB/s"
    )
    result = {
        "machine": describe_machine(),
        "rows": ROWS, "columns": COLUMNS, "length": LENGTH, "batch": BATCH,
        "windows_per_s": rates,
        "copy_gb_s": copy_gb_s,
    }  # fmt: skip
    path = (options.results or results_folder()) / "windows.jsonl"
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
