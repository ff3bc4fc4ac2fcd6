"""Whole training steps of a token model: fastlstm against its peers, and against the ceiling.

usage: python benchmarks/training_step.py [--rounds 5] [--steps 3] [--only SUBSTRING]
       [--peer-python PATH]     an interpreter with keras, tensorflow and jax
       [--candidates A,B]       only those with one of these in their names; nothing is stored
Stores one JSON line per shape in benchmarks/results/<machine>/training_step.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

from alternation import Worker, alternate
from machine import describe_machine, results_folder
from rates import ceilings, show, torch_has_bf16
from shapes import TOKEN_MODELS, Shape, V
from step_worker import CANDIDATES


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--peer-python")
    parser.add_argument("--candidates", default="")
    options = parser.parse_args()
    check()
    path = results_folder() / "training_step.jsonl"
    for shape in TOKEN_MODELS:
        if options.only not in str(shape):
            continue
        parts = options.candidates.split(",")
        names = [name for name in CANDIDATES if any(part in name for part in parts)]
        result = measure(shape, names, options)
        if not options.candidates:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
        ceiling = result["ceiling_gflops"]
        print(f"{shape}: ceiling {ceiling['fp32']:.0f} fp32, {ceiling['bf16']:.0f} bf16 GFLOP/s")
        show(result["median_s"], result["step_flop"], ceiling)


def measure(shape: Shape, names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    ceiling = ceilings(shape)
    workers = []
    for name in names:
        if name == "torch bf16" and not torch_has_bf16():
            continue
        is_peer = name in ("keras tensorflow", "keras jax")
        python = options.peer_python if is_peer else sys.executable
        if python is not None:
            workers.append(Worker(name, [python, "step_worker.py", name, *map(str, shape)]))
    seconds = alternate(workers, options.rounds, options.steps)
    return {
        "shape": shape._asdict(),
        "V": V,
        "machine": describe_machine(),
        "ceiling_gflops": ceiling,
        "step_flop": shape.step_flop,
        "median_s": {name: statistics.median(found) for name, found in seconds.items()},
        "seconds": seconds,
    }


def check() -> None:
    """The correctness gate: no figure for a kernel that computes something else."""
    import torch

    from fastlstm.ops.call import LSTMArgs
    from fastlstm.ops.lstm import run

    torch.manual_seed(0)
    shapes = ((7, 5, 12), (5, 40), (5, 40), (160, 12), (160, 40), (160,), (160,))
    rows, *others = (torch.randn(size) * 0.3 for size in shapes)
    args = LSTMArgs(rows, None, *others)
    want = run(args.cast(torch.float64), backend="reference").y
    for is_bf16, limit in ((False, 2e-6), (True, 1.2e-2)):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
            got = run(args).y
        error = float((got - want).norm() / want.norm())
        if not error <= limit:
            name = "bf16" if is_bf16 else "fp32"
            raise SystemExit(f"{name} is wrong: relative RMS error {error:.1e}; nothing measured")


if __name__ == "__main__":
    main()
