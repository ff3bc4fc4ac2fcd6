"""Parallel passes give what one line of Python gives, and stop when told."""

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastlstm.errors import DataError, Stopped, StorageError
from fastlstm.system import hardware
from fastlstm.text.data.blocks import TextRules
from fastlstm.text.data.encoding import Pass, Scan, find_unseen, learn_bpe, scan, write_ids
from fastlstm.text.data.sources import Document, InputText
from fastlstm.text.data.tokenizer import CharTokenizer


def work(text, block_bytes=7, **more):
    data = text.encode() if isinstance(text, str) else text
    source = InputText("made", (Document("made", data=data),))
    rules = more.pop("rules", TextRules())
    return Pass(source, rules, block_bytes, **more)  # type: ignore[arg-type]


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet="ab \r\né€😀", min_size=1, max_size=60), st.integers(1, 9))
def test_any_number_of_cores_and_any_blocks_give_the_same(tmp_path_factory, text, block_bytes):
    clean = text.replace("\r\n", "\n")
    chars = "".join(sorted(set(clean)))
    path = tmp_path_factory.mktemp("ids") / "ids.bin"
    for cores in (1, 3):
        with pytest.MonkeyPatch.context() as context:
            context.setattr(hardware, "cores", lambda cores=cores: cores)
            job = work(text, block_bytes)
            found = scan(job)
            count = write_ids(job, CharTokenizer(chars), found, path)
        assert "".join(map(chr, np.flatnonzero(found.seen))) == chars
        assert (found.num_bytes, found.num_chars) == (len(clean.encode()), len(clean))
        assert found.content == scan(work(text, 1 << 20)).content
        assert count == len(clean)
        assert np.fromfile(path, np.uint8).tolist() == [chars.index(char) for char in clean]
        path.unlink()


def test_byte_scan_counts_characters_of_any_bytes():
    rules = TextRules(is_text=False, cut="anywhere")
    found = scan(work("aé😀".encode() + b"\xff\x00", rules=rules))
    assert (found.num_bytes, found.num_chars) == (9, 5)


def test_should_stop_is_polled_for_every_block(monkeypatch):
    monkeypatch.setattr("fastlstm.text.data.encoding._LEARN_BLOCK_BYTES", 7)
    calls = iter([False] * 5 + [True])
    job = work("word " * 500, should_stop=lambda: next(calls))
    with pytest.raises(Stopped, match="stopped while encoding made; nothing was stored"):
        learn_bpe(job, 300, Scan("", 2500, 2500, np.empty(0)), 1.0)
    assert next(calls, None) is None


def test_a_text_that_changes_between_passes_is_noticed(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("abcabc")
    job = Pass(InputText("book.txt", (Document("book.txt", path=path),)), TextRules(), 4)
    found = scan(job)
    path.write_text("abcabb")
    with pytest.raises(DataError, match=r"book\.txt changed while it was being read; run again"):
        write_ids(job, CharTokenizer("abc"), found, tmp_path / "ids.bin")


def test_a_full_disk_is_a_storage_error(tmp_path, monkeypatch):
    job = work("abc" * 10)
    found = scan(job)
    monkeypatch.setattr(hardware, "cores", lambda: 2)  # which would read files
    monkeypatch.setattr(Path, "open", lambda *_, **__: io.FileIO("/dev/full", "wb"))
    with pytest.raises(StorageError, match="No space left"):
        write_ids(job, CharTokenizer("abc"), found, tmp_path / "ids.bin")


def test_short_writes_are_continued(tmp_path, monkeypatch):
    class ShortWrites(io.FileIO):
        def write(self, data):
            return super().write(bytes(data[:2]))

    job = work("abcabcaab", 100)
    found = scan(job)
    monkeypatch.setattr(hardware, "cores", lambda: 2)  # which would read files
    monkeypatch.setattr(Path, "open", lambda path, mode, **_: ShortWrites(path, mode))
    write_ids(job, CharTokenizer("abc"), found, tmp_path / "ids.bin")
    assert (tmp_path / "ids.bin").read_bytes() == bytes([0, 1, 2, 0, 1, 2, 0, 0, 1])


def test_unseen_characters_are_found_where_they_first_occur():
    found = find_unseen(work("aaXa\r\nYaXY"), CharTokenizer("\na"), 2)
    assert found == [("X", 2), ("Y", 5)]


@pytest.mark.parametrize("block_bytes", [100, 2000])
def test_bpe_learns_from_the_whole_text(monkeypatch, block_bytes):
    pytest.importorskip("tokenizers")
    monkeypatch.setattr("fastlstm.text.data.encoding.TRAINING_BYTES", 2000)
    monkeypatch.setattr("fastlstm.text.data.encoding._LEARN_BLOCK_BYTES", 100)
    rules = TextRules(cut="token")
    text = "start " * 400 + "finish " * 400
    job = work(text, block_bytes, rules=rules)
    tokenizer = learn_bpe(job, 300, scan(job), 1.0)
    assert b" start" in tokenizer.pieces
    assert b" finish" in tokenizer.pieces
