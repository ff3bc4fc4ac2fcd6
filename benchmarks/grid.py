"""The drop-in layer against torch's nn.LSTM over a grid of sizes: where is it faster, where not?

usage: python benchmarks/grid.py [--rounds 3] [--max-gflop 200] [--only TEXT] [--list]
       [--results DIR]     default benchmarks/results/<machine>
Forward and backward on dense float input, I = H, float32 and bf16 (both under the same autocast):
every H x B x T with one layer, and 3 layers, both directions and both together at H 64, 256, 512,
B 8, 64, T 100. Forward alone (no_grad, eval) at B=1, T 1 and 100, every H. Cells beyond
--max-gflop are left out and named; with 200 the whole takes about 8 minutes on a machine that does
200 GFLOP/s in float32.

Both layers take turns in one process, round by round; memory is the C library's default, as in a
user's script. A sample lasts 2 ms or more. One JSON line per cell in grid.jsonl: medians, the 20th
and 80th percentile, torch's time by ours as `ratio`. A cell that computes something else than torch
is not timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import layer_step
import torch
from layer_step import Cell
from layer_tables import grid_lines
from machine import describe_machine, results_folder
from rates import torch_has_bf16

import fastlstm

HIDDEN, BATCHES, STEPS = (32, 64, 128, 256, 512, 1024), (1, 8, 32, 64, 128, 256), (1, 10, 100, 1000)
STACKS = ((3, 1), (1, 2), (3, 2))
SAMPLE_S = 2e-3
QUICK_S = 0.25
"""Cells get more rounds until both layers have run this long."""
MAX_ROUNDS = 15


class Job(NamedTuple):
    """A cell in a dtype and a mode, "train" or "infer"."""

    cell: Cell
    dtype: str
    mode: str

    def __str__(self) -> str:
        return f"{self.cell} {self.dtype} {self.mode}"

    @property
    def flop(self) -> float:
        return self.cell.flop if self.mode == "train" else self.cell.flop / 3


def jobs() -> list[Job]:
    dtypes = ("fp32", "bf16") if torch_has_bf16() else ("fp32",)
    cells = [Cell(*sizes) for sizes in itertools.product(HIDDEN, BATCHES, STEPS)]
    for H, B, (L, D) in itertools.product((64, 256, 512), (8, 64), STACKS):
        cells.append(Cell(H, B, 100, L, D))
    found = [Job(cell, dtype, "train") for cell in cells for dtype in dtypes]
    for H, T, dtype in itertools.product(HIDDEN, (1, 100), dtypes):
        found.append(Job(Cell(H, 1, T), dtype, "infer"))
    return found


@cache
def red(cell: Cell, dtype: str) -> str:
    """Returns why cells like this, of any length, may not be timed, or nothing."""
    what, distance = layer_step.gate(cell, dtype)
    limit = layer_step.LIMITS[dtype]
    return "" if distance <= limit else f"{what} is {distance:.1e} from torch's, allowed {limit}"


def measure(job: Job, min_rounds: int) -> dict[str, Any]:
    x, dy = layer_step.inputs(job.cell, job.dtype)
    layers = layer_step.build(job.cell)
    steps: dict[str, layer_step.Step] = {}
    for name, layer in layers.items():
        if job.mode == "train":
            steps[name] = layer_step.training_step(layer, x, dy, job.dtype)
        else:
            steps[name] = layer_step.inference_step(layer, x.detach(), job.dtype)
    warm = {name: layer_step.warm_up(step, SAMPLE_S) for name, step in steps.items()}
    total = sum(seconds * repeats for seconds, repeats in warm.values())
    rounds = max(min_rounds, min(MAX_ROUNDS, math.ceil(QUICK_S / total)))
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            seconds[name].append(layer_step.seconds_of(step, warm[name][1]))
    with layer_step.autocast(job.dtype), torch.set_grad_enabled(job.mode == "train"):
        kernel = fastlstm.explain(layers["fastlstm"], T=job.cell.T, B=job.cell.B)[0]
    median = {name: statistics.median(found) for name, found in seconds.items()}
    return {
        "cell": job.cell._asdict(),
        "dtype": job.dtype,
        "mode": job.mode,
        "median_s": median,
        "p20_p80_s": {name: _spread(found) for name, found in seconds.items()},
        "ratio": median["torch"] / median["fastlstm"],
        "flop": job.flop,
        "rounds": rounds,
        "kernel": f"{kernel.backend}, {kernel.kernel}",
        "machine": describe_machine(),
    }


def _spread(seconds: list[float]) -> list[float]:
    if len(seconds) < 2:
        return seconds * 2
    cuts = statistics.quantiles(seconds, n=5, method="inclusive")
    return [cuts[0], cuts[-1]]


def choose(max_gflop: float, only: str) -> list[Job]:
    """Returns what is measured and prints what is not."""
    asked = [job for job in jobs() if only in str(job)]
    skipped = [job for job in asked if job.cell.flop > max_gflop * 1e9]
    for cell in dict.fromkeys(job.cell for job in skipped):
        print(f"skipped, {cell.flop / 1e9:.0f} GFLOP a step: {cell}")
    print(
        f"{len(skipped)} of {len(asked)} measurements skipped (a cell and a dtype each): more than"
        f" {max_gflop:g} GFLOP"
    )
    return [job for job in asked if job not in skipped]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-gflop", type=float, default=200)
    parser.add_argument("--only", default="", help="cells whose name has this, as 'H64 B8 '")
    parser.add_argument("--list", action="store_true", help="name the cells, measure nothing")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    chosen = choose(options.max_gflop, options.only)
    if options.list:
        print("\n".join(map(str, chosen)))
        return
    path = (options.results or results_folder()) / "grid.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows, failures = [], []
    for job in chosen:
        reason = red(layer_step.shortened(job.cell), job.dtype)
        if reason:
            failures.append(f"not measured, {job}: {reason}")
            print(failures[-1], flush=True)
            continue
        row = measure(job, options.rounds)
        rows.append(row)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        shown = ", ".join(f"{name} {s * 1e3:.3f} ms" for name, s in row["median_s"].items())
        print(f"{job}: {shown}, {row['ratio']:.2f}x", flush=True)
    print("\n".join(["", *grid_lines(rows)]))
    if failures:
        sys.exit(f"{len(failures)} cells compute something else than torch; no speed for them")


if __name__ == "__main__":
    main()
