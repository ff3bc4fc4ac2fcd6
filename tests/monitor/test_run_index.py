from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fastlstm.errors import RunDirectoryError
from fastlstm.monitor.event_tail import EventTail
from fastlstm.monitor.run_index import _FORMAT, RunIndex, find_runs


def names(index: RunIndex) -> list[str]:
    return [path.name for path in index.runs]


def test_runs_are_found_at_any_depth(write_run: Any, tmp_path: Path) -> None:
    write_run("a")
    write_run("deep/er/b")
    write_run("a/checkpoint-5")
    write_run(".hidden")
    assert [path.name for path in find_runs([tmp_path, tmp_path / "a"])[0]] == ["a", "b"]


def test_runs_appear_and_go(write_run: Any, tmp_path: Path) -> None:
    write_run("a")
    index = RunIndex([tmp_path], tmp_path / "c.sqlite")
    assert index.update()
    assert not index.update()
    (write_run("b") / "metrics.jsonl").rename(tmp_path / "a" / "old")
    write_run("c")
    index._searched_at -= 60.0
    assert index.update()
    assert names(index) == ["a", "c"]


def test_what_was_read_once_is_not_read_again(
    write_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run("a")
    write_run("b", is_ended=False)
    before = sorted(tmp_path.rglob("*"))
    cache = tmp_path / "cache" / "c.sqlite"
    first = RunIndex([tmp_path], cache)
    first.update()
    assert sorted(path for path in tmp_path.rglob("*") if cache.parent not in path.parents) == [
        *before[:1], *sorted([*before[1:], cache.parent])
    ]  # fmt: skip
    with open(tmp_path / "b" / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"event": "end", "reason": "done"}\n')
    read: list[int] = []
    original = EventTail.read_lines

    def counting(tail: EventTail) -> Any:
        lines = original(tail)
        read.append(sum(map(bool, lines)))
        return lines

    monkeypatch.setattr(EventTail, "read_lines", counting)
    second = RunIndex([tmp_path], cache)
    second.update()
    assert sorted(read) == [0, 1]
    assert [run.state for run in second.runs.values()] == ["finished", "finished"]
    assert [run.best for run in second.runs.values()] == [2.0, 2.0]


@pytest.mark.parametrize("content", [b"no database", b"", None])
def test_a_damaged_cache_is_made_anew(write_run: Any, tmp_path: Path, content: Any) -> None:
    write_run("a")
    cache = tmp_path / "c.sqlite"
    if content is None:
        with sqlite3.connect(cache) as database:
            columns = "path TEXT PRIMARY KEY, summary TEXT, training, validation, machine"
            database.execute(f"CREATE TABLE runs_{_FORMAT} ({columns})")
            row = (str(tmp_path / "a"), "[3", b"1", None, 7)
            database.execute(f"INSERT INTO runs_{_FORMAT} VALUES (?, ?, ?, ?, ?)", row)
    else:
        cache.write_bytes(content)
    for _ in range(2):
        index = RunIndex([tmp_path], cache)
        index.update()
        assert [run.best for run in index.runs.values()] == [2.0]


def test_a_cache_that_cannot_be_written_is_done_without(write_run: Any, tmp_path: Path) -> None:
    write_run("a")
    (tmp_path / "file").write_text("")
    index = RunIndex([tmp_path], tmp_path / "file" / "c.sqlite")
    assert index.update()
    assert names(index) == ["a"]


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no such directory"):
        RunIndex([tmp_path / "none"])


def test_a_cache_that_another_monitor_has_locked_is_kept(
    write_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run("a")
    cache = tmp_path / "c.sqlite"
    RunIndex([tmp_path], cache).update()
    inode = cache.stat().st_ino
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda path, timeout: connect(path, timeout=0.0))
    with closing(connect(cache)) as other:
        other.execute("BEGIN EXCLUSIVE")
        index = RunIndex([tmp_path], cache)
        index.update()
        assert names(index) == ["a"]
    assert cache.stat().st_ino == inode
