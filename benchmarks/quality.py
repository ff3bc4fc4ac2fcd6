"""Quality against time: trains on a real text and stores the result with the machine it ran on.

usage: python benchmarks/quality.py EXPERIMENT TEXT [--out DIR] [--seed 0]
       python benchmarks/quality.py list
Every result is one JSON line in benchmarks/results/<machine>/quality.jsonl.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

from machine import describe_machine, results_folder

import fastlstm

WAR_AND_PEACE: dict[str, Any] = {"split": "90/5/5"}
SHAKESPEARE: dict[str, Any] = {"split": "90/10/0"}
MAX_CHARACTERS = 4_900_000

EXPERIMENTS: dict[str, dict[str, Any]] = {
    "war-and-peace-4.9M": {**WAR_AND_PEACE, "steps": MAX_CHARACTERS // (32 * 128)},
    "war-and-peace-2m": {**WAR_AND_PEACE, "budget": "2m"},
    "war-and-peace-20m": {**WAR_AND_PEACE, "budget": "20m"},
    "shakespeare-3m": {**SHAKESPEARE, "budget": "3m"},
    "shakespeare-10m": {**SHAKESPEARE, "budget": "10m"},
    **{
        f"war-and-peace-{s}s": {**WAR_AND_PEACE, "budget": f"{s}s"}
        for s in (20, 22, 25, 30, 40, 50, 60)
    },
}
"""The default recipe everywhere: an experiment sets split and end, no more."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("experiment", choices=[*EXPERIMENTS, "list"])
    parser.add_argument("text", nargs="?")
    parser.add_argument("--out")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.experiment == "list":
        print("\n".join(EXPERIMENTS))
        return
    if options.text is None:
        parser.error("TEXT is missing: the text file to train on")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(options.out or folder) / "run"
        result = measure(options.experiment, options.text, out, options.seed)
    path = results_folder() / "quality.jsonl"
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")
    shown = {k: v for k, v in result.items() if k != "curve"}
    print(json.dumps(shown, indent=1))


def measure(name: str, text: str, out: Path, seed: int) -> dict[str, Any]:
    """Runs one experiment and returns its result, with the curve of its evaluations."""
    events: list[dict[str, Any]] = []
    fields = EXPERIMENTS[name]
    fastlstm.train(text, out=out, seed=seed, observers=[events.append], **fields)
    end = next(e for e in events if e["event"] == "end")
    start = next(e for e in events if e["event"] == "start")
    steps = [e for e in events if e["event"] == "step"]
    curve = [[e["elapsed_s"], e["bits_per_char"]] for e in events if e["event"] == "eval"]
    return {
        "experiment": name,
        "machine": describe_machine(),
        "seed": seed,
        "fields": fields,
        "text": Path(text).name,
        "bits_per_char": end["final"]["bits_per_char"],
        "nats_per_char": end["final"]["bits_per_char"] * math.log(2),
        "best_bits_per_char": end["best_bits_per_char"],
        "tokens": end["units"],
        "elapsed_s": end["elapsed_s"],
        "train_s": end["train_s"],
        "tokens_per_s": end["units"] / end["train_s"],
        "input_wait_share": sum(e["input_wait_share"] for e in steps) / max(len(steps), 1),
        "start": {k: v for k, v in start.items() if k not in ("event", "run", "source")},
        "curve": curve,
    }


if __name__ == "__main__":
    main()
