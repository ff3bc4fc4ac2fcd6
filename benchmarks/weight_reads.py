"""What it costs that every call reads its weights whole: a layer beside itself, frozen, and torch.

One sequence, as many inputs as units, no gradients. Candidates take turns, each in its own process;
printed are medians of microseconds per call: of the clock, with one thread of processor time.
`--before` is the Python of another installation of fastlstm, whose layer takes part too.

usage: python benchmarks/weight_reads.py [--rounds 9] [--threads N] [--before PYTHON]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

import torch
from torch import nn

import fastlstm

SIZES, STEPS = (32, 64, 128, 256, 512, 1024), (1, 10, 100)
SAMPLE_S = 0.01


def worker(kind: str, num_threads: int) -> None:
    """Answers each line, `H T`, with the microseconds of a call: over as many as fill a sample."""
    if num_threads:
        torch.set_num_threads(num_threads)
    clock = time.process_time if num_threads == 1 else time.perf_counter
    print("ready", flush=True)
    calls = {}
    for line in sys.stdin:
        H, T = map(int, line.split())
        if (H, T) not in calls:
            calls.clear()
            layer = nn.LSTM(H, H) if kind == "torch" else fastlstm.LSTM(H, H)
            if kind == "frozen":
                fastlstm.freeze(layer)
            inputs = torch.randn(T, 1, H), (torch.randn(1, 1, H), torch.randn(1, 1, H))
            calls[H, T] = layer, inputs
        layer, inputs = calls[H, T]
        with torch.no_grad():
            for _ in range(3):
                start = clock()
                layer(*inputs)
                seconds = clock() - start
            repeats = max(1, round(SAMPLE_S / max(seconds, 1e-6)))
            start = clock()
            for _ in range(repeats):
                layer(*inputs)
        print(1e6 * (clock() - start) / repeats, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="turns of each candidate (default 9)")
    parser.add_argument("--threads", type=int, default=0, help="of each call (default: torch's)")
    parser.add_argument("--before", metavar="PYTHON", help="of another installation of fastlstm")
    parser.add_argument("--worker", metavar="KIND", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        return worker(chosen.worker, chosen.threads)
    pythons = dict.fromkeys(("torch", "reads", "frozen"), sys.executable)
    if chosen.before:
        pythons["before"] = chosen.before
    workers = {}
    for kind, python in pythons.items():
        command = [python, __file__, "--worker", kind, "--threads", str(chosen.threads)]
        pipe = subprocess.PIPE
        workers[kind] = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert workers[kind].stdout.readline() == "ready\n", kind
    print("us per call" + "".join(f"{kind:>11}" for kind in workers) + "  reads / frozen")
    for H in SIZES:
        for T in STEPS:
            found: dict[str, list[float]] = {kind: [] for kind in workers}
            for number in range(chosen.rounds):
                for kind in list(workers) if number % 2 else list(workers)[::-1]:
                    print(H, T, file=workers[kind].stdin, flush=True)
                    found[kind].append(float(workers[kind].stdout.readline()))
            us = {kind: statistics.median(values) for kind, values in found.items()}
            cells = "".join(f"{us[kind]:11.1f}" for kind in workers)
            print(
                f"H{H} T{T}".ljust(11) + cells + f"{us['reads'] / us['frozen']:16.2f}", flush=True
            )
    for process in workers.values():
        process.stdin.close()
        process.wait(timeout=60)


if __name__ == "__main__":
    main()
