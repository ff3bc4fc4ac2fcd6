"""Fits the law of `fastlstm.text.quality_law` to the runs of `sizes.py`; needs SciPy.

usage: python benchmarks/fit_sizes.py SIZES.jsonl...
Prints the constants, the error of the fit, and the errors of `fastlstm predict` by cross-validation
by text: a run predicted from a shorter one by the law of the other texts.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from fastlstm.text.quality_prediction import interval_factor

FIRST = (0.9, -0.5, 0.4, -0.7, 0.35, 0.1, -1.9, 0.7, 1.0, -0.5, -2.3)
"""E, log A, a, log C, c, e, log G, g, log of the repeats, AdamW's log of steps per step of Muon,
log of the first steps s."""
MIN_STEPS_MEASURED = 120
"""Of a short run; `fastlstm predict` says so of shorter ones."""
DISTANCES = {"2x": 3.0, "4x": 6.0, "8x": 12.0, "16x and 32x": math.inf}
"""Times the tokens of the short run: below which they have this name."""
MIN_STEPS_OF_SMALL = 900
"""Below it, batches under 32 lose at the rate tuned for 32, which no law of steps describes."""


def main() -> None:
    lines = "".join(Path(path).read_text(encoding="utf-8") for path in sys.argv[1:]).splitlines()
    rows = [json.loads(line) for line in lines]
    rows = [row for row in rows if is_usable(row["fields"])]
    texts = sorted({name_of(row) for row in rows})
    values, error = fit(rows, texts)
    names = ("E", "A", "a", "C", "c", "e", "G", "g", "repeats", "adamw", "first")
    shown = dict(zip(names, values, strict=False))
    shown |= {name: np.exp(shown[name]) for name in ("A", "C", "G", "repeats", "adamw", "first")}
    print({name: round(float(value), 4) for name, value in shown.items()})
    print(dict(zip(texts[1:], np.exp(values[len(names) :]).round(4), strict=True)))
    print(f"{len(rows)} runs, error {100 * np.sqrt((error**2).mean()):.2f} %")
    for row, off in sorted(zip(rows, error, strict=True), key=lambda pair: -abs(pair[1]))[:5]:
        print(f"{100 * off:+.1f} %", row["text"], row["fields"])
    cross_validate(rows)


def cross_validate(rows: list[dict[str, Any]]) -> None:
    """Prints the errors of runs predicted from shorter ones by the law of the other texts."""
    errors: dict[str, list[float]] = {name: [] for name in DISTANCES}
    num_held = 0
    for text in sorted({row["text"] for row in rows}):
        others = [row for row in rows if row["text"] != text]
        values, _ = fit(others, sorted({name_of(row) for row in others}))
        own = [row for row in rows if row["text"] == text]
        expected = law(values, own)
        for (short, short_law), (long, long_law) in itertools.permutations(
            zip(own, expected, strict=True), 2
        ):
            if short["fields"]["steps"] < MIN_STEPS_MEASURED or not is_longer(short, long):
                continue
            times = long["tokens"] / short["tokens"]
            off = short["bits_per_char"] * long_law / short_law / long["bits_per_char"]
            width = interval_factor(times)
            num_held += 1 / width <= off <= width
            next(found for name, found in errors.items() if times < DISTANCES[name]).append(off - 1)
    for name, found in errors.items():
        off = 100 * np.array(found)
        print(
            f"{name}: {len(off)} predictions of another text, error {np.sqrt((off**2).mean()):.2f}"
            f" %, mean {off.mean():+.2f} %, largest {abs(off).max():.1f} %"
        )
    print(f"90 % intervals hold {num_held} of {sum(map(len, errors.values()))}")


def is_longer(short: dict[str, Any], long: dict[str, Any]) -> bool:
    """Returns whether one run is a longer one of the same model and batches."""
    same = ("rnn_size", "batch_size", "seq_length", "optimizer", "seed")
    return bool(
        name_of(short) == name_of(long)
        and all(short["fields"][name] == long["fields"][name] for name in same)
        and long["tokens"] > short["tokens"]
    )


def name_of(row: dict[str, Any]) -> str:
    """Returns a name of the text; one of the same name and another length is another text."""
    return f"{row['text']} of {row['train_tokens']:,}"


def is_usable(fields: dict[str, Any]) -> bool:
    """Returns whether the law is meant for a run."""
    return fields["batch_size"] >= 32 or fields["steps"] >= MIN_STEPS_OF_SMALL


def fit(rows: list[dict[str, Any]], texts: list[str]) -> tuple[Any, Any]:
    """Returns constants, then the log of each further text's factor; and relative errors."""
    text = np.array([texts.index(name_of(row)) for row in rows])
    bits = np.array([row["bits_per_char"] for row in rows])

    def errors(p: Any) -> Any:
        factors = np.exp(np.concatenate(([0.0], p[len(FIRST) :])))
        return law(p, rows) * factors[text] / bits - 1

    first = np.concatenate((FIRST, np.zeros(len(texts) - 1)))
    found = least_squares(errors, first, loss="soft_l1", f_scale=0.01, max_nfev=20_000)
    return found.x, errors(found.x)


def law(p: Any, rows: list[dict[str, Any]]) -> Any:
    """Returns the bits/char of runs of the first text, by constants as in FIRST."""
    fields = [row["fields"] for row in rows]
    size = np.array([f["rnn_size"] / 256 for f in fields])
    steps = np.array([f["steps"] / 500 for f in fields])
    is_adamw = np.array([f["optimizer"] == "adamw" for f in fields], float)
    tokens = np.array([row["tokens"] for row in rows], float)
    train = np.array([row["train_tokens"] for row in rows], float)
    repeats = np.exp(p[8])
    again = np.maximum(tokens / train - 1, 0)
    fresh = np.minimum(tokens, train) + train * repeats * (1 - np.exp(-again / repeats))
    bits = p[0] + np.exp(p[1]) * size ** -p[2]
    bits += np.exp(p[3]) * (fresh / 1e6) ** -p[4] * size ** p[5]
    bits += np.exp(p[6]) * (steps * np.exp(p[9] * is_adamw) + np.exp(p[10])) ** -p[7]
    return bits


if __name__ == "__main__":
    main()
