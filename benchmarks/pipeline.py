"""Layers divided among two processes, beside one process and beside a divided batch.

usage: python benchmarks/pipeline.py [--hidden 256] [--layers 4] [--batch 32] [--length 128]
       [--chunks 4,8,16] [--precision fp32] [--steps 20] [--rounds 3] [--results DIR]
The commands of a round run in turns, a thread for each process; a line is the median of rounds,
and in a round of its steps. `idle` is the share of the passes that processes waited, measured;
beside it what equal stages and these stages would have to wait. `step_bytes` crossed the boundary
in a step.
Results: pipeline.jsonl in DIR (benchmarks/results/<machine>).
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from machine import describe_machine, results_folder

_WARM_UP = 3
_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 \n"


def main() -> None:
    options = parse()
    cases = {"1 process, 2 threads": ["--threads", "2"]}
    cases["2 processes, batch divided"] = ["--threads", "1", "--nproc", "2"]
    for chunks in options.chunks.split(","):
        words = ["--threads", "1", "--nproc", "2", "--pipeline", chunks]
        cases[f"2 processes, layers divided, {chunks} chunks"] = words
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as place:
        text = Path(place) / "text.txt"
        length = options.batch * options.length * (options.steps + 8)
        text.write_text("".join(random.Random(0).choices(_CHARACTERS, k=length)))
        for _ in range(options.rounds):
            for name, words in cases.items():
                rows[name].append(measured(text, options, words))
                print(name, rows[name][-1], file=sys.stderr, flush=True)
    sizes = {n: getattr(options, n) for n in ("hidden", "layers", "batch", "length", "precision")}
    path = Path(options.results or results_folder()) / "pipeline.jsonl"
    for name, found in rows.items():
        values = {key: median(row[key] for row in found) for key in found[0]}
        line = json.dumps({"case": name, **values, **sizes})
        print(line, flush=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**json.loads(line), "machine": describe_machine()}) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    numbers = (("hidden", 256), ("layers", 4), ("batch", 32), ("length", 128), ("steps", 20))
    for name, default in (*numbers, ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--chunks", default="4,8,16")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--results")
    return parser.parse_args()


def measured(text: Path, options: argparse.Namespace, words: list[str]) -> dict[str, float]:
    """Returns the figures of one run."""
    with tempfile.TemporaryDirectory() as place:
        sizes = {"num-layers": options.layers, "rnn-size": options.hidden, "steps": options.steps}
        sizes |= {"batch-size": options.batch, "seq-length": options.length, "dropout": 0}
        sizes |= {"eval-every": 10**6, "sample-every": 0, "log-every": 1}
        command = [sys.executable, "-m", "fastlstm", "train", str(text), "--out", f"{place}/run"]
        command += [word for name, n in sizes.items() for word in (f"--{name}", str(n))]
        command += ["--precision", options.precision, "--device", "cpu", "--no-tensorboard"]
        subprocess.run([*command, "--split", "98/1/1", *words], check=True, capture_output=True)
        lines = (Path(place) / "run" / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    speeds = [e["units_per_s"] for e in events if e["event"] == "step"][_WARM_UP:]
    pipeline = next(e for e in events if e["event"] == "end").get("pipeline", {})
    pipeline = {k: v for k, v in pipeline.items() if k.startswith(("idle", "step_"))}
    return {"tokens_per_s": median(speeds), **pipeline}


if __name__ == "__main__":
    main()
