"""How the cost of one layer grows with H, B, T, threads and layers.

usage: python benchmarks/growth.py [--rounds 5] [--threads N] [--only AXIS] [--max-gflop 2000]
       [--base H,B,T]      default 512,64,100
       [--results DIR]     default benchmarks/results/<machine>
Forward and backward of the drop-in layer on dense float input, I = H, float32 and bf16 in turn.
Each axis is swept alone around the base (one layer, --threads N, default every core). Freed memory
is kept in the process, as in `fastlstm.train`.

Per point one JSON line per dtype in growth.jsonl: median seconds, the operations needed, and what
bounds them, measured in the same run on as many threads: `ceiling_gflops` of the matrix product
(B, H, 4H), which is a step's, and `large_gflops` of `ceilings.GEMM_SHAPE`. The first counts a call
of torch per product, so that small layers may pass it; the second cannot be passed by much.
Memory is measured in a further step:
- kept_bytes: the tensors that autograd really saved, each memory once, without x, the weights and
  y, which the caller holds anyway (saved_tensors_hooks);
- peak_bytes: the most that torch's allocator held at once above the step's start, results and
  gradients included (torch.profiler); a few KB of scratch per thread in the kernels are not seen.
formula_bytes is what docs/kernels.md states for kept_bytes, T*B*(4H*e + 4H) per layer with H padded
to whole vectors, and T*B*H*e for each output between two layers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import layer_step
import torch
from layer_step import Cell
from machine import describe_machine, results_folder
from torch import nn

from fastlstm.nn.lstm import LSTM
from fastlstm.ops.kernels import kernel_table
from fastlstm.system import ceilings, hardware

DTYPES = {"fp32": 4, "bf16": 2}


class Point(NamedTuple):
    """One layer's sizes and the threads it runs on."""

    H: int
    B: int
    T: int
    threads: int
    L: int

    @property
    def cell(self) -> Cell:
        return Cell(self.H, self.B, self.T, self.L)


def axes(cores: int) -> dict[str, tuple[int, ...]]:
    """Returns the values of every axis."""
    return {
        "H": (32, 64, 128, 256, 512, 1024, 2048),
        "B": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
        "T": (1, 3, 10, 30, 100, 300, 1000),
        "threads": tuple(range(1, cores + 1)),
        "L": (1, 2, 3, 4),
    }


def measure(point: Point, rounds: int) -> dict[str, dict[str, Any]]:
    """Returns what was measured, per dtype; the dtypes take turns."""
    torch.set_num_threads(point.threads)
    layer = LSTM(point.H, point.H, point.L)
    steps, seconds = {}, {}
    for dtype in DTYPES:
        steps[dtype] = layer_step.training_step(layer, *layer_step.inputs(point.cell, dtype), dtype)
        seconds[dtype] = []
    repeats = {dtype: layer_step.warm_up(step, 2e-3)[1] for dtype, step in steps.items()}
    for _ in range(rounds):
        for dtype, step in steps.items():
            seconds[dtype].append(layer_step.seconds_of(step, repeats[dtype]))
    found = {}
    for dtype in DTYPES:
        ceiling = gemm_gflops(dtype, point.threads, (point.B, point.H, 4 * point.H))
        found[dtype] = {
            "median_s": statistics.median(seconds[dtype]),
            "seconds": seconds[dtype],
            "flop": point.cell.flop,
            "ceiling_gflops": ceiling,
            "large_gflops": gemm_gflops(dtype, point.threads, ceilings.GEMM_SHAPE),
            "kept_bytes": kept_bytes(layer, point.cell, dtype),
            "formula_bytes": formula_bytes(point.cell, DTYPES[dtype]),
            "peak_bytes": peak_bytes(layer, point.cell, dtype),
            "machine": describe_machine(),
        }
    return found


@cache
def gemm_gflops(dtype: str, threads: int, shape: tuple[int, int, int]) -> float:
    """Returns the rate of a matrix product, measured once per run."""
    return ceilings.measured_ceilings(dtype, threads, shape=shape, fresh=True).gemm_gflops


def kept_bytes(layer: nn.LSTM, cell: Cell, dtype: str) -> int:
    """Returns the bytes that autograd saves beyond what the caller holds."""
    saved: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    x, _ = layer_step.inputs(cell, dtype)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), layer_step.autocast(dtype):
        y, _ = layer(x)
    for held in (x, y, *layer.parameters()):
        saved.pop(held.untyped_storage().data_ptr(), None)
    return sum(saved.values())


def formula_bytes(cell: Cell, itemsize: int) -> int:
    lanes = kernel_table(hardware.cpu().isa, itemsize == 2).lanes
    padded = -(-cell.H // lanes) * lanes
    rows = cell.T * cell.B
    between = (cell.L - 1) * rows * cell.H * itemsize
    return cell.L * rows * (4 * padded * itemsize + 4 * padded) + between


def peak_bytes(layer: nn.LSTM, cell: Cell, dtype: str) -> int:
    """Returns the most that torch's allocator held above the start of a step."""
    layer.zero_grad(set_to_none=True)
    step = layer_step.training_step(layer, *layer_step.inputs(cell, dtype), dtype)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    events = profile.profiler.kineto_results.events()
    held = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=hardware.default_threads())
    parser.add_argument("--only", default="", help="one axis: H, B, T, threads or L")
    parser.add_argument("--max-gflop", type=float, default=2000)
    parser.add_argument("--base", default="512,64,100")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    hardware.keep_freed_memory()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells of every start and stop
    path = (options.results or results_folder()) / "growth.jsonl"
    base = Point(*map(int, options.base.split(",")), options.threads, 1)
    points = [
        (axis, base._replace(**{axis: value}))
        for axis, values in axes(hardware.cores()).items()
        if options.only in ("", axis)
        for value in values
    ]
    known: dict[Point, dict[str, dict[str, Any]]] = {}
    for axis, point in points:
        name = f"{axis}={getattr(point, axis)}"
        if point.cell.flop > options.max_gflop * 1e9:
            print(f"skipped, {point.cell.flop / 1e9:.0f} GFLOP a step: {name}")
            continue
        if point not in known:
            known[point] = measure(point, options.rounds)
        for dtype, found in known[point].items():
            where = {"axis": axis, "value": getattr(point, axis), "dtype": dtype}
            row = {**where, "base": base._asdict(), **found}
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            show(f"{name} {dtype}", found)


def show(name: str, found: dict[str, Any]) -> None:
    mb = {key: found[f"{key}_bytes"] / 1e6 for key in ("kept", "formula", "peak")}
    rate = found["flop"] / found["median_s"] / 1e9
    print(
        f"{name}: {found['median_s'] * 1e3:.3f} ms, {rate:.0f} GFLOP/s,"
        f" {100 * rate / found['ceiling_gflops']:.0f} % of the ceiling,"
        f" {100 * rate / found['large_gflops']:.0f} % of a large product's; kept"
        f" {mb['kept']:.2f} MB (formula {mb['formula']:.2f}), peak {mb['peak']:.2f} MB",
        flush=True,
    )


if __name__ == "__main__":
    main()
