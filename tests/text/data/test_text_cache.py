from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fastlstm.text.data.text import TextCache
from fastlstm.text.data.tokenizer import CharTokenizer

KEY = "0" * 64
IDS = [0, 1, 2, 1]


@pytest.fixture
def cache(tmp_path: Path) -> TextCache:
    """A cache with one text."""
    cache, tokenizer = TextCache(tmp_path), CharTokenizer("abc")
    with cache.work_directory() as work:
        (work / "ids.bin").write_bytes(np.array(IDS, dtype=tokenizer.dtype).tobytes())
        counts = {"num_bytes": 4, "num_chars": 5, "num_replaced": 0, "num_skipped": 0}
        cache.store(KEY, work, tokenizer, 4, [("x", 3)], **counts)
    return cache


def test_a_stored_text_is_found(cache: TextCache) -> None:
    entry = cache.find(KEY)
    assert entry.ids.tolist() == IDS
    assert isinstance(entry.ids, np.memmap)
    assert entry.tokenizer.decode(entry.ids) == "abcb"
    assert (entry.key, entry.num_chars, entry.unknown) == (KEY, 5, (("x", 3),))


@pytest.mark.parametrize("name", ["ids.bin", "tokenizer.json", "meta.json"])
def test_an_entry_without_a_file_is_none(cache: TextCache, name: str) -> None:
    (cache.path(KEY) / name).unlink()
    assert cache.find(KEY) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("num_tokens", 3), ("num_tokens", "4"), ("num_chars", 5.0), ("fingerprint", "f")),
        *(("more", 1), ("unknown", [["x"]]), ("unknown", None)),
    ],
)
def test_an_entry_with_other_fields_is_none(cache: TextCache, field: str, value: object) -> None:
    path = cache.path(KEY) / "meta.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    assert cache.find(KEY) is None


def test_the_tokenizer_of_another_text_is_noticed(cache: TextCache) -> None:
    (cache.path(KEY) / "tokenizer.json").write_bytes(CharTokenizer("abd").to_json())
    assert cache.find(KEY) is None
