"""Compares what `fastlstm predict` says with runs of 4 and 10 times the measured length.

usage: python tests/campaigns/predictions.py RESULTS.jsonl TEXT... [--measure 15] [--seeds 1]
Every prediction is one line, with the bits/char that the run ended at; a line that is there is not
repeated. Prints the errors and how many of the 90 % intervals hold the run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FACTORS = (4, 10)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--measure", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    for seed in range(options.seeds):
        for text in options.texts:
            for factor in FACTORS:
                compare(options.results, text, options.measure, factor, seed)
    report(options.results)


def compare(path: Path, text: str, measure_s: int, factor: int, seed: int) -> None:
    """Predicts one run and trains it, unless the file has it."""
    key = {"text": Path(text).name, "measure_s": measure_s, "factor": factor, "seed": seed}
    if path.exists():
        rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        if any(all(row[name] == value for name, value in key.items()) for row in rows):
            return
    budget = [text, "--budget", f"{measure_s * factor}s", "--seed", str(seed)]
    said = json.loads(
        fastlstm("predict", *budget, "--measure", f"{measure_s}s", "--json").splitlines()[-1]
    )
    chosen = [w for n, v in said["chosen"].items() for w in (f"--{n.replace('_', '-')}", str(v))]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        fastlstm("train", *budget, *chosen, "--out", str(out))
        end = json.loads((out / "metrics.jsonl").read_text("utf-8").splitlines()[-1])
    row = {**key, "said": said, "bits": end["best_bits_per_char"], "tokens": end["units"]}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(line(row), flush=True)


def fastlstm(*words: str) -> str:
    """Returns what a command prints; its error ends the campaign."""
    return subprocess.run(
        [sys.executable, "-m", "fastlstm", *words], check=True, capture_output=True, text=True
    ).stdout


def line(row: dict[str, Any]) -> str:
    """Returns one comparison as text."""
    said = row["said"]
    held = "held" if said["low"] <= row["bits"] <= said["high"] else "missed"
    return (
        f"{row['text']} {row['measure_s']} s x {row['factor']}: predicted {said['bits']:.3f}"
        f" ({said['low']:.3f} to {said['high']:.3f}), was {row['bits']:.3f}:"
        f" {100 * (said['bits'] / row['bits'] - 1):+.1f} %, interval {held};"
        f" characters {said['tokens'] / row['tokens']:.2f} of those read"
    )


def report(path: Path) -> None:
    """Prints all comparisons of a file and what they come to."""
    rows = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        print(line(row))
    for factor in FACTORS:
        errors = [abs(r["said"]["bits"] / r["bits"] - 1) for r in rows if r["factor"] == factor]
        if errors:
            print(f"{factor}x: {len(errors)} runs, largest error {100 * max(errors):.1f} %")
    held = sum(r["said"]["low"] <= r["bits"] <= r["said"]["high"] for r in rows)
    print(f"90 % intervals: {held} of {len(rows)} hold the run")


if __name__ == "__main__":
    main()
