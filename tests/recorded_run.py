"""A made-up run as the trainer would report it, and a stream that is a terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

Event = dict[str, Any]

START: Event = {
    "event": "start", "run": "runs/a book", "source": "data/book.txt", "device": "cpu",
    "precision": "bf16", "precision_why": "measured 9.8 ms a step, fp32 21.4 ms", "threads": 2,
    "model": {
        "vocab_size": 111, "embed_size": 128, "rnn_size": 512, "num_layers": 2, "dropout": 0.1,
        "dropout_kind": "variational", "output_norm": True,
    },
    "num_parameters": 138_737_500, "flop_per_unit": 8_250_000, "ceiling_gflops": 412.3,
    "vocab_size": 111, "vocab": "char", "task": "text", "unit": "tokens",
    "num_units": {"train": 912_351_200, "valid": 160_750_123, "test": 160_750_123},
    "kernels": [
        "layer 0: aten, oneDNN LSTM bf16 (AMX), and a very long reason why there is nothing faster",
        "layer 1: aten, oneDNN LSTM bf16 (AMX)",
    ],
    "end": "budget 2m", "batch_size": 32, "seq_length": 128, "accumulate": 4, "optimizer": "muon",
    "learning_rate": 0.02, "resumed_from": 1200, "resumed_s": 36.4, "seed": 0,
}  # fmt: skip

STEP: Event = {
    "event": "step", "step": 123_456_789, "epoch": 1.5, "units": 987_654_321, "progress": 0.47,
    "loss": 1.2345, "bits_per_char": 1.781, "lr": 0.02, "grad_norm": 0.7, "units_per_s": 182_345.6,
    "gflops": 251.2, "ceiling_share": 0.613, "input_wait_share": 0.0012, "elapsed_s": 228.0,
    "eta_s": 252.0,
}  # fmt: skip

EVAL: Event = {
    "event": "eval", "step": 123_456_789, "split": "valid", "loss": 1.1869, "bits_per_char": 1.7123,
    "bits_per_byte": 1.70, "perplexity": 3.277, "seconds": 1.2, "is_best": True,
    "elapsed_s": 3723.0, "num_units": 160_750,
}  # fmt: skip

SAMPLE: Event = {
    "event": "sample", "step": 1200,
    "text": '\n"Well, Prince, \x1b[31mso\x07 ' + "戦争と平和" * 12 + "\n\tthe end\n",
}  # fmt: skip

END: Event = {
    "event": "end", "reason": "budget 2m", "step": 123_456_789, "units": 987_654_321,
    "elapsed_s": 121.3, "train_s": 114.2, "best_step": 123_456_789, "best_bits_per_char": 1.7123,
    "final": EVAL, "run": "runs/a book",
}  # fmt: skip

SKIP: Event = {
    "event": "skip", "step": 5, "what": "non-finite", "tensor": "layers.0.weight_hh_l0.grad",
    "action": "rolled back",
}  # fmt: skip

CHECKPOINT: Event = {
    "event": "checkpoint", "step": 5, "path": "runs/b/checkpoint-5", "seconds": 0.3,
    "bytes": 16_700_000,
}  # fmt: skip


@pytest.fixture
def events():
    """One of every kind, with nine-digit counts."""
    return [
        {"event": "prepare", "done_bytes": 120_000_000, "total_bytes": 1_000_000_000},
        START,
        {"event": "message", "level": "info", "text": "dropout 0.1: seen 1.7 times"},
        {"event": "message", "level": "warning", "text": "a long warning " * 9},
        STEP, SKIP, EVAL, SAMPLE, CHECKPOINT,
        {**STEP, "progress": 1.0, "units": 999_999_999, "eta_s": 359_999.0, "loss": None},
        END,
    ]  # fmt: skip


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch):
    """An 80-column terminal with colours."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def add_event(run: Path, **event: Any) -> None:
    """Adds an event to the metrics.jsonl of a run."""
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")
