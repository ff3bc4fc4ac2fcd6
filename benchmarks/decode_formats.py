"""Characters per second by the format of the weights, one stream and many.

usage: python benchmarks/decode_formats.py [--only SUBSTRING] [--formats int8 int4]
       [--streams 1 64] [--threads 1 2] [--rounds 15]
       [--results DIR]          default benchmarks/results/<machine>
The formats take turns in one process; medians of the rounds, and of the ratios to the first format
within a round, each with the number of threads that is fastest for the format. Beside them stand
the bytes of weights that a character of one stream reads, and the rate at which the caches deliver
as many to so many threads. Stores one JSON line per model and number of streams in
decode_formats.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from decode import random_weights
from machine import describe_machine, results_folder

from fastlstm.system import hardware
from fastlstm.text.config import ModelConfig
from fastlstm.text.decoder import Decoder
from fastlstm.text.sampling import Sampling

MODELS = {
    "H=512": ModelConfig(100, 256, 512, 1),
    "H=1024": ModelConfig(100, 256, 1024, 1),
    "BPE 16k, H=512": ModelConfig(16384, 256, 512, 1),
    "BPE 16k, H=1024": ModelConfig(16384, 256, 1024, 1),
}
TURN_S = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="")
    parser.add_argument("--formats", nargs="+", default=["int8", "int4"])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    hardware.join_openmp()
    path = (options.results or results_folder()) / "decode_formats.jsonl"
    for name, config in MODELS.items():
        if options.only not in name:
            continue
        weights = random_weights(config)
        decoders = {f: Decoder(weights, config, f) for f in options.formats}
        for num_streams in options.streams:
            result = {
                "model": name, "V": config.vocab_size, "E": config.embed_size,
                "H": config.rnn_size, "L": config.num_layers, "streams": num_streams,
                "machine": describe_machine(),
                "formats": measure(decoders, num_streams, options.threads, options.rounds),
            }  # fmt: skip
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
            show(result)


class Turn:
    """A decoder with its streams, which writes for about `TURN_S` at a time."""

    def __init__(self, decoder: Decoder, num_streams: int, threads: int) -> None:
        self.decoder, self.threads, self.steps = decoder, threads, 8
        self.streams = [decoder.stream() for _ in range(num_streams)]
        for seed, stream in enumerate(self.streams):
            stream.set(Sampling(seed=seed))
            stream.feed([1])
            stream.begin(1 << 60)
        self.rates: list[float] = []
        while min(self.write() for _ in range(3)) < TURN_S / 2:
            self.steps *= 2
        self.rates.clear()

    def write(self) -> float:
        """Writes `steps` characters per stream; returns the seconds and keeps the rate."""
        start_s = time.perf_counter()
        self.decoder.run(self.streams, self.steps, self.threads)
        taken_s = time.perf_counter() - start_s
        self.rates.append(self.steps * len(self.streams) / taken_s)
        for stream in self.streams:
            stream.take()
        return taken_s


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
            turn.write()
    fastest = {}
    for name in decoders:
        candidates = [turn for (of, _), turn in turns.items() if of == name]
        fastest[name] = max(candidates, key=lambda turn: statistics.median(turn.rates))
    first = next(iter(fastest.values()))
    return {
        name: {
            "characters_per_s": statistics.median(turn.rates),
            "best": max(turn.rates),
            "ratio": statistics.median(
                own / other for own, other in zip(turn.rates, first.rates, strict=True)
            ),
            "threads": turn.threads,
            "isa": turn.decoder.isa,
            "bytes": turn.decoder.bytes_per_token,
            "read_gb_s": read_gb_s(turn.decoder, turn.threads),
        }
        for name, turn in fastest.items()
    }


def read_gb_s(decoder: Decoder, threads: int) -> float:
    """The rate at which a team reads the bytes of a character of one stream, again and again."""
    size = decoder.bytes_per_token
    rounds = max(3, 10**9 // size)
    return statistics.median(
        decoder._kernels.read_gb_s(threads, size // threads, rounds) for _ in range(5)
    )


def show(result: dict[str, Any]) -> None:
    print(f"{result['model']}, {result['streams']} streams")
    for name, facts in result["formats"].items():
        line = (
            f"  {name:5} {facts['characters_per_s']:>11,.0f} characters/s"
            f" ({facts['ratio']:.2f}x; best {facts['best']:,.0f}), {facts['threads']} threads,"
            f" {facts['isa']}, {facts['bytes'] / 1e6:.2f} MB"
        )
        if result["streams"] == 1:
            reached = facts["bytes"] * facts["characters_per_s"] / 1e9
            ceiling = facts["read_gb_s"]
            line += f", {reached:.1f} GB/s of {ceiling:.0f}: {100 * reached / ceiling:.0f} %"
        print(line, flush=True)


if __name__ == "__main__":
    main()
