"""Characters per second of one stream and of many, against ONNX Runtime, torch and Keras.

usage: python benchmarks/decode.py [--rounds 5] [--only SUBSTRING]
       [--peer-python PATH]     an interpreter with onnxruntime, onnx, tensorflow and keras
       [--results DIR]          default benchmarks/results/<machine>
All candidates have the same weights (Keras its own) and draw at temperature 1; candidates take
turns, medians. Beside it stands what the caches deliver: the rate at which as many bytes as a step
reads can be read, over and over, by as many threads. Stores one JSON line per model in
decode.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from alternation import Worker, alternate
from machine import describe_machine, results_folder

from fastlstm.system import hardware
from fastlstm.text.config import ModelConfig
from fastlstm.text.decoder import Decoder
from fastlstm.text.stored_model import parameter_shapes

MODELS = {
    "H=512": ModelConfig(100, 256, 512, 1),
    "H=1024": ModelConfig(100, 256, 1024, 1),
    "2x512": ModelConfig(100, 256, 512, 2),
    "BPE 16k": ModelConfig(16384, 256, 512, 1),
}
OWN = [
    *(f"fastlstm {f} {threads} 1" for f in ("fp32", "bf16", "int8") for threads in (1, 2)),
    "fastlstm int8 2 1 all",
    *(f"fastlstm {f} 2 64" for f in ("fp32", "bf16", "int8")),
]
PEERS = ["onnxruntime fp32 1", "onnxruntime int8 1", "torch fp32 1", "keras predict"]
CHARACTERS = {"keras": 20, "torch": 300, "onnxruntime": 2000, "fastlstm": 20_000}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--peer-python")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    path = (options.results or results_folder()) / "decode.jsonl"
    for name, config in MODELS.items():
        if options.only not in name:
            continue
        result = measure(name, config, options.rounds, options.peer_python)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        show(result)


def measure(name: str, config: ModelConfig, rounds: int, peer_python: str | None) -> dict[str, Any]:
    weights = random_weights(config)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.npz"
        np.savez(path, **weights)
        # Larger models write fewer characters in the same time.
        share = sum(w.size for w in random_weights(MODELS["H=512"]).values()) / sum(
            w.size for w in weights.values()
        )
        workers = []
        for candidate in [*OWN, *(PEERS if peer_python else [])]:
            library = candidate.split()[0]
            count = max(20, int(CHARACTERS[library] * share))
            count *= 8 if candidate.endswith(" 64") else 1
            python = sys.executable if library in ("fastlstm", "torch") else str(peer_python)
            workers.append(
                Worker(candidate, [python, "decode_worker.py", candidate, str(path), str(count)])
            )
        found = alternate(workers, rounds, 1)
    rates = {}
    for worker in workers:
        if seconds := found.get(worker.name):
            rates[worker.name] = int(worker.command[-1]) / statistics.median(seconds)
    return {
        "model": name,
        "V": config.vocab_size, "E": config.embed_size,
        "H": config.rnn_size, "L": config.num_layers,
        "machine": describe_machine(),
        "characters_per_s": rates,
        "bytes": bytes_and_ceilings(weights, config),
    }  # fmt: skip


def random_weights(config: ModelConfig) -> dict[str, np.ndarray]:
    """Random weights; larger ones in the output, so that some tokens are likelier than others."""
    rng = np.random.default_rng(0)
    scale = config.rnn_size**-0.5
    return {
        name: (rng.standard_normal(shape) * scale * (8 if "output" in name else 1)).astype("f4")
        for name, shape in parameter_shapes(config).items()
    }


def bytes_and_ceilings(weights: dict[str, np.ndarray], config: ModelConfig) -> dict[str, Any]:
    """Bytes of weights per character and format, and GB/s at which 1 and 2 threads read them."""
    hardware.join_openmp()
    found = {}
    for weight_format in ("fp32", "bf16", "int8"):
        decoder = Decoder(weights, config, weight_format)
        size = decoder.bytes_per_token
        rates = [
            statistics.median(
                decoder._kernels.read_gb_s(threads, size // threads, max(3, 2 * 10**9 // size))
                for _ in range(5)
            )
            for threads in (1, 2)
        ]
        found[weight_format] = {"per_character": size, "read_gb_s": rates}
    return found


def show(result: dict[str, Any]) -> None:
    print(result["model"])
    for name, rate in result["characters_per_s"].items():
        library, *options = name.split()
        line = f"  {name:24} {rate:>12,.0f} characters/s"
        if library == "fastlstm" and options[2] == "1":
            facts = result["bytes"][options[0]]
            reached = facts["per_character"] * rate / 1e9
            ceiling = facts["read_gb_s"][int(options[1]) - 1]
            line += f"   {reached:6.1f} GB/s of {ceiling:.0f}: {100 * reached / ceiling:.0f} %"
        print(line)


if __name__ == "__main__":
    main()
