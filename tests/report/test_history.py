from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from fastlstm.report import history as history_module
from fastlstm.report.events import number
from fastlstm.report.history import MAX_EVENTS, MAX_POINTS, History, read_history, series


def written(tmp_path: Path, *events: Any, tail: bytes = b"") -> History:
    path = tmp_path / "metrics.jsonl"
    lines = [event if isinstance(event, bytes) else json.dumps(event).encode() for event in events]
    path.write_bytes(b"".join(line + b"\n" for line in lines) + tail)
    return read_history(path)


def step(at: int, **more: Any) -> dict[str, Any]:
    return {"event": "step", "step": at, "units": 100 * at, "elapsed_s": float(at), **more}


def valid(at: int, bits: float | None) -> dict[str, Any]:
    return {"event": "eval", "step": at, "split": "valid", "bits_per_char": bits}


def test_a_missing_file_is_an_empty_history(tmp_path: Path) -> None:
    history = read_history(tmp_path / "none")
    assert history == History()
    assert (history.best, history.elapsed_s, history.rate) == (None, None, None)


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    bad = [b"", b"[1]", b"\xff\x00", b'{"event":"step"}', b'{"event":"step","step":"1"}']
    bad.append(b"[" * 9999)
    history = written(tmp_path, step(1), *bad, step(2), tail=b'{"event": "step", "st')
    assert [event["step"] for event in history.steps] == [1, 2]


def test_steps_repeated_after_a_resume_are_kept_once(tmp_path: Path) -> None:
    first, again = ({"event": "start", "resumed_from": step} for step in (None, 2))
    stopped = [step(3, lr="lost"), valid(3, 9.0), {"event": "end", "reason": "stopped"}]
    history = written(tmp_path, first, step(1), step(2), *stopped, again, step(3, lr="new"))
    kept = [(event["step"], event.get("lr")) for event in history.steps]
    assert kept == [(1, None), (2, None), (3, "new")]
    assert history.evals == []
    assert history.end is None
    assert len(history.starts) == 2


def test_a_history_knows_where_it_was_resumed(tmp_path: Path) -> None:
    history = written(
        tmp_path, {"event": "start", "resumed_from": None, "resumed_s": None}, step(2), step(4),
        {"event": "start", "resumed_from": 4, "resumed_s": 4.5}, step(6),
        {"event": "start", "resumed_from": 2, "resumed_s": 2.5}, step(8),
        {"event": "start", "resumed_from": 7, "resumed_s": 9.5}, step(9),
    )  # fmt: skip
    assert history.resumes("step") == [2.0, 7.0]
    assert history.resumes("elapsed_s") == [2.5, 9.5]
    assert history.resumes("units") == [200.0, 700.0]


def test_a_new_start_replaces_earlier_events(tmp_path: Path) -> None:
    history = written(tmp_path, step(1), {"event": "start", "resumed_from": None}, step(5))
    assert [event["step"] for event in history.steps] == [5]


def test_best_is_the_lowest_validation(tmp_path: Path) -> None:
    test = {"event": "eval", "step": 4, "split": "test", "bits_per_char": 0.1}
    history = written(tmp_path, valid(1, 2.0), valid(2, 1.5), valid(3, None), test, valid(5, 1.7))
    assert history.best == valid(2, 1.5)


def test_best_is_an_evaluation_that_callbacks_accepted(tmp_path: Path) -> None:
    def refused(at: int, score: float) -> dict[str, Any]:
        return {**valid(at, score), "is_accepted": False}

    events = [valid(1, 0.5), refused(2, 0.1), valid(3, 2.0), valid(4, 1.5), valid(5, 1.7)]
    assert written(tmp_path, *events).best == valid(4, 1.5)
    rolled_back = [*events, refused(3, 0.1), valid(4, 1.6)]
    assert written(tmp_path, *rolled_back).best == valid(4, 1.5)
    assert written(tmp_path, *rolled_back, refused(5, 0.1)).best is None
    assert written(tmp_path, refused(1, 0.5)).best is None


def test_speed_is_units_over_training_time(tmp_path: Path) -> None:
    events = [step(10, units_per_s=50.0), {"event": "end", "units": 1000, "train_s": 4.0}]
    assert written(tmp_path, *events).rate == 250.0
    assert written(tmp_path, events[0]).rate == 50.0


def test_an_evaluation_knows_its_units(tmp_path: Path) -> None:
    counted = {**valid(21, 1.0), "units": 7}
    history = written(tmp_path, valid(5, 1.0), step(10), step(20), valid(25, 1.0), counted)
    assert [event.get("units") for event in history.evals] == [None, 2500, 7]


def test_long_series_are_averaged(tmp_path: Path) -> None:
    events = [{"x": float(at), "y": float(at % 2)} for at in range(10 * MAX_POINTS)]
    x, y = series([*events, {"x": 1.0, "y": None}], "x", "y")
    assert len(x) <= MAX_POINTS
    assert x[0] == 4.5
    assert set(y) == {0.5}


def test_a_number_beyond_a_float_is_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        f'{{"event": "start", "resumed_from": {10**400}}}\n'
        f'{{"event": "step", "step": 3, "loss": {-(10**400)}}}\n'
        '{"event": "step", "step": NaN}\n'
    )
    history = read_history(path)
    assert [event["step"] for event in history.steps] == [3]
    assert number(history.steps[0], "loss") is None


def test_a_line_without_end_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "step", "step": 1}\n')
    os.truncate(path, 400 << 20)  # a hole of zeros
    with path.open("ab") as file:
        file.write(b'\n{"event": "step", "step": 2}\n')
    tracemalloc.start()
    history = read_history(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [event["step"] for event in history.steps] == [1, 2]
    assert peak < 200 << 20


def test_very_many_events_take_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    best = 12_345
    with path.open("w") as file:
        for at in range(1, 100_001):
            loss = 0.5 if at == best else 1.0
            file.write(f'{{"event":"step","step":{at},"units":{at},"loss":1}}\n')
            file.write(f'{{"event":"eval","step":{at},"bits_per_char":{loss}}}\n')
            file.write('{"event":"message","text":"' + at % 100 * "a" + '"}\n{"event":"x"}\n')
    history = read_history(path)
    assert MAX_EVENTS // 2 <= len(history.steps) <= MAX_EVENTS
    assert len(history.notes) <= MAX_EVENTS
    assert history.steps[-1]["step"] == 100_000
    assert [event["step"] for event in history.steps] == sorted({e["step"] for e in history.steps})
    assert history.best is not None
    assert history.best["step"] == best
    assert history.best["units"] == best


def test_very_long_events_take_bounded_memory(tmp_path: Path) -> None:
    text = (1 << 20) * "a"
    events = ({"event": "sample", "step": at, "text": f"{at}{text}"} for at in range(64))
    history = written(tmp_path, *events)
    assert 1 < len(history.samples) <= 16
    assert history.samples[-1]["step"] == 63


def test_an_event_that_is_no_name_is_left_out(tmp_path: Path) -> None:
    assert written(tmp_path, {"event": ["step"], "step": 1}, {"event": {}}) == History()


def test_a_new_test_replaces_the_old_one(tmp_path: Path) -> None:
    kinds = ("start", "test", "forecast", "forecast", "start", "test", "forecast")
    events = [{"event": kind, "number": number} for number, kind in enumerate(kinds)]
    history = written(tmp_path, *events)
    assert history.test == events[5]
    assert history.forecasts == [events[6]]


def test_a_history_is_read_and_drawn_in_linear_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many evaluations between many lines of progress, and many starts."""
    looked: list[str] = []

    def counted(event: dict[str, Any], key: str) -> float | None:
        looked.append(key)
        return number(event, key)

    monkeypatch.setattr(history_module, "number", counted)
    starts = [{"event": "start", "resumed_from": at} for at in range(1, 501)]
    lines = [
        line for at, start in enumerate(starts, 1) for line in (start, step(at), valid(at, 1.0))
    ]
    found = written(tmp_path, {"event": "start"}, *lines)
    assert len(found.steps) == 500
    assert [event["units"] for event in found.evals] == [100 * at for at in range(1, 501)]
    assert len(looked) < 10 * len(lines)
