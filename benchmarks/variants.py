"""What layer norm, zoneout, recurrent dropout, other activations and lengths add to a step.

usage: python benchmarks/variants.py [--rounds 15] [--only NAME] [--forward] [--no-store]
Forward and backward of one layer on dense float input at the sizes of the token models, every
variant in turn with the plain layer, in one process; lengths are all T, so that the work is the
same. Stores one JSON line per size and dtype in results/<machine>/variants.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from layer_step import autocast
from machine import describe_machine, results_folder
from shapes import TOKEN_MODELS, Shape

from fastlstm.nn.lstm import LSTM
from fastlstm.system import hardware

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lengths": {},
    "recurrent dropout": {"recurrent_dropout": 0.2},
    "zoneout": {"zoneout": (0.1, 0.1)},
    "hard_sigmoid": {"recurrent_activation": "hard_sigmoid"},
    "layer norm": {"layer_norm": True},
}


def steps(shape: Shape, dtype: str, only: str | None) -> dict[str, Callable[[bool], float]]:
    """Returns what takes one step of each variant and returns its seconds: all, or forward's."""
    torch.manual_seed(0)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    x = torch.randn(shape.T, shape.B, shape.E, requires_grad=True)
    dy = torch.randn(shape.T, shape.B, shape.H).to(kind)
    lengths = torch.full((shape.B,), shape.T)

    def one(name: str) -> Callable[[bool], float]:
        layer = LSTM(shape.E, shape.H, **VARIANTS[name])
        given = {"lengths": lengths} if name == "lengths" else {}

        def step(is_whole: bool) -> float:
            x.grad = None
            layer.zero_grad()
            start = time.perf_counter()
            with autocast(dtype):
                y, _ = layer(x, **given)
            forward = time.perf_counter() - start
            y.backward(dy)
            return time.perf_counter() - start if is_whole else forward

        return step

    return {name: one(name) for name in VARIANTS if only in (None, name) or name == "plain"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=list(VARIANTS))
    parser.add_argument("--forward", action="store_true", help="time the forward pass alone")
    parser.add_argument("--no-store", action="store_true")
    options = parser.parse_args()
    hardware.keep_freed_memory()
    path = results_folder() / "variants.jsonl"
    for dtype in ("fp32", "bf16"):
        for shape in dict.fromkeys(s._replace(L=1) for s in TOKEN_MODELS):
            runs = steps(shape, dtype, options.only)
            seconds: dict[str, list[float]] = {name: [] for name in runs}
            for number in range(options.rounds + 2):
                for name, run in runs.items():
                    found = run(not options.forward)
                    if number > 1:  # the first rounds warm up
                        seconds[name].append(found)
            # Shares of the plain step of the same round: what slows the machine slows both.
            added = {
                name: statistics.median(
                    s / plain - 1 for s, plain in zip(found, seconds["plain"], strict=True)
                )
                for name, found in seconds.items()
            }
            result = {
                "shape": shape._asdict(),
                "dtype": dtype,
                "machine": describe_machine(),
                "rounds": options.rounds,
                "median_s": {name: statistics.median(found) for name, found in seconds.items()},
                "added": added,
            }
            if not (options.no_store or options.only or options.forward):
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")
            shown = "  ".join(f"{name} {100 * a:+.0f} %" for name, a in added.items())
            print(
                f"{shape} {dtype}: {result['median_s']['plain'] * 1e3:.1f} ms  {shown}", flush=True
            )


if __name__ == "__main__":
    main()
