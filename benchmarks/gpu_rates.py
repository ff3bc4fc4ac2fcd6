"""Tokens a second of training on a GPU, in turns in one process: precisions, batches, shards.

usage: python benchmarks/gpu_rates.py TEXT [--device cuda] [--turns N]
Each case is a run of 60 steps of the preset small (medium where it says so), sequences of 128
tokens; the first turn loads the kernels. One JSON line each in
benchmarks/results/<machine>/gpu_rates.jsonl. With --device cpu the runs are short and nothing is
stored.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine, results_folder

import fastlstm


def cases() -> dict[str, dict[str, Any]]:
    """Returns the options of each run by its name."""
    found: dict[str, dict[str, Any]] = {
        f"small {precision}, 128 lanes{', 4 shards' if shards else ''}": {
            "precision": precision, "shards": shards, "batch_size": 128,
        }
        for precision in ("tf32", "fp16", "bf16")
        for shards in (None, 4)
    }  # fmt: skip
    return {
        **found,
        "small bf16, 32 lanes": {"precision": "bf16", "batch_size": 32},
        "small fp16, 128 lanes, 2 layers": {
            "precision": "fp16", "batch_size": 128, "num_layers": 2,
        },
        "medium fp16, 256 lanes": {"preset": "medium", "precision": "fp16", "batch_size": 256},
        "medium bf16, 256 lanes": {"preset": "medium", "precision": "bf16", "batch_size": 256},
    }  # fmt: skip


def rate(text: str, device: str, options: dict[str, Any]) -> float:
    """Returns the tokens a second of a run's steps."""
    ends = list[dict[str, Any]]()
    fields: dict[str, Any] = {"preset": "small", "seq_length": 128, "steps": 60, **options}
    if device == "cpu":
        fields |= {"preset": "tiny", "seq_length": 8, "steps": 2, "precision": "fp32"}
    fields |= {"sample_every": 0, "eval_every": 100_000, "checkpoint_every": 100_000}
    fields |= {"device": device, "tensorboard": False, "observers": [ends.append]}
    with tempfile.TemporaryDirectory() as folder:
        fastlstm.train(text, out=Path(folder) / "run", **fields)
    (end,) = (event for event in ends if event["event"] == "end")
    return float(end["units"] / end["train_s"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("text")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no NVIDIA GPU that torch can use: nothing was measured")
        return
    rates: dict[str, list[float]] = {name: [] for name in cases()}
    for _ in range(options.turns):
        for name, fields in cases().items():
            rates[name].append(rate(options.text, options.device, fields))
    for name, found in rates.items():
        print(f"{name}: {statistics.median(found):,.0f} tokens/s ({sorted(map(round, found))})")
        if options.device == "cuda":
            with (results_folder() / "gpu_rates.jsonl").open("a", encoding="utf-8") as file:
                row = {"case": name, "tokens_per_s": found, "machine": describe_machine()}
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
