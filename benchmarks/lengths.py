"""Sequences of unequal length: `lengths=` against torch's PackedSequence and against padding.

usage: python benchmarks/lengths.py [--rounds 5] [--longest 4000]
Forward and backward of one layer, I=64, H=128, B=32, lengths uniform from L/2 to L, float32 (the
question of pytorch#149194: how does the time grow with L?). All candidates take turns in one
process. Stores one JSON line per L in results/<machine>/lengths.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from machine import describe_machine, results_folder
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fastlstm.nn.lstm import LSTM
from fastlstm.system import hardware

I, H, B = 64, 128, 32  # noqa: E741
LENGTHS = (10, 50, 100, 500, 1000, 2000, 4000)


def candidates(L: int) -> dict[str, Callable[[], None]]:
    torch.manual_seed(L)
    own, peer = LSTM(I, H), nn.LSTM(I, H)
    own.load_state_dict(peer.state_dict())
    x = torch.randn(L, B, I)
    lengths = torch.randint(L // 2, L + 1, (B,))
    lengths[0] = L

    def step(forward: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            own.zero_grad()
            peer.zero_grad()
            forward().sum().backward()

        return run

    def packed(layer: nn.LSTM) -> torch.Tensor:
        return pad_packed_sequence(
            layer(pack_padded_sequence(x, lengths, enforce_sorted=False))[0], total_length=L
        )[0]

    want, got = packed(peer), own(x, lengths=lengths)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)
    return {
        "torch padded": step(lambda: peer(x)[0]),
        "torch packed": step(lambda: packed(peer)),
        "fastlstm padded": step(lambda: own(x)[0]),
        "fastlstm packed": step(lambda: packed(own)),
        "fastlstm lengths=": step(lambda: own(x, lengths=lengths)[0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--longest", type=int, default=max(LENGTHS))
    options = parser.parse_args()
    rounds = options.rounds
    hardware.keep_freed_memory()
    path = results_folder() / "lengths.jsonl"
    for L in (L for L in LENGTHS if options.longest >= L):
        runs = candidates(L)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(rounds + 1):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                if number > 0:  # the first round warms up
                    seconds[name].append(time.perf_counter() - start)
        median = {name: statistics.median(found) for name, found in seconds.items()}
        result = {"L": L, "I": I, "H": H, "B": B, "machine": describe_machine(), "median_s": median}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        ratio = median["torch packed"] / median["fastlstm lengths="]
        shown = "  ".join(f"{name} {s * 1e3:.1f}" for name, s in median.items())
        print(f"L={L}: {shown} ms; lengths= is {ratio:.1f}x torch packed", flush=True)


if __name__ == "__main__":
    main()
