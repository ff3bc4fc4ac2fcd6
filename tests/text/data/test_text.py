"""prepare_text: the right ids, the cache, bad input, stops, kills and crowds."""

import gzip
import json
import os
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest

from fastlstm.errors import ConfigError, DataError, Stopped
from fastlstm.text.data import text as text_module
from fastlstm.text.data.blocks import BLOCK_BYTES
from fastlstm.text.data.sources import Document, InputText
from fastlstm.text.data.text import prepare_text, token_counts
from fastlstm.text.data.tokenizer import CharTokenizer

TEXT = "Well, Prince, so Genoa and Lucca — are now just\r\nfamily estates…\r\n" * 40
CLEAN = TEXT.replace("\r\n", "\n")


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(TEXT.encode("utf-8-sig"))
    os.utime(path, ns=(1, 1))
    return path


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def _never_racy(monkeypatch):
    monkeypatch.setattr(text_module, "_RACY_NS", -(10**18))


def kept(cache):
    """Returns what lies in the cache besides memos and the lock."""
    return [path.name for kind in ("entries/*", "work-*") for path in (cache / "text").glob(kind)]


def prepare(source, cache, block_bytes=BLOCK_BYTES, **settings):
    with pytest.MonkeyPatch.context() as context:
        context.setattr(text_module, "BLOCK_BYTES", block_bytes)
        return prepare_text(source, cache_dir=cache, **settings)  # type: ignore[arg-type]


def test_char_ids_and_counts(book, cache):
    data = prepare(book, cache, block_bytes=11)
    chars = sorted(set(CLEAN))
    assert data.ids.tolist() == [chars.index(char) for char in CLEAN]
    assert isinstance(data.ids, np.memmap)
    assert data.ids.dtype == np.uint8
    assert (data.num_chars, data.num_bytes) == (len(CLEAN), len(CLEAN.encode()))
    assert data.tokenizer.decode(data.ids) == CLEAN
    assert token_counts(data.ids, len(chars)).tolist() == list(map(CLEAN.count, chars))


@pytest.mark.parametrize("vocab", ["char", "byte", "bpe"])
def test_a_second_start_encodes_nothing(book, cache, vocab):
    if vocab == "bpe":
        pytest.importorskip("tokenizers")
    first = prepare(book, cache, vocab=vocab, vocab_size=300)
    assert first.tokenizer.decode(first.ids) == CLEAN
    assert not first.from_cache
    second = prepare(book, cache, vocab=vocab, vocab_size=300, should_stop=lambda: True)
    assert second.from_cache
    assert second.key == first.key
    assert second.ids.tolist() == first.ids.tolist()
    assert second.tokenizer.to_json() == first.tokenizer.to_json()


def test_the_cache_knows_content_and_settings(book, cache, tmp_path):
    first = prepare(book, cache)
    same = tmp_path / "other.txt"
    same.write_bytes(book.read_bytes())
    assert prepare(same, cache).key == first.key
    assert prepare(same, cache).from_cache
    assert not prepare(book, cache, keep_crlf=True).from_cache
    assert not prepare(book, cache, vocab="byte").from_cache
    packed = tmp_path / "book.txt.gz"
    packed.write_bytes(gzip.compress(book.read_bytes()))
    assert prepare(packed, cache).key == first.key


def test_a_changed_file_of_the_same_size_is_noticed(book, cache):
    first = prepare(book, cache)
    book.write_bytes(book.read_bytes().replace(b"Lucca", b"Lucia"))
    os.utime(book, ns=(1, 1))  # even with its old time: ctime gives it away
    second = prepare(book, cache)
    assert second.key != first.key
    assert "Lucia" in second.tokenizer.decode(second.ids[:100])


def test_a_file_written_just_now_is_read_again(book, cache, monkeypatch):
    monkeypatch.setattr(text_module, "_RACY_NS", 10**18)
    prepare(book, cache)
    with pytest.raises(Stopped):
        prepare(book, cache, should_stop=lambda: True)
    assert prepare(book, cache).from_cache


def test_a_given_tokenizer_shares_the_entry_it_made(book, cache):
    first = prepare(book, cache)
    again = prepare(book, cache, tokenizer=first.tokenizer)
    assert again.from_cache
    assert again.key == first.key
    wider = CharTokenizer("".join(sorted({*CLEAN, "Ω"})))
    other = prepare(book, cache, tokenizer=wider)
    assert other.key != first.key
    assert other.tokenizer.decode(other.ids) == CLEAN


def test_characters_a_given_tokenizer_lacks_are_listed(book, cache):
    narrow = CharTokenizer("".join(sorted(set(CLEAN) - set("—…"))))
    with pytest.raises(DataError) as caught:
        prepare(book, cache, tokenizer=narrow)
    dash, dots = CLEAN.index("—"), CLEAN.index("…")
    told = f"book.txt: characters that are not in the vocabulary: '—' at {dash}, '…' at {dots};"
    assert told in str(caught.value)
    assert kept(cache) == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "book.txt is empty; give a file with text"),
        (b"MZ\x00\x01" * 99, "looks like a binary file"),
        (b"na\xc3\xafve \xe9" * 99, "at byte 7; .*`invalid_utf8='replace'` .*`vocab='byte'`"),
    ],
)
def test_bad_input_gives_one_clear_line(book, cache, data, message):
    book.write_bytes(data)
    with pytest.raises(DataError, match=message) as caught:
        prepare(book, cache)
    assert "\n" not in str(caught.value)
    assert kept(cache) == []


def test_invalid_utf8_can_be_replaced_or_taken_as_bytes(book, cache):
    book.write_bytes(b"na\xefve" * 99)
    replaced = prepare(book, cache, invalid_utf8="replace")
    assert replaced.tokenizer.decode(replaced.ids) == "na\ufffdve" * 99
    assert any(note.startswith("99 invalid bytes") for note in replaced.notes)
    assert prepare(book, cache, invalid_utf8="replace").notes == replaced.notes
    assert bytes(prepare(book, cache, vocab="byte").ids) == b"na\xefve" * 99


@pytest.mark.parametrize(
    ("encoding", "text", "shown"),
    [
        (
            "gb18030",
            "他走进了房间，窗外下着雨。\n",
            r"\('他走进了房间，窗外下着雨', a guess; big5 reads .*\)",
        ),
        ("cp1252", "Größe, façade, “naïve”\n", r"\('“naïve”', a guess; cp1250 reads '“naďve”'\)"),
    ],
)
def test_another_encoding_is_named_and_read(encoding, text, shown, book, cache):
    book.write_bytes((text * 200).encode(encoding))
    with pytest.raises(DataError, match=f"like {encoding} {shown}: pass `encoding='{encoding}'`"):
        prepare(book, cache)
    found = prepare(book, cache, encoding=encoding)
    assert found.tokenizer.decode(found.ids) == text * 200
    assert found.notes == ()


def test_an_encoding_that_holds_surrogates_is_refused_in_one_line(book, cache):
    book.write_bytes(b"text +2AA- " * 200)
    with pytest.raises(DataError, match=r"invalid UTF-7 at byte 5; convert the file"):
        prepare(book, cache, encoding="utf-7")


def test_ten_characters_are_too_few_to_split(cache):
    data = prepare(InputText("text", (Document("text", data=b"ten chars."),)), cache)
    with pytest.raises(DataError, match=r"text has only 10 characters \(10 tokens\); training"):
        data.split()


def test_split_is_contiguous_and_complete(book, cache):
    data = prepare(book, cache)
    num = len(data.ids)
    shares_of = {"90/5/5": (0.9, 0.05), "90/10/0": (0.9, 0.1), "50/25/25": (0.5, 0.25)}
    for spec, shares in shares_of.items():
        parts = data.split(spec)
        assert np.concatenate([parts.train, parts.valid, parts.test]).tolist() == data.ids.tolist()
        assert len(parts.train) == int(num * shares[0] + 1e-6)
        assert abs(len(parts.valid) - num * shares[1]) <= 1
    assert len(data.split("90/10/0").test) == 0


@pytest.mark.parametrize("vocab", ["char", "bpe"])
def test_a_second_start_counts_nothing_but_another_split_does(vocab, book, cache, monkeypatch):
    if vocab == "bpe":
        pytest.importorskip("tokenizers")
    first = prepare(book, cache, vocab=vocab, vocab_size=300)
    counts, lengths = first.train_counts("80/10/10"), [len(p) for p in vars(first.split()).values()]
    with monkeypatch.context() as context:
        for name in ("release_pages", "token_counts"):  # a pass over the ids calls one of them
            context.setattr(text_module, name, None)
        again = prepare(book, cache, vocab=vocab, vocab_size=300)
        assert again.train_counts("80/10/10").tolist() == counts.tolist()
        assert [len(part) for part in vars(again.split()).values()] == lengths
        with pytest.raises(TypeError):
            again.train_counts("70/20/10")
    other = again.train_counts("70/20/10")
    end = len(again.split("70/20/10").train)
    assert other.tolist() == token_counts(again.ids[:end], again.tokenizer.vocab_size).tolist()
    assert other.sum() < counts.sum()


@pytest.mark.parametrize("damage", ["null", "[5]", "text", None])
def test_a_damaged_memo_is_counted_again(damage, book, cache):
    pytest.importorskip("tokenizers")
    data = prepare(book, cache, vocab="bpe", vocab_size=300)
    before = set((cache / "text" / "memo").iterdir())
    counts, parts = data.train_counts(), data.split()
    for memo in set((cache / "text" / "memo").iterdir()) - before:
        value, digest = json.loads(memo.read_text())
        smaller = value // 2 if isinstance(value, int) else value[::-1]
        memo.write_text(json.dumps([smaller, digest]) if damage is None else damage)
    assert data.train_counts().tolist() == counts.tolist()
    assert len(data.split().train) == len(parts.train)


def test_counts_that_cannot_be_remembered_are_returned(book, cache):
    data = prepare(book, cache)
    shutil.rmtree(cache)
    assert data.train_counts().sum() == len(data.split().train)


def test_bpe_is_learned_from_the_training_split_only(cache, tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(text_module, "_COUNT_BLOCK", 7)
    path = tmp_path / "book.txt"
    path.write_text("größer " * 80 + "unseen " * 20, "utf-8")
    data = prepare(path, cache, vocab="bpe", vocab_size=300, train_share=0.8)
    assert " größer".encode() in data.tokenizer.pieces
    assert b"un" not in data.tokenizer.pieces
    split = data.split("80/10/10")
    assert data.tokenizer.decode(split.train) == "größer " * 80
    assert data.tokenizer.decode(split.valid) == "unseen " * 10
    assert data.train_counts("80/10/10").sum() == len(split.train)
    again = prepare(path, cache, vocab="bpe", vocab_size=300, train_share=0.8).split("80/10/10")
    assert [list(part) for part in vars(again).values()] == [list(p) for p in vars(split).values()]
    whole = prepare(path, cache, vocab="bpe", train_share=1.0)
    assert b"unseen" in b"".join(whole.tokenizer.pieces)


def test_token_counts_over_many_blocks(monkeypatch):
    monkeypatch.setattr(text_module, "_COUNT_BLOCK", 7)
    ids = np.array([0, 1, 1, 4] * 10, dtype=np.uint32)
    assert token_counts(ids, 6).tolist() == [10, 20, 0, 0, 10, 0]
    monkeypatch.setattr(text_module, "_COUNT_BLOCK", 8)
    for end in (40, 39):
        wanted = np.bincount(ids[:end], minlength=5)
        assert token_counts(ids[:end].astype(np.uint8), 5).tolist() == wanted.tolist()


@pytest.mark.parametrize("polls", range(0, 12, 3))
def test_a_stop_at_any_block_keeps_nothing_half_done(book, cache, polls):
    calls = iter([False] * polls)
    with pytest.raises(Stopped):
        prepare(book, cache, block_bytes=500, should_stop=lambda: next(calls, True))
    assert kept(cache) == []
    assert prepare(book, cache).tokenizer.decode(prepare(book, cache).ids) == CLEAN


def test_progress_ends_at_the_total(book, cache):
    seen: list[tuple[int, int | None]] = []
    prepare(book, cache, block_bytes=100, on_progress=lambda *pair: seen.append(pair))
    assert seen == sorted(seen)
    assert seen[-1] == (book.stat().st_size, book.stat().st_size)


def test_stdin_and_pipes_are_read_once_and_spooled(cache, tmp_path, monkeypatch):
    reading, writing = os.pipe()
    feeder = threading.Thread(target=_feed, args=(writing, TEXT.encode()))
    feeder.start()
    with open(reading) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        data = prepare("-", cache)
    feeder.join()
    assert data.tokenizer.decode(data.ids) == CLEAN
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    feeder = threading.Thread(target=lambda: fifo.write_bytes(gzip.compress(TEXT.encode())))
    feeder.start()
    assert prepare(fifo, cache).key == data.key
    feeder.join()
    assert len(kept(cache)) == 1


def _feed(descriptor, data):
    with open(descriptor, "wb") as file:
        file.write(data)


def test_a_silent_stdin_can_be_stopped(cache, monkeypatch):
    reading, writing = os.pipe()
    calls = iter([False, False])
    with open(reading) as stdin, open(writing, "wb"):
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(Stopped, match="while reading stdin"):
            prepare("-", cache, should_stop=lambda: next(calls, True))
    assert kept(cache) == []


def test_a_closed_stdin_is_said(cache, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(DataError, match="stdin is closed"):
        prepare("-", cache)


def test_an_unwritable_cache_is_a_usage_error(book):
    with pytest.raises(ConfigError, match="cache_dir"):
        prepare(book, book / "below")


KILLED = """
import os, signal, sys
from fastlstm.text.data import text
calls = 0
def stop():
    global calls
    calls += 1
    if calls == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
text.BLOCK_BYTES = 400
text.prepare_text(sys.argv[1], cache_dir=sys.argv[2], should_stop=stop)
"""


def start(code, *arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], env=environment)


def test_a_killed_encoding_leaves_nothing_that_is_taken_for_whole(book, cache):
    for process in [start(KILLED, book, cache, polls) for polls in (3, 14)]:
        assert process.wait() == -9
    assert list((cache / "text" / "entries").iterdir()) == []
    assert kept(cache)
    data = prepare(book, cache)
    assert not data.from_cache
    assert data.tokenizer.decode(data.ids) == CLEAN
    assert kept(cache) == [data.key]


def test_two_processes_at_once_both_end_well(book, cache):
    for process in [start(KILLED, book, cache, 10**9) for _ in range(2)]:
        assert process.wait() == 0
    data = prepare(book, cache)
    assert data.from_cache
    assert data.tokenizer.decode(data.ids) == CLEAN
    assert kept(cache) == [data.key]
