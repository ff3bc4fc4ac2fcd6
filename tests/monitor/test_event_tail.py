from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from fastlstm.monitor import run_summary
from fastlstm.monitor.run_summary import EventTail


def line(step: int, **more: Any) -> bytes:
    return json.dumps({"event": "step", "step": step, **more}).encode() + b"\n"


def steps_of(lines: list[bytes]) -> list[int]:
    return [event["step"] for event in map(json.loads, lines) if event["event"] == "step"]


def add(path: Path, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


def steps(tail: EventTail) -> list[int]:
    return steps_of(tail.read())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_each_event_is_returned_once(path: Path) -> None:
    tail = EventTail(path)
    assert steps(tail) == []
    add(path, line(1) + line(2))
    assert steps(tail) == [1, 2]
    assert steps(tail) == []
    add(path, line(3))
    assert steps(tail) == [3]


def test_a_half_written_line_waits_for_its_end(path: Path) -> None:
    tail = EventTail(path)
    add(path, line(1) + line(2)[:7])
    assert steps(tail) == [1]
    add(path, line(2)[7:-1])
    assert steps(tail) == []
    add(path, b"\n")
    assert steps(tail) == [2]


@pytest.mark.parametrize("more", [b"", line(7) + line(8) + line(9)])
def test_a_cut_file_is_read_again_also_if_it_has_grown(path: Path, more: bytes) -> None:
    add(path, line(1) + line(2))
    tail = EventTail(path)
    tail.read()
    os.truncate(path, len(line(1)))
    add(path, more)
    assert (steps(tail), tail.num_replaced) == ([1, *([7, 8, 9] if more else [])], 1)


def test_a_replaced_file_is_read_from_its_beginning(path: Path, tmp_path: Path) -> None:
    add(path, line(1))
    tail = EventTail(path)
    tail.read()
    other = tmp_path / "other"
    add(other, line(1) + line(5))
    other.replace(path)
    assert (steps(tail), tail.num_replaced) == ([1, 5], 1)


def test_a_link_or_a_directory_has_no_events(path: Path, tmp_path: Path) -> None:
    add(tmp_path / "elsewhere", line(1))
    path.symlink_to(tmp_path / "elsewhere")
    assert EventTail(path).read() == []
    path.unlink()
    path.mkdir()
    assert EventTail(path).read() == []


def test_memory_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_summary, "MAX_JSON_BYTES", 100)
    long = b'{"event": "step", "step": 0, "text": "' + b"x" * 250 + b'"}\n'
    data = line(1) + long + b"".join(map(line, range(2, 30)))
    add(path, data)
    tail = EventTail(path)
    found, calls = steps(tail), 1
    while tail.has_more:
        found += steps(tail)
        calls += 1
    assert found == list(range(1, 30))
    assert calls > len(data) // 100


def test_an_unchanged_file_is_not_opened(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(path, line(1) + b"{")
    tail = EventTail(path)
    tail.read()
    monkeypatch.setattr(run_summary, "open_regular", None)
    assert tail.read() == []


def test_a_file_rewritten_in_place_with_the_same_size_and_time_is_read_again(path: Path) -> None:
    end = json.dumps({"event": "end", "reason": "as planned " * 9}).encode() + b"\n"
    add(path, line(1) + end)
    tail = EventTail(path)
    tail.read()
    before = path.stat()
    time.sleep(0.05)  # the file system's clock has ticks
    path.write_bytes(line(2) + end)  # of as many bytes, under the same inode
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (steps(tail), tail.num_replaced) == ([2], 1)
