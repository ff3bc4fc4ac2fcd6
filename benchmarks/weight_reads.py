"""What it costs that every call reads its weights whole: a layer beside itself, frozen, and torch.

One sequence, as many inputs as units, no gradients. Candidates take turns, each in its own process;
printed are medians of microseconds per call. `--before` is the Python of another installation of
fastlstm, whose layer takes part too.

usage: python benchmarks/weight_reads.py [--rounds 9] [--before PYTHON]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
from alternation import Worker, alternate, serve
from torch import nn

import fastlstm

SIZES, STEPS = (32, 64, 128, 256, 512, 1024), (1, 10, 100)
SAMPLE_S = 0.02


def worker(kind: str, H: int, T: int) -> None:
    """Serves samples of one call, repeated for as long as a clock needs."""
    torch.manual_seed(0)
    layer = nn.LSTM(H, H) if kind == "torch" else fastlstm.LSTM(H, H)
    if kind == "frozen":
        fastlstm.freeze(layer)
    x, hx = torch.randn(T, 1, H), (torch.randn(1, 1, H), torch.randn(1, 1, H))
    with torch.no_grad():
        for _ in range(3):
            layer(x, hx)
        start = time.perf_counter()
        layer(x, hx)
        repeats = max(1, round(SAMPLE_S / (time.perf_counter() - start)))

        def sample() -> None:
            for _ in range(repeats):
                layer(x, hx)

        serve(sample, 1 / repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="turns of each candidate (default 9)")
    parser.add_argument("--before", metavar="PYTHON", help="of another installation of fastlstm")
    parser.add_argument("--worker", nargs=3, metavar=("KIND", "H", "T"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        kind, H, T = chosen.worker
        return worker(kind, int(H), int(T))
    kinds = {"torch": sys.executable, "reads": sys.executable, "frozen": sys.executable}
    if chosen.before:
        kinds["before"] = chosen.before
    print("us per call" + "".join(f"{kind:>11}" for kind in kinds) + "  reads / frozen")
    for H in SIZES:
        for T in STEPS:
            workers = [
                Worker(kind, [python, __file__, "--worker", kind, str(H), str(T)])
                for kind, python in kinds.items()
            ]
            found = alternate(workers, chosen.rounds, 3)
            us = {kind: 1e6 * statistics.median(seconds) for kind, seconds in found.items()}
            cells = "".join(f"{us[kind]:11.1f}" for kind in kinds)
            print(
                f"H{H} T{T}".ljust(11) + cells + f"{us['reads'] / us['frozen']:16.2f}", flush=True
            )


if __name__ == "__main__":
    main()
