"""Fits the law of `fastlstm.text.quality_law` to the runs of `sizes.py`; needs SciPy.

usage: python benchmarks/fit_sizes.py SIZES.jsonl...
Prints the constants, the error of the fit, and the errors of `fastlstm predict` by
cross-validation: a run predicted from a shorter one by a law that was fitted without its text, or
without long runs.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from fastlstm.text.quality_law import interval_factor

FLOOR = 0.6
"""E, which is given and not fitted: runs of these lengths do not tell it (any from 0 to 0.8
predicts about as well), and a fit that is free puts it below 0. Shannon's lower estimate of printed
English (Bell System Technical Journal 30, 1951)."""
FIRST = (-0.5, 0.4, -0.7, 0.35, 0.1, -1.9, 0.7, 0.0, -0.5, -2.3, 0.0, 0.4, 0.6, 0.5)
"""log A, a, log C, c, e, log G, g, log of the repeats, AdamW's log of steps per step of Muon, log
of the first steps s, AdamW's log of the factor of the bits, logs of what two and three layers are
worth, power of the repeats."""
LONG = (2.5e6, 4.5e6, 9e6)
"""Tokens from which runs are left out."""
MIN_STEPS_MEASURED = 120
"""Of a short run; `fastlstm predict` says so of shorter ones."""
DISTANCES = {"2x": 3.0, "4x": 6.0, "8x": 12.0, "16x and 32x": math.inf}
"""Times the tokens of the short run: below which they have this name."""
MIN_STEPS_OF_SMALL = 900
"""Below it, batches under 32 lose at the rate tuned for 32, which no law of steps describes."""


def main() -> None:
    lines = "".join(Path(path).read_text(encoding="utf-8") for path in sys.argv[1:]).splitlines()
    rows = [json.loads(line) for line in lines]
    rows = usable(rows)
    texts = sorted({name_of(row) for row in rows})
    values, error = fit(rows, texts)
    names = (
        "A",
        "a",
        "C",
        "c",
        "e",
        "G",
        "g",
        "repeats",
        "adamw",
        "first",
        "adamw factor",
        "two layers",
        "three layers",
        "repeats power",
    )
    shown = dict(zip(names, values, strict=False))
    powers = ("a", "c", "e", "g", "repeats power")
    shown |= {name: np.exp(shown[name]) for name in names if name not in powers}
    print({"E": FLOOR} | {name: round(float(value), 4) for name, value in shown.items()})
    print(dict(zip(texts[1:], np.exp(values[len(names) :]).round(4), strict=True)))
    print(f"{len(rows)} runs, error {100 * np.sqrt((error**2).mean()):.2f} %")
    for row, off in sorted(zip(rows, error, strict=True), key=lambda pair: -abs(pair[1]))[:5]:
        print(f"{100 * off:+.1f} %", row["text"], row["fields"])
    own = {text: [row for row in rows if row["text"] == text] for text in texts_of(rows)}
    print("without the text:")
    told(found for text in own for found in errors_of(
        [row for row in rows if row["text"] != text], own[text]
    ))  # fmt: skip
    for tokens in LONG:
        print(f"without runs of {tokens / 1e6:g} M characters and more, of which:")
        short = [row for row in rows if row["tokens"] < tokens]
        told(errors_of(short, rows, tokens))


def texts_of(rows: list[dict[str, Any]]) -> list[str]:
    return sorted({row["text"] for row in rows})


def errors_of(
    known: list[dict[str, Any]], rows: list[dict[str, Any]], tokens: float = 0.0
) -> Iterator[tuple[float, float]]:
    """Yields (times the tokens, predicted over measured) of runs predicted from shorter ones.

    Args:
        known: runs that the law is fitted to.
        rows: runs of which each is predicted from every shorter one.
        tokens: predict only runs of so many, from runs of fewer.
    """
    values, _ = fit(known, sorted({name_of(row) for row in known}))
    for (short, short_law), (long, long_law) in itertools.permutations(
        zip(rows, law(values, rows), strict=True), 2
    ):
        if short["fields"]["steps"] < MIN_STEPS_MEASURED or not is_longer(short, long):
            continue
        if not tokens or short["tokens"] < tokens <= long["tokens"]:
            off = short["bits_per_char"] * long_law / short_law / long["bits_per_char"]
            yield long["tokens"] / short["tokens"], off


def told(found: Iterable[tuple[float, float]]) -> None:
    """Prints errors by distance, and how many of the 90 % intervals hold."""
    errors: dict[str, list[float]] = {name: [] for name in DISTANCES}
    num_held = 0
    for times, off in found:
        width = interval_factor(times)
        num_held += 1 / width <= off <= width
        next(own for name, own in errors.items() if times < DISTANCES[name]).append(off - 1)
    everything = list(itertools.chain(*errors.values()))
    for name, own in {**errors, "all": everything}.items():
        if not own:
            print(f"  {name}: no predictions")
            continue
        off = 100 * np.array(own)
        print(
            f"  {name}: {len(off)} predictions, error {np.sqrt((off**2).mean()):.2f}"
            f" %, mean {off.mean():+.2f} %, largest {abs(off).max():.1f} %"
        )
    print(f"  90 % intervals hold {num_held} of {len(everything)}")


def is_longer(short: dict[str, Any], long: dict[str, Any]) -> bool:
    """Returns whether one run is a longer one of the same model and batches."""
    same = ("rnn_size", "num_layers", "batch_size", "seq_length", "optimizer", "seed")
    return bool(
        name_of(short) == name_of(long)
        and all(short["fields"].get(name) == long["fields"].get(name) for name in same)
        and long["tokens"] > short["tokens"]
    )


def name_of(row: dict[str, Any]) -> str:
    """Returns a name of the text; one of the same name and another length is another text."""
    return f"{row['text']} of {row['train_tokens']:,}"


def usable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the runs that the law is meant for; of runs that differ in dropout, the best."""
    best: dict[str, dict[str, Any]] = {}
    for row in filter(lambda row: is_usable(row["fields"]), rows):
        same = {**row["fields"], "dropout": None, "threads": None}
        key = json.dumps([name_of(row), same], sort_keys=True)
        best[key] = min(best.get(key, row), row, key=lambda each: float(each["bits_per_char"]))
    return list(best.values())


def is_usable(fields: dict[str, Any]) -> bool:
    """Returns whether the law is meant for a run; those of AdamW without a rate had half of today's
    default."""
    if "weight_drop" in fields:
        return False
    if fields["optimizer"] == "adamw" and "learning_rate" not in fields:
        return False
    return fields["batch_size"] >= 32 or fields["steps"] >= MIN_STEPS_OF_SMALL


def fit(rows: list[dict[str, Any]], texts: list[str]) -> tuple[Any, Any]:
    """Returns constants as in FIRST, then logs of further texts' factors; and relative errors."""
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
    worth = np.exp(np.array([0.0, *p[11:13]]))
    layers = worth[[f.get("num_layers", 1) - 1 for f in fields]]
    steps = np.array([f["steps"] / 500 for f in fields])
    is_adamw = np.array([f["optimizer"] == "adamw" for f in fields], float)
    tokens = np.array([row["tokens"] for row in rows], float)
    train = np.array([row["train_tokens"] for row in rows], float)
    num_layers = np.array([f.get("num_layers", 1) for f in fields])
    repeats = np.exp(p[7]) * (size**2 * num_layers / (train / 1e6)) ** -p[13]
    again = np.maximum(tokens / train - 1, 0)
    fresh = np.minimum(tokens, train) + train * repeats * np.log1p(again / repeats)
    bits = FLOOR + np.exp(p[0]) * (layers * size) ** -p[1]
    bits += np.exp(p[2]) * (fresh / 1e6) ** -p[3] * size ** p[4]
    bits += np.exp(p[5]) * (steps * np.exp(p[8] * is_adamw) + np.exp(p[9])) ** -p[6]
    return bits * np.exp(p[10] * is_adamw)


if __name__ == "__main__":
    main()
