"""Fits and checks the law of `tuning/predict.py` on runs of doubled numbers of steps.

usage: python benchmarks/fit_loss_law.py FORECAST_SIZES.jsonl
Every run of S, 2 S and 2^n S steps of one model and table is a case: the first two predict the
third. Prints the error by share of gain kept, its quantiles by doublings, and how many runs the
limits of 90 % hold.
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from fastlstm.tuning import predict


def main() -> None:
    cases = cases_of(Path(sys.argv[1]))
    groups = sorted({case[0] for case in cases})
    print(f"{len(cases)} cases of {len(groups)} tables and horizons")
    if len(groups) < 2:
        sys.exit("too few: runs of S, 2 S and 4 S steps of two tables or horizons are needed")
    for kept in (0.0, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9):
        errors = [error(case, kept) for case in cases]
        print(f"  kept {kept:.2f}: rms {100 * np.sqrt(np.mean(np.square(errors))):.2f} %,"
              f" median {100 * np.median(errors):+.2f} %")  # fmt: skip
    for doublings in sorted({case[1] for case in cases}):
        errors = [error(case, predict.KEPT_GAIN) for case in cases if case[1] == doublings]
        low, high = 100 * np.quantile(errors, [0.05, 0.95])
        print(f"  {doublings} doublings: 5 % {low:+.1f} %, 95 % {high:+.1f} %, {len(errors)} cases")
    held, held_out = [], []
    for _, doublings, half, measured, end in cases:
        said = predict.loss_after(2.0**doublings, 1.0, half, measured)
        held.append(said.low <= end <= said.high)
    for name in groups:
        own = [error(case, predict.KEPT_GAIN) for case in cases if case[0] == name]
        others = [error(case, predict.KEPT_GAIN) for case in cases if case[0] != name]
        low, high = np.quantile(others, [0.05, 0.95])
        held_out += [low <= each <= high for each in own]
    print(f"  the limits of today hold {100 * np.mean(held):.0f} %; quantiles of the errors of all"
          f" other tables and horizons hold {100 * np.mean(held_out):.0f} %")  # fmt: skip


def cases_of(path: Path) -> list[tuple[str, int, float, float, float]]:
    """Returns (table and horizon, doublings, loss of S steps, of 2 S, of 2^n S) of all runs."""
    runs: dict[str, dict[int, float]] = defaultdict(dict)
    for line in path.read_text("utf-8").splitlines():
        row: dict[str, Any] = json.loads(line)
        if row.get("kind") == "rate" or row["seconds"] is not None:
            continue
        fields = {name: value for name, value in row["fields"].items() if name != "steps"}
        runs[f"{row['table']} {fields}"][row["fields"]["steps"]] = row["valid_loss"]
    return [
        (name, round(math.log2(longest / (2 * steps))), losses[steps], losses[2 * steps], end)
        for name, losses in runs.items()
        for steps in losses
        if 2 * steps in losses
        for longest, end in losses.items()
        if longest > 2 * steps
    ]


def error(case: tuple[str, int, float, float, float], kept: float) -> float:
    """Returns the logarithm of what the run ended at over what was predicted."""
    _, doublings, half, measured, end = case
    later = sum(kept ** (n + 1) for n in range(doublings))
    return math.log(end / (measured - max(0.0, half - measured) * later))


if __name__ == "__main__":
    main()
