"""Events of every kind of run are shown alike."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from fastlstm.report.events import decode_event, number, text_of
from fastlstm.report.page import write_report
from fastlstm.report.progress import PlainOutput

UNITS = {"text": "tokens", "forecast": "windows", "sequence": "sequences"}


def run_of(task: str) -> list[dict[str, Any]]:
    """A run as the trainer emits it today."""
    sizes = {"train": 9000, "valid": 300}
    measures = {"bits_per_char": 2.5} if task == "text" else {}
    measures |= {"accuracy": 0.75} if task == "sequence" else {}
    best = {"best_bits_per_char": 2.5} if task == "text" else {"best_loss": 1.5}
    return [
        {"event": "start", "task": task, "unit": UNITS[task], "flop_per_unit": 1_000_000,
         "num_units": sizes, "ceiling_gflops": 100.0, "end": "20 steps"},
        *({"event": "step", "step": at, "units": 100 * at, "units_per_s": 5000.0, "loss": 1.5,
           "elapsed_s": at, **measures} for at in (10, 20)),
        {"event": "eval", "step": 20, "split": "valid", "loss": 1.5, "elapsed_s": 21.0,
         "num_units": 300, "is_best": True, **measures},
        {"event": "end", "reason": "20 steps", "step": 20, "units": 2000, "elapsed_s": 22.0,
         "train_s": 0.4, "best_step": 20, "run": "runs/a", **best},
    ]  # fmt: skip


def shown(events: list[dict[str, Any]]) -> str:
    stream = io.StringIO()
    output = PlainOutput(stream)
    for event in events:
        output(event)
    return stream.getvalue()


@pytest.mark.parametrize("task", UNITS)
def test_every_kind_of_run_is_shown_in_its_own_unit(task: str, tmp_path: Path) -> None:
    unit, events = UNITS[task], run_of(task)
    text = shown(events)
    assert f"{unit}: 9,000 training, 300 validation\n" in text
    assert f"  5.0k {unit}/s" in text
    assert f"speed: 5.0k {unit}/s in training steps, 5.0% of the ceiling, 91 {unit}/s" in text
    assert f"trained: 20 steps, 2,000 {unit}\n" in text
    measure = "2.5000 validation bits/char" if task == "text" else "1.5000 validation loss"
    assert f"best: {measure} at step 20\n" in text
    others = set(UNITS.values()) - {unit}
    assert not any(other in text for other in others)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    page = write_report(tmp_path).read_text()
    assert f"Quality by {unit}" in page
    assert f"{unit.capitalize()} trained on per second." in page
    assert re.search(rf"{unit} +9,000 training, 300 validation\n", page)
    assert ("<th>accuracy</th>" in page) == (task == "sequence")
    assert ("validation, 1.5000 loss, accuracy 0.75, best" in text) == (task == "sequence")
    assert not any(other in page for other in others)


@pytest.mark.parametrize("value", [None, True, "1", [1], float("nan"), 10**400])
def test_other_values_are_no_numbers(value: Any) -> None:
    assert number({"key": value}, "key") is None
    assert number({}, "key") is None


def test_a_text_is_one_line_without_control_characters() -> None:
    event = {"source": ["a\nb", "\x1b[2J\ud800 é"], "none": None}
    assert text_of(event, "source") == r"a\nb, \x1b[2J\ud800 é"
    assert (text_of(event, "none"), text_of(event, "missing")) == ("", "")


def test_an_event_nested_too_deep_to_be_shown_is_damaged() -> None:
    deep = b'{"event":"start","model":' + b"[" * 70 + b"]" * 70 + b"}"
    assert decode_event(deep) is None
    assert decode_event(b'{"event":"start","model":[' + b"[]," * 100 + b"[]]}") is not None
