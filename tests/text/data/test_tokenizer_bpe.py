"""Byte-level BPE: nothing is unknown, blocks do not show, hostile JSON is refused."""

import functools
import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastlstm.errors import CorruptFileError, DataError, MissingExtraError
from fastlstm.text.data.blocks import BlockReader, TextRules
from fastlstm.text.data.sources import Document
from fastlstm.text.data.text import prepare_text
from fastlstm.text.data.tokenizer import BYTE_SYMBOLS, load_tokenizer, train_bpe

pytest.importorskip("tokenizers")

TEXT = (
    "the cat's hat is in the house; don't   they   know?\n\n12 über 東京 là\u00a0bas !?\x1c .\x1f\n"
    * 30
)


@functools.cache
def trained():
    return train_bpe([TEXT], 300)


@pytest.fixture
def tokenizer():
    return trained()


def test_an_unpaired_surrogate_is_refused(tokenizer):
    with pytest.raises(DataError, match="an unpaired surrogate, which is no character"):
        tokenizer.encode("the caf\udce9")  # --prompt $'the caf\xe9'


@settings(deadline=None)
@given(st.text(max_size=30))
def test_any_text_comes_back(text):
    text = text.encode("utf-8", "ignore").decode()
    tokenizer = trained()
    ids = tokenizer.encode(text)
    stream = tokenizer.stream_decoder()
    parts = [stream.push(int(token)) for token in ids]
    assert tokenizer.decode(ids) == "".join(parts) == text
    assert "\ufffd" not in "".join(parts) or "\ufffd" in text
    assert tokenizer.token_chars[ids].sum() == len(text)
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())


def test_it_learns_merges_up_to_the_size_and_the_same_ones_again(tokenizer):
    assert tokenizer.vocab_size == 300
    assert set(BYTE_SYMBOLS) <= set(tokenizer.symbols)
    assert b" the" in tokenizer.pieces
    assert any(b"?\x1c" in piece for piece in tokenizer.pieces)
    assert len(tokenizer.encode(TEXT)) < len(TEXT) / 1.5
    assert train_bpe([TEXT], 300).to_json() == tokenizer.to_json()


RUNS = st.lists(
    st.tuples(
        st.sampled_from("aZ9' \t\n\r\v(-é\u0301東。\u3000\u00a0\x1c\x85😀½\u180e\u200b\ufeff")
        | st.characters(exclude_categories=["Cs", "Cc"]),
        st.sampled_from([1, 1, 1, 2, 3, 40, 400]),
    ),
    max_size=30,
)


@settings(max_examples=300, deadline=None)
@given(runs=RUNS, crlf=st.booleans(), block_bytes=st.sampled_from([1, 2, 5, 16, 100, 1000]))
def test_ids_do_not_depend_on_the_blocks(runs, crlf, block_bytes):
    tokenizer = trained()
    text = "".join(char * count for char, count in runs)
    text = "some words " * (1 + len(text)) + text  # so that it passes for text
    text = text.replace("\n", "\r\n") if crlf else text
    whole = tokenizer._engine.encode(text).ids
    for room in (1 << 20, 3):
        fresh = load_tokenizer(tokenizer.to_json())
        assert fresh.to_json() == tokenizer.to_json()
        fresh._room = room
        for _ in range(2):
            assert fresh.encode(text).tolist() == whole
        assert fresh._room >= 0
    rules = TextRules(cut="token", keep_crlf=True)
    reader = BlockReader((Document("d", data=text.encode()),), rules, block_bytes)
    assert [i for block in reader for i in tokenizer.encode_utf8(block).tolist()] == whole


@pytest.mark.parametrize("char", "\u02c6\u0374\u2132\u2183")
def test_a_sign_that_became_a_letter_is_no_place_to_cut(char):
    run = f"{char}a" * 500
    tokenizer = train_bpe([run], 300)
    reader = BlockReader((Document("d", data=run.encode()),), TextRules(cut="token"), 16)
    ids = [token for block in reader for token in tokenizer.encode_utf8(block).tolist()]
    assert ids == tokenizer._engine.encode(run).ids


def test_preparing_a_text_gives_its_ids(tmp_path, monkeypatch):
    tokenizer = trained()
    text = (
        "a" * 3000 + "don't 12ab(\r\n)" * 9 + " " * 700 + "東京。" * 300 + "9" * 999 + "the cat\n"
    )
    path = tmp_path / "text.txt"
    path.write_bytes(text.encode())
    monkeypatch.setattr("fastlstm.text.data.text.BLOCK_BYTES", 64)
    prepared = prepare_text(path, tokenizer=tokenizer, cache_dir=tmp_path)
    assert prepared.ids.tolist() == tokenizer._engine.encode(text.replace("\r\n", "\n")).ids


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("vocab", lambda v: {"a": 1}, "vocab must be a list"),
        ("vocab", lambda v: [*v, 3], "vocab must be a list of tokens"),
        ("vocab", lambda v: [*v, v[0]], "a token occurs twice"),
        ("vocab", lambda v: [s for s in v if s != "a"], "lacks some of the 256 bytes"),
        ("vocab", lambda v: [*v, "東"], "not a byte symbol"),
        ("merges", lambda m: None, "merges must be a list"),
        ("merges", lambda m: [*m, ["q", "q"]], "does not join known tokens"),
        ("merges", lambda m: [*m, "t h"], "does not join"),
        ("merges", lambda m: [*m, [1, 2]], "does not join"),
    ],
)
def test_hostile_json_is_refused(tokenizer, field, change, message):
    record = json.loads(tokenizer.to_json())
    record[field] = change(record[field])  # type: ignore[operator]
    with pytest.raises(CorruptFileError, match=message):
        load_tokenizer(json.dumps(record).encode())


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'fastlstm\[bpe\]'.*vocab='char'"):
        train_bpe(["text"], 300)
