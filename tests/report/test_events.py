"""Events of every kind of run, and of runs that an earlier version stored, are shown alike."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from fastlstm.report.events import current, decode_event, measure_of, number, text_of, unit_of
from fastlstm.report.history import read_history
from fastlstm.report.page import write_report
from fastlstm.report.progress import PlainOutput

STORED = Path(__file__).parents[1] / "format1" / "stored"
RENAMED = {
    "text": {"units": "tokens", "units_per_s": "tokens_per_s", "flop_per_unit": "flop_per_token"},
    "forecast": {
        **{"units": "windows", "units_per_s": "windows_per_s"},
        "flop_per_unit": "flop_per_window",
    },
}
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


def in_format_1(event: dict[str, Any], task: str) -> dict[str, Any]:
    keys = {**RENAMED[task], **({"num_units": "num_tokens"} if event["event"] == "eval" else {})}
    found = {keys.get(key, key): value for key, value in event.items()}
    if event["event"] == "start":
        del found["unit"]
        for split, size in found.pop("num_units").items():
            found[f"{split}_{UNITS[task]}"] = size
        if task == "text":
            del found["task"]
    return found


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


@pytest.mark.parametrize("task", RENAMED)
def test_format_1_is_shown_as_today(task: str, tmp_path: Path) -> None:
    today = run_of(task)
    old = [in_format_1(event, task) for event in today]
    pages = []
    for name, events in (("today", today), ("old", old)):
        run = tmp_path / name / "run"
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
        pages.append(write_report(run).read_text())
    assert pages[0] == pages[1]


@pytest.mark.parametrize(("name", "unit"), [("char", "tokens"), ("windows", "windows")])
def test_stored_runs_of_format_1(name: str, unit: str) -> None:
    history = read_history(STORED / name / "metrics.jsonl")
    assert (history.unit, unit_of(history.start)) == (unit, unit)
    assert history.end is not None
    assert history.end["units"] == history.end["step"] * 32 or unit == "windows"
    assert number(history.start["num_units"], "train") in (720, 70)
    assert history.rate == history.end["units"] / history.end["train_s"]
    assert history.best is not None
    assert history.measure == measure_of({"task": "text" if unit == "tokens" else "forecast"})


def test_windows_of_a_test_are_no_units() -> None:
    test = {"event": "test", "windows": 3, "of_windows": 9}
    assert current(test) == test


@pytest.mark.parametrize("value", [None, True, "1", [1], float("nan"), 10**400])
def test_what_is_no_number_is_none(value: Any) -> None:
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
