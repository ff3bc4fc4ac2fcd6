"""A run directory with the metrics of a made-up run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fastlstm.report.page import write_report
from recorded_run import START, events, terminal  # noqa: F401

NASTY = "<script>alert('x')</script>&\x1b[31m"


def made_events(num_steps: int = 60) -> list[dict[str, Any]]:
    """What metrics.jsonl holds after a run of two minutes."""
    start = {
        **START, "resumed_from": None, "source": f"{NASTY}book.txt", "flop_per_unit": 10_233_700,
        "precision_why": f"measured {NASTY}", "learning_rate": 0.0123,
        "kernels": [f"layer 0: oneDNN {NASTY}"],
    }  # fmt: skip
    warning = {"event": "message", "level": "warning", "text": f"a note {NASTY}"}
    made: list[dict[str, Any]] = [start, warning]
    for index in range(1, num_steps + 1):
        share = index / num_steps
        bits = 1.6 + 5 * math.exp(-9 * share)
        moment = {"step": 10 * index, "elapsed_s": 120 * share}
        figures = {"units": 40_960 * index, "progress": share, "bits_per_char": bits}
        figures |= {"lr": 0.02 * share, "grad_norm": 1 / index, "units_per_s": 41_000.0}
        shares = {"ceiling_share": 0.61, "input_wait_share": 0.001}
        made.append({"event": "step", **moment, **figures, **shares})
        if index % 20 == 0:
            figures = {"bits_per_char": bits + 0.05, "perplexity": 3.2, "loss": 1.2}
            made.append({"event": "eval", "split": "valid", **moment, **figures})
            made.append({"event": "sample", "step": 10 * index, "text": f"wrote {NASTY}\n\tmore"})
    made.append({"event": "skip", "step": 5, "what": "non-finite", "tensor": NASTY, "action": "x"})
    made.append({"event": "end", "reason": "budget 2m", "units": 2_457_600, "train_s": 100.0})
    return made


def make_run(parent: Path) -> Path:
    """Writes a finished run without a report."""
    directory = parent / "a <b>book"
    directory.mkdir()
    lines = [json.dumps(event) + "\n" for event in made_events()]
    (directory / "metrics.jsonl").write_text("".join(lines))
    config = {"train": {"rnn_size": 512, "layer_norm": True, "learning_rate": None, "vocab": NASTY}}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A finished run without a report."""
    return make_run(tmp_path)


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a finished run, to be read only."""
    return write_report(make_run(tmp_path_factory.mktemp("finished")))
