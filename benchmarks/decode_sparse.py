"""Characters per second with block-sparse weights against the same weights decoded densely.

usage: python benchmarks/decode_sparse.py [--sizes 512 1024 2048] [--shares 0.5 0.75 0.9]
       [--formats int8] [--streams 1 64] [--threads 1 2] [--rounds 9]
       [--results DIR]          default benchmarks/results/<machine>
Blocks of the recurrent and the output matrix are zero at random. Candidates take turns in one
process; medians and the best round, each of the better number of threads. Beside them stand the
bytes of weights that a character reads, and the rate at which caches deliver as many. Stores one
JSON line per size, format and number of streams in decode_sparse.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from decode import random_weights
from machine import describe_machine, results_folder

from fastlstm.runs.weight_formats import block_grid
from fastlstm.system import hardware
from fastlstm.text import decoder as decoder_module
from fastlstm.text.config import ModelConfig
from fastlstm.text.decoder import Decoder, Stream
from fastlstm.text.sampling import Sampling

TURN_S = 0.1
STEPS = 64  # of a call
PRUNED = {"layers.0.weight_hh_l0": 4, "output.weight": 1}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.75, 0.9])
    parser.add_argument("--formats", nargs="+", default=["int8"])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    hardware.join_openmp()
    path = (options.results or results_folder()) / "decode_sparse.jsonl"
    for H in options.sizes:
        for weight_format in options.formats:
            decoders = make_decoders(H, weight_format, options.shares)
            for streams in options.streams:
                result = {
                    "V": 100, "E": 256, "H": H, "L": 1, "format": weight_format,
                    "streams": streams, "machine": describe_machine(),
                    "candidates": measure(decoders, streams, options.threads, options.rounds),
                }  # fmt: skip
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")
                show(result)


def make_decoders(H: int, weight_format: str, shares: list[float]) -> dict[str, Decoder]:
    config = ModelConfig(100, 256, H, 1)
    weights = random_weights(config)
    decoders = {}
    decoder_module.MIN_ZERO_SHARE = 2.0
    decoders["dense"] = Decoder(weights, config, weight_format)
    decoder_module.MIN_ZERO_SHARE = 0.0
    for share in shares:
        decoders[f"{share:.0%} zero"] = Decoder(pruned(weights, share), config, weight_format)
    return decoders


def pruned(weights: dict[str, np.ndarray], share: float) -> dict[str, np.ndarray]:
    """Weights with just this share of zero blocks, the same number in no particular place."""
    rng = np.random.default_rng(1)
    result = dict(weights)
    for name, gates in PRUNED.items():
        w = weights[name]
        grid = block_grid(w, gates)
        rows, across = grid.shape[:2]
        is_kept = np.ones(rows * across, bool)
        is_kept[rng.permutation(rows * across)[: round(share * rows * across)]] = False
        whole = np.repeat(np.repeat(is_kept.reshape(rows, across), 16, 0), 4, 1)
        whole = whole.reshape(gates, -1, whole.shape[1])[:, : w.shape[0] // gates, : w.shape[1]]
        result[name] = w * whole.reshape(w.shape)
    return result


def measure(
    decoders: dict[str, Decoder], num_streams: int, threads: list[int], rounds: int
) -> dict[str, Any]:
    turns = {
        (name, count): Turn(decoder, num_streams, count)
        for name, decoder in decoders.items()
        for count in threads
    }
    for _ in range(rounds):
        for turn in turns.values():
            turn.run()
    found = {}
    for name, decoder in decoders.items():
        by_threads = {count: turns[name, count].rates for count in threads}
        count = max(by_threads, key=lambda count: statistics.median(by_threads[count]))
        size = decoder.bytes_per_token
        found[name] = {
            "threads": count,
            "characters_per_s": statistics.median(by_threads[count]),
            "best": max(by_threads[count]),
            "by_threads": {str(c): statistics.median(rates) for c, rates in by_threads.items()},
            "bytes": size,
            "read_gb_s": statistics.median(
                decoder._kernels.read_gb_s(count, size // count, max(3, 10**9 // size))
                for _ in range(3)
            ),
        }
    return found


class Turn:
    """Streams of one candidate on a number of threads; each call of `run` takes about TURN_S."""

    def __init__(self, decoder: Decoder, num_streams: int, threads: int) -> None:
        self.decoder, self.threads = decoder, threads
        self.streams = [self._stream(seed) for seed in range(num_streams)]
        self.rates: list[float] = []
        self.calls = 1
        seconds = self._calls()
        self.calls = max(1, round(TURN_S / seconds))

    def _stream(self, seed: int) -> Stream:
        stream = self.decoder.stream()
        stream.set(Sampling(seed=seed))
        stream.feed([1])
        stream.begin(1 << 60)
        return stream

    def _calls(self) -> float:
        start = time.perf_counter()
        for _ in range(self.calls):
            self.decoder.run(self.streams, STEPS, self.threads)
        seconds = time.perf_counter() - start
        for stream in self.streams:
            stream.take()
        return seconds

    def run(self) -> None:
        self.decoder.run(self.streams, STEPS, self.threads)  # brings its weights into the caches
        self.rates.append(self.calls * STEPS * len(self.streams) / self._calls())


def show(result: dict[str, Any]) -> None:
    print(f"H={result['H']} {result['format']}, {result['streams']} streams", flush=True)
    dense = result["candidates"]["dense"]
    for name, facts in result["candidates"].items():
        rate = facts["characters_per_s"]
        reached = facts["bytes"] * rate / result["streams"] / 1e9
        print(
            f"  {name:10} {rate:>11,.0f} characters/s on {facts['threads']} threads, best"
            f" {facts['best']:>11,.0f}: x{rate / dense['characters_per_s']:.2f}, best"
            f" x{facts['best'] / dense['best']:.2f}; {facts['bytes'] / 1e6:.2f} MB,"
            f" {reached:.1f} GB/s of {facts['read_gb_s']:.0f}"
        )


if __name__ == "__main__":
    main()
