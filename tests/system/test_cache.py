"""Entries are whole or not there; work of the dead is swept, work of the living is not."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fastlstm.errors import ConfigError
from fastlstm.system.cache import make_key, release_pages
from fastlstm.text.data.text import TextCache, TextDataset
from fastlstm.text.data.tokenizer import CharTokenizer

TOKENIZER = CharTokenizer("abc")
KEY = make_key("test")


def store(cache: TextCache, ids: bytes = b"\x00\x01\x02") -> TextDataset:
    with cache.work_directory() as work:
        entry = work / "entry"
        entry.mkdir()
        (entry / "ids.bin").write_bytes(ids)
        counts = {"num_bytes": 3, "num_chars": 3, "num_replaced": 0, "num_skipped": 0}
        return cache.store(KEY, entry, TOKENIZER, len(ids), **counts)


def work_directories(root: Path) -> list[str]:
    return [path.name for path in (root / "text").glob("work-*")]


def test_an_entry_is_stored_and_found(tmp_path):
    assert TextCache(tmp_path).find(KEY) is None
    stored = store(TextCache(tmp_path))
    again = store(TextCache(tmp_path))  # as another process may meanwhile
    found = TextCache(tmp_path).find(KEY)
    assert found.ids.tolist() == stored.ids.tolist() == again.ids.tolist() == [0, 1, 2]
    assert found.ids.dtype == np.uint8
    assert found.tokenizer.fingerprint == TOKENIZER.fingerprint
    assert work_directories(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("ids.bin", b"\x00\x01"),
        ("ids.bin", None),
        ("meta.json", b"{"),
        ("meta.json", b'{"num_tokens": 3}'),
        ("meta.json", None),
        ("tokenizer.json", CharTokenizer("abd").to_json()),
        ("tokenizer.json", b"\xff"),
    ],
)
def test_a_damaged_entry_is_not_taken_and_is_replaced(tmp_path, name, data):
    store(TextCache(tmp_path))
    path = tmp_path / "text" / "entries" / KEY / name
    path.unlink() if data is None else path.write_bytes(data)
    assert TextCache(tmp_path).find(KEY) is None
    assert store(TextCache(tmp_path)).ids.tolist() == [0, 1, 2]
    assert TextCache(tmp_path).find(KEY) is not None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("num_tokens", 2), ("num_tokens", "3"), ("num_chars", 5.0), ("fingerprint", "f")),
        *(("more", 1), ("unknown", [["x"]]), ("unknown", None)),
    ],
)
def test_an_entry_with_other_fields_is_not_taken(tmp_path, field, value):
    store(TextCache(tmp_path))
    path = tmp_path / "text" / "entries" / KEY / "meta.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    assert TextCache(tmp_path).find(KEY) is None


def test_work_of_dead_processes_is_swept_and_of_living_ones_kept(tmp_path):
    code = (
        "import sys, os, signal\n"
        "from pathlib import Path\n"
        "from fastlstm.text.data.text import TextCache\n"
        "with TextCache(Path(sys.argv[1])).work_directory() as work:\n"
        "    (work / 'ids.bin').write_bytes(b'half')\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stdout.readline() == b"ready\n"
        (theirs,) = work_directories(tmp_path)
        with TextCache(tmp_path).work_directory() as mine:
            assert sorted(work_directories(tmp_path)) == sorted([theirs, mine.name])
        assert work_directories(tmp_path) == [theirs]
        process.kill()
    assert work_directories(tmp_path) == [theirs]
    with TextCache(tmp_path).work_directory() as mine:
        assert work_directories(tmp_path) == [mine.name]


def test_a_failed_encoding_leaves_nothing(tmp_path):
    cache = TextCache(tmp_path)

    def fail() -> None:
        with cache.work_directory() as work:
            (work / "ids.bin").write_bytes(b"half")
            raise RuntimeError("disk gone")

    with pytest.raises(RuntimeError, match="disk gone"):
        fail()
    assert work_directories(tmp_path) == []
    assert cache.find(KEY) is None


def test_memos_come_back_and_damaged_ones_do_not_count(tmp_path):
    cache = TextCache(tmp_path)
    assert cache.recall(KEY) is None
    cache.remember(KEY, ["x", 1])
    assert TextCache(tmp_path).recall(KEY) == ["x", 1]
    (tmp_path / "text" / "memo" / f"{KEY}.json").write_bytes(b"[")
    assert cache.recall(KEY) is None


def test_keys_differ_with_every_part():
    assert make_key("a", {"b": 1, "c": 2}) == make_key("a", {"c": 2, "b": 1})
    assert len({make_key("a", "b"), make_key("ab"), make_key("a", ["b"]), make_key("b", "a")}) == 4


def test_a_cache_that_cannot_be_written_names_the_switch(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written .*`cache_dir` or FASTLSTM_CACHE"):
        TextCache(tmp_path / "file" / "below")


def test_released_pages_read_the_same(tmp_path):
    path = tmp_path / "ids.bin"
    np.arange(1 << 20, dtype=np.uint16).tofile(path)
    ids = np.memmap(path, np.uint16, "r")
    before = int(ids[1000:].sum(dtype=np.int64))
    for part in (ids, ids[1000:], np.asarray(ids[1000:])):
        release_pages(part)
        assert int(ids[1000:].sum(dtype=np.int64)) == before
    release_pages(np.zeros(3, np.uint8))


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_releasing_lowers_resident_memory(tmp_path):
    path = tmp_path / "ids.bin"
    num_bytes = 64 << 20
    with path.open("wb") as file:
        for _ in range(64):
            file.write(bytes(range(256)) * 4096)
    ids = np.memmap(path, np.uint8, "r")

    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    assert int(ids[::4096].sum(dtype=np.int64)) == 0
    full = resident()
    release_pages(ids[5:])
    assert full - resident() > num_bytes // 2
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_cached_files_are_private(tmp_path, umask):
    for path in (tmp_path / "cache", tmp_path / "cache" / "text", tmp_path / "cache/text/entries"):
        path.mkdir(mode=0o777)
    before = os.umask(umask)
    try:
        cache = TextCache(tmp_path / "cache")
        cache.remember(KEY, 1)
        with cache.work_directory() as work:
            assert stat.S_IMODE(work.stat().st_mode) == 0o700
            (work / "entry").mkdir()
            (work / "entry" / "ids.bin").write_bytes(b"ab")
            cache.place(KEY, work / "entry", lambda: 1)
    finally:
        os.umask(before)
    found = {p: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "cache" / "text").rglob("*")}
    assert len(found) == 7
    for path, mode in found.items():
        assert mode == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((tmp_path / "cache" / "text").stat().st_mode) == 0o700


def test_a_cache_of_another_user_is_refused_and_keeps_its_mode(tmp_path, monkeypatch):
    """Its owner could put other ids there, which would be trained on."""
    for path in (tmp_path / "text", tmp_path / "text/entries", tmp_path / "text/memo"):
        path.mkdir()
        path.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        TextCache(tmp_path)
    for path in (tmp_path / "text").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o755


def test_a_changed_byte_is_found(tmp_path, monkeypatch):
    """The size stayed: such ids were trained on, to 0.0006 bits a character."""
    monkeypatch.setattr("fastlstm.system.cache._CHUNK_BYTES", 4)
    data = bytes(n % 3 for n in range(11))
    store(TextCache(tmp_path), data)
    assert TextCache(tmp_path).find(KEY) is not None
    path = tmp_path / "text" / "entries" / KEY / "ids.bin"
    path.write_bytes(data[:9] + b"\x02" + data[10:])
    assert TextCache(tmp_path).find(KEY) is None
    assert store(TextCache(tmp_path), data).ids.tobytes() == data


@pytest.mark.parametrize("change", ["mode", "link", "owner", "mode of the directory"])
def test_files_that_others_may_write_are_not_used(tmp_path, monkeypatch, change):
    cache = TextCache(tmp_path)
    store(cache)
    cache.remember(KEY, {"a": 1})
    entry, memo = tmp_path / "text/entries" / KEY, tmp_path / "text/memo" / f"{KEY}.json"
    if change == "mode":
        (entry / "ids.bin").chmod(0o620)
        memo.chmod(0o602)
    elif change == "mode of the directory":
        entry.chmod(0o770)
        memo.unlink()
    elif change == "link":
        for path in (entry / "ids.bin", memo):
            path.rename(tmp_path / path.name)
            path.symlink_to(tmp_path / path.name)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert cache.find(KEY) is None
    assert cache.recall(KEY) is None


def test_a_link_among_work_directories_leads_to_no_loss(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_bytes(b"precious")
    cache = TextCache(tmp_path / "cache")
    (tmp_path / "cache/text/work-0").symlink_to(kept)
    store(cache)
    assert (kept / "file").read_bytes() == b"precious"
    assert work_directories(tmp_path / "cache") == []
