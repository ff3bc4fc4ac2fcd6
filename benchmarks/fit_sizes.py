"""Fits the law of `fastlstm.text.quality_law` to the runs of `sizes.py`; needs SciPy.

usage: python benchmarks/fit_sizes.py SIZES.jsonl...
Prints the constants, the error of the fit, and that of each text predicted from the others.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

FIRST = (0.9, -0.5, 0.4, -0.7, 0.35, 0.1, -1.9, 0.7, 1.0, 0.5, -2.3)
"""E, log A, a, log C, c, e, log G, g, log of the repeats, AdamW's log of steps per step of Muon,
log of the first steps s."""
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


def name_of(row: dict[str, Any]) -> str:
    """Returns a name of the text; one of the same name and another length is another text."""
    return f"{row['text']} of {row['train_tokens']:,}"


def is_usable(fields: dict[str, Any]) -> bool:
    """Returns whether the law is meant for a run."""
    return fields["batch_size"] >= 32 or fields["steps"] >= MIN_STEPS_OF_SMALL


def fit(rows: list[dict[str, Any]], texts: list[str]) -> tuple[Any, Any]:
    """Returns constants, then the log of each further text's factor; and relative errors."""
    fields = [row["fields"] for row in rows]
    size = np.array([f["rnn_size"] / 256 for f in fields])
    steps = np.array([f["steps"] / 500 for f in fields])
    is_adamw = np.array([f["optimizer"] == "adamw" for f in fields], float)
    tokens = np.array([row["tokens"] for row in rows], float)
    train = np.array([row["train_tokens"] for row in rows], float)
    text = np.array([texts.index(name_of(row)) for row in rows])
    bits = np.array([row["bits_per_char"] for row in rows])

    def errors(p: Any) -> Any:
        repeats = np.exp(p[8])
        again = np.maximum(tokens / train - 1, 0)
        fresh = np.minimum(tokens, train) + train * repeats * (1 - np.exp(-again / repeats))
        law = p[0] + np.exp(p[1]) * size ** -p[2]
        law += np.exp(p[3]) * (fresh / 1e6) ** -p[4] * size ** p[5]
        law += np.exp(p[6]) * (steps * np.exp(-p[9] * is_adamw) + np.exp(p[10])) ** -p[7]
        return law * np.exp(np.concatenate(([0.0], p[11:])))[text] / bits - 1

    first = np.concatenate((FIRST, np.zeros(len(texts) - 1)))
    found = least_squares(errors, first, loss="soft_l1", f_scale=0.01, max_nfev=20_000)
    values = found.x.copy()
    values[9] = -values[9]
    return values, errors(found.x)


if __name__ == "__main__":
    main()
