"""Compares what `fastlstm predict` says with runs of 4 and 10 times the measured length.

usage: python campaigns/predictions.py RESULTS.jsonl TEXT... [--measure 15 | --steps 120]
                                             [--seeds 1] [--options "--rnn-size 192 ..."]
Every prediction is one line, with the bits/char that the run ended at; a line that is there is not
repeated. Prints the errors and how many of the 90 % intervals hold the run. With --steps the runs
end by steps, so that the result does not depend on what else the machine does; the prediction is
then made anew from the measurement in the file, by the law as it is now.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fastlstm.text.quality_law import Length, QualityPrediction

FACTORS = (4, 10)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("texts", nargs="*")
    parser.add_argument("--measure", type=int, default=15)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--options", default="")
    options = parser.parse_args()
    for seed in range(options.seeds):
        for text in options.texts:
            for factor in FACTORS:
                key = {
                    "text": Path(text).name, "factor": factor, "seed": seed,
                    "options": options.options,
                }  # fmt: skip
                if options.steps is None:
                    key["measure_s"] = options.measure
                else:
                    key["steps"] = options.steps
                compare(options.results, text, key)
    report(options.results)


def compare(path: Path, text: str, key: dict[str, Any]) -> None:
    """Predicts one run and trains it, unless the file has it."""
    if path.exists():
        rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        if any(all(row.get(name) == value for name, value in key.items()) for row in rows):
            return
    if "steps" in key:
        length = ["--steps", str(key["steps"] * key["factor"])]
        measured = ["--measure-steps", str(key["steps"])]
    else:
        length = ["--budget", f"{key['measure_s'] * key['factor']}s"]
        measured = ["--measure", f"{key['measure_s']}s"]
    words = [text, *length, "--seed", str(key["seed"]), *shlex.split(key["options"])]
    said = json.loads(fastlstm("predict", *words, *measured, "--json").splitlines()[-1])
    chosen = [w for n, v in said["chosen"].items() for w in (f"--{n.replace('_', '-')}", str(v))]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        fastlstm("train", *words, *chosen, "--out", str(out))
        end = json.loads((out / "metrics.jsonl").read_text("utf-8").splitlines()[-1])
    row = {**key, "said": said, "bits": end["best_bits_per_char"], "tokens": end["units"]}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(line(row), flush=True)


def predicted(row: dict[str, Any]) -> dict[str, float]:
    """Returns bits, low and high: as said, or of steps by the law as it is now."""
    if "steps" not in row:
        return {name: row["said"][name] for name in ("bits", "low", "high")}
    measured = dict(row["said"]["measured"])
    length = Length(**measured["measured"])
    known: dict[str, Any] = {"num_layers": 1, **measured, "measured": length}
    law = QualityPrediction(**known)
    return vars(law.after(law.measured.times(row["factor"])))


def fastlstm(*words: str) -> str:
    """Returns what a command prints; its error ends the campaign."""
    return subprocess.run(
        [sys.executable, "-m", "fastlstm", *words], check=True, capture_output=True, text=True
    ).stdout


def line(row: dict[str, Any]) -> str:
    """Returns one comparison as text."""
    said = predicted(row)
    held = "held" if said["low"] <= row["bits"] <= said["high"] else "missed"
    measured = f"{row['steps']} steps" if "steps" in row else f"{row['measure_s']} s"
    return (
        f"{row['text']} {measured} x {row['factor']}, seed {row['seed']} {row['options']}:"
        f" predicted {said['bits']:.3f} ({said['low']:.3f} to {said['high']:.3f}), was"
        f" {row['bits']:.3f}: {100 * (said['bits'] / row['bits'] - 1):+.1f} %, interval {held};"
        f" characters {row['said']['tokens'] / row['tokens']:.2f} of those read"
    )


def report(path: Path) -> None:
    """Prints all comparisons of a file and what they come to."""
    rows = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        print(line(row))
    for factor in FACTORS:
        errors = [predicted(r)["bits"] / r["bits"] - 1 for r in rows if r["factor"] == factor]
        if errors:
            print(
                f"{factor}x: {len(errors)} runs, mean error {100 * sum(errors) / len(errors):+.1f}"
                f" %, largest {100 * max(map(abs, errors)):.1f} %"
            )
    held = sum(predicted(r)["low"] <= r["bits"] <= predicted(r)["high"] for r in rows)
    print(f"90 % intervals: {held} of {len(rows)} hold the run")


if __name__ == "__main__":
    main()
