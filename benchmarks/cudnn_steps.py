"""Step times of torch's LSTM on a GPU: where cuDNN's persistent kernel engages.

usage: python benchmarks/cudnn_steps.py
fp16, bf16, fp32 and TF32; H 64…1024; B 8…256; two layers stacked in one call against two calls.
Every row is one JSON line in benchmarks/results/<machine>/cudnn.jsonl, in the order of how much it
says: a limit of time may end it early.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from machine import describe_machine, results_folder
from torch import nn

T = 128
REPEATS = 9


def milliseconds(call: Callable[[], object]) -> float:
    """Returns the median of REPEATS timings by CUDA events, after two warm-up calls."""
    times = []
    for n in range(REPEATS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        if n >= 2:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def build(H: int, B: int, dtype: str, layout: str) -> Callable[[], object]:
    """Returns one forward and backward pass of two layers."""
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(dtype, torch.float32)
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    counts = [2] if layout == "stacked" else [1, 1]
    layers = nn.ModuleList(nn.LSTM(H, H, count) for count in counts).to("cuda", kind)
    x = torch.randn(T, B, H, device="cuda", dtype=kind, requires_grad=True)

    def step() -> None:
        y = x
        for layer in layers:
            y, _ = layer(y)
        y.sum().backward()

    return step


def kernels(step: Callable[[], object]) -> list[str]:
    """Returns the names of the recurrent kernels one step launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
    names = {event.key for event in profile.key_averages()}
    return sorted(n for n in names if "persist" in n.lower() or "rnn" in n.lower())


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("cudnn_steps: no NVIDIA GPU here; the table stays unmeasured")
    path = results_folder() / "cudnn.jsonl"
    grid = itertools.product(
        (32, 128, 256, 8, 64),
        (512, 1024, 256, 128, 64, 192, 768),
        ("fp16", "bf16", "fp32", "tf32"),
        ("stacked", "single"),
    )
    with path.open("a", encoding="utf-8") as file:
        for B, H, dtype, layout in grid:
            step = build(H, B, dtype, layout)
            row: dict[str, Any] = {"H": H, "B": B, "T": T, "dtype": dtype, "layout": layout}
            row["ms"] = milliseconds(step)
            row["kernels"] = kernels(step)
            row["persistent"] = any("persist" in name.lower() for name in row["kernels"])
            file.write(json.dumps({**row, "machine": describe_machine()}) + "\n")
            file.flush()
            print(f"H{H} B{B} {dtype} {layout}: {row['ms']:.2f} ms, persistent {row['persistent']}")


if __name__ == "__main__":
    main()
