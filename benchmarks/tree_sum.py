"""Sums over processes: the tree that keeps its order, beside gloo's all-reduce.

usage: python benchmarks/tree_sum.py [--processes 2,4] [--mib 1,4,16] [--results DIR]
Both run in turns in the same processes; a line is the median of rounds, milliseconds of the slowest
rank. Results: tree_sum.jsonl in DIR (benchmarks/results/<machine>).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
from machine import describe_machine, results_folder

_ROUNDS, _WARM_UP = 40, 5


def main() -> None:
    if os.environ.get("RANK"):
        work([int(word) for word in sys.argv[1].split(",")])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--processes", default="2,4")
    parser.add_argument("--mib", default="1,4,16")
    parser.add_argument("--results")
    options = parser.parse_args()
    path = Path(options.results or results_folder()) / "tree_sum.jsonl"
    for num in options.processes.split(","):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={num}", __file__, options.mib]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                row = {**json.loads(line), "machine": describe_machine()}
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(line)


def work(sizes: list[int]) -> None:
    """Times both in one of the processes; rank 0 prints."""
    from torch import distributed

    from fastlstm.distributed.joining import joined

    torch.set_num_threads(1)
    with joined() as world:
        for mib in sizes:
            flat = torch.zeros(mib << 18)
            tree, report = world.reduction(flat), torch.zeros(8, dtype=torch.float64)
            seconds: dict[str, list[float]] = {"tree": [], "gloo": []}
            for _ in range(_ROUNDS + _WARM_UP):
                for name in seconds:
                    distributed.barrier()
                    began = time.perf_counter()
                    if name == "tree":
                        tree(report)
                    else:
                        distributed.all_reduce(flat)
                    took = torch.tensor(time.perf_counter() - began)
                    distributed.all_reduce(took, distributed.ReduceOp.MAX)
                    seconds[name].append(float(took))
            if world.is_leader:
                ms = {name: 1e3 * median(each[_WARM_UP:]) for name, each in seconds.items()}
                ratio = ms["tree"] / ms["gloo"]
                print(json.dumps({"processes": world.size, "mib": mib, **ms, "ratio": ratio}))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
