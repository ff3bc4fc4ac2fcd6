"""Clean blocks: the simple definition holds whatever the block size cuts through."""

import bz2
import codecs
import errno
import gzip
import json
import lzma
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import ipc

from fastlstm.errors import DataError
from fastlstm.text.data import blocks as blocks_module
from fastlstm.text.data.blocks import (
    BlockReader,
    TextRules,
    find_invalid_byte,
    refuse_binary,
    token_cut,
)
from fastlstm.text.data.parquet import column_of_texts
from fastlstm.text.data.sources import Document, open_source

BOM = codecs.BOM_UTF8
HARD = st.text(alphabet="a \r\né€😀\ufeff", max_size=12)


def in_memory(*texts):
    return tuple(Document(name=f"doc{k}", data=text) for k, text in enumerate(texts))


def read(documents, rules, block_bytes=1 << 20):
    return b"".join(BlockReader(documents, rules, block_bytes))


def definition(texts, rules):
    clean = b""
    for text in texts:
        text = text.removeprefix(BOM)
        if rules.is_text and rules.invalid_utf8 == "replace":
            text = text.decode("utf-8", "replace").encode()
        if not rules.keep_crlf:
            text = text.replace(b"\r\n", b"\n")
        joint = b"\n" if clean and text and not clean.endswith(b"\n") else b""
        clean += joint + text
    return clean


def test_a_file_that_the_disk_cannot_read_is_named(monkeypatch, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"text")
    broken = Mock(read=Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    monkeypatch.setattr(Path, "open", lambda *_: broken)
    documents = (Document("a.txt", tmp_path / "a.txt"),)
    with pytest.raises(DataError, match=r"cannot read a.txt: Input/output error"):
        read(documents, TextRules())


@settings(max_examples=300, deadline=None)
@given(
    st.lists(HARD, min_size=1, max_size=4),
    st.integers(1, 7),
    st.booleans(),
    st.sampled_from(["character", "token", "anywhere"]),
)
def test_blocks_are_the_definition_cut_between_characters(texts, block_bytes, keep_crlf, cut):
    raw = [text.encode() for text in texts]
    rules = TextRules(cut=cut, keep_crlf=keep_crlf)  # type: ignore[arg-type]
    blocks = list(BlockReader(in_memory(*raw), rules, block_bytes))
    assert b"".join(blocks) == definition(raw, rules)
    assert all(blocks)
    if cut == "character":
        for block in blocks:
            block.decode("utf-8")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=12), min_size=1, max_size=3), st.integers(1, 5))
def test_bad_bytes_are_replaced_as_if_the_text_were_whole(texts, size):
    texts = [bytes(b for b in text if b in b"\r\n" or b >= 32) for text in texts]
    texts = [b"some words to make it text " + text for text in texts]
    rules = TextRules(invalid_utf8="replace")
    assert read(in_memory(*texts), rules, size) == definition(texts, rules)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40), st.integers(1, 5))
def test_byte_rules_take_anything(text, size):
    rules = TextRules(is_text=False, cut="anywhere")
    assert read(in_memory(text), rules, size) == definition([text], rules)


def test_blocks_do_not_depend_on_how_reads_arrive(monkeypatch):
    documents = in_memory("Häuser\r\n".encode() * 30, b"x" * 50)
    rules = TextRules()
    whole = list(BlockReader(documents, rules, 16))
    monkeypatch.setattr(blocks_module, "_SNIFF_BYTES", 3)
    assert list(BlockReader(documents, rules, 16)) == whole


def test_consumed_ends_at_the_size_on_disk(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"hello\r\n" * 1000))
    source = open_source(path)
    reader = BlockReader(source.documents, TextRules(), 100)
    assert b"".join(reader) == b"hello\n" * 1000
    assert reader.consumed == source.total_bytes == path.stat().st_size


def test_gzip_of_several_members_and_gzip_without_the_suffix(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(gzip.compress(b"one ") + gzip.compress(b"two"))
    assert read(open_source(path).documents, TextRules()) == b"one two"


def test_zstd_of_several_frames(tmp_path):
    path, pack = tmp_path / "a.txt.zst", pa.Codec("zstd").compress
    frames = [pack(text, asbytes=True) for text in (b"one\r\n" * 50_000, b"two")]
    path.write_bytes(b"".join(frames))
    reader = BlockReader(open_source(path).documents, TextRules(), 999)
    assert b"".join(reader) == b"one\n" * 50_000 + b"two"
    assert reader.consumed == path.stat().st_size


def packed(kind):
    text = bytes(range(32, 127)) * 99
    return gzip.compress(text) if kind == "gz" else pa.Codec("zstd").compress(text, asbytes=True)


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("damage", ["cut", "overwritten", "short", "padded"])
def test_broken_compressed_data_is_named(tmp_path, kind, damage):
    data, path = packed(kind), tmp_path / f"a.{kind}"
    broken = {"cut": data[:-9], "overwritten": data[:-5] + b"junk!", "short": data[:5]}
    path.write_bytes(broken.get(damage, data + bytes(512)))
    wanted = rf"a.{kind}: its compressed data is damaged, or padding follows it .*; download"
    with pytest.raises(DataError, match=wanted):
        read(open_source(path).documents, TextRules())


def test_a_changed_byte_of_gzip_is_noticed_by_its_checksum(tmp_path):
    data, path = bytearray(packed("gz")), tmp_path / "a.gz"
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(DataError, match="its compressed data is damaged"):
        read(open_source(path).documents, TextRules())


@pytest.mark.parametrize(("kind", "codec"), [("gz", "gzip"), ("zst", "zstd")])
def test_plain_data_with_a_suffix_of_compressed_is_named(tmp_path, kind, codec):
    path = tmp_path / f"a.{kind}"
    path.write_bytes(b"text")
    with pytest.raises(DataError, match=f"is named .{kind} but is not {codec} data; rename it"):
        read(open_source(path).documents, TextRules())


def test_a_compressed_file_is_closed_and_a_disk_that_fails_is_no_damage(tmp_path, monkeypatch):
    path = tmp_path / "a.gz"
    path.write_bytes(packed("gz"))
    opened = [path.open("rb"), path.open("rb")]
    monkeypatch.setattr(Path, "open", lambda *_: opened[0])
    assert read((Document("a.gz", path),), TextRules()).endswith(b"}~")
    assert opened.pop(0).closed
    failing = Mock(wraps=opened[0], closed=False)
    failing.read.side_effect = [b"\x1f\x8b\x08\0", OSError(errno.EIO, "Input/output error")]
    monkeypatch.setattr(Path, "open", lambda *_: failing)
    with pytest.raises(DataError, match=r"cannot read a.gz: Input/output error"):
        read((Document("a.gz", path),), TextRules())
    opened[0].close()


def jsonl(tmp_path, *lines):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else x.encode() for x in lines))
    return open_source(path).documents


def test_json_lines_join_their_texts(tmp_path):
    lines = [json.dumps({"text": text, "n": 1}) for text in ("a\r\nb", "é\n", "", "c")]
    documents = jsonl(tmp_path, "\ufeff" + lines[0], "", *lines[1:])
    for block_bytes in (1, 2, 100):
        assert read(documents, TextRules(), block_bytes).decode() == "a\nb\né\nc"
    assert read(documents, TextRules(keep_crlf=True)).decode() == "a\r\nb\né\nc"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', "line 2: invalid JSON"),
        ("[1]", "line 2: expected a JSON object, got list"),
        ('{"body": "x", "id": 1}', "no field 'text'; its fields: body, id.*`text_field`"),
        ('{"text": 3}', "field 'text' is an int, expected a string$"),
        ('{"text": null}', "field 'text' is None, expected.*missing_text='skip'"),
        ('{"body": "x"}', "no field 'text'.*missing_text='skip'"),
        (r'{"text": "\ud800"}', "an unpaired surrogate"),
        (b'{"text": "\xff"}', "invalid UTF-8 at byte 10 of the line"),
        ("[" * 100_000, "line 2: invalid JSON"),
    ],
)
def test_a_broken_json_line_is_named(tmp_path, line, message):
    with pytest.raises(DataError, match=message):
        read(jsonl(tmp_path, '{"text": "good"}', line), TextRules())


def test_json_lines_replace_what_is_no_character(tmp_path):
    documents = jsonl(tmp_path, r'{"text": "a\ud800b"}', b'{"text": "c\xff"}')
    text = read(documents, TextRules(invalid_utf8="replace")).decode()
    assert text == "a\ufffdb\nc\ufffd"


def test_lines_without_a_text_can_be_left_out(tmp_path):
    documents = jsonl(tmp_path, '{"text": "a"}', '{"id": 9}', '{"text": null}', '{"text": ""}')
    reader = BlockReader(documents, TextRules(missing_text="skip"))
    assert b"".join(reader) == b"a"
    assert reader.repairs["skipped"] == 2


def parquet(tmp_path, texts, name="text", **options):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": range(len(texts)), name: texts}), path, **options)
    return (Document("a.parquet", path, form="parquet"),)


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
    ids=str,
)
def test_parquet_joins_its_texts(tmp_path, kind):
    texts = pa.array(["a\r\nb", "é\n", "", "c"] * 600, kind)
    documents = parquet(tmp_path, texts, row_group_size=1000)
    for block_bytes in (1, 100, 1 << 18):
        reader = BlockReader(documents, TextRules(), block_bytes)
        assert b"".join(reader).decode() == "\n".join(["a\nb\né\nc"] * 600)
        assert reader.consumed == documents[0].path.stat().st_size
    assert read(documents, TextRules(keep_crlf=True)).decode().startswith("a\r\nb\né")


@pytest.mark.parametrize("opened", [ipc.new_file, ipc.new_stream])
def test_arrow_joins_its_texts(tmp_path, opened):
    table = pa.table({"id": range(3000), "text": ["a\r\nb", "é\n", "c"] * 1000})
    with opened(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=700)
    [document] = open_source(tmp_path / "a.arrow").documents
    for block_bytes in (100, 1 << 18):
        reader = BlockReader([document], TextRules(), block_bytes)
        assert b"".join(reader).decode() == "\n".join(["a\nb\né\nc"] * 1000)
    assert column_of_texts(tmp_path / "a.arrow") is None  # short ones
    data = (tmp_path / "a.arrow").read_bytes()
    place = data.find(np.array([0, 4, 7], "int32").tobytes())
    (tmp_path / "a.arrow").write_bytes(data[:place] + b"\0\0\0\x7f" + data[place + 4 :])
    with pytest.raises(DataError, match="damaged data "):
        read([document], TextRules())


def test_a_parquet_text_that_is_missing_or_broken_is_named(tmp_path):
    broken = parquet(tmp_path, pa.array([b"a", b"b\xff", None], pa.binary()).view(pa.string()))
    with pytest.raises(DataError, match=r"a.parquet row 2: invalid UTF-8 at byte 1 of the text"):
        read(broken, TextRules())
    rules = TextRules(invalid_utf8="replace", missing_text="skip")
    reader = BlockReader(broken, rules)
    assert b"".join(reader).decode() == "a\nb\ufffd"
    assert reader.repairs == {"replaced": 1, "skipped": 1}
    with pytest.raises(DataError, match=r"row 3: 'text' is missing; .*`missing_text='skip'`"):
        read(broken, TextRules(is_text=False))


def test_a_parquet_file_without_the_texts_is_refused(tmp_path):
    body = parquet(tmp_path, ["a"], "body")
    with pytest.raises(DataError, match="no column of texts 'text'; its columns of texts: body"):
        read(body, TextRules())
    lists = parquet(tmp_path, [["a", "b"]])
    with pytest.raises(DataError, match="no column of texts 'text'; its columns of texts: none"):
        read(lists, TextRules())
    body = parquet(tmp_path, ["a"], "body")
    with pytest.raises(DataError, match="no column of texts 'id'"):
        read(body, TextRules(text_field="id"))
    assert read(body, TextRules(text_field="body")) == b"a"
    body[0].path.write_bytes(body[0].path.read_bytes()[:-9])
    with pytest.raises(DataError, match="damaged data "):
        read(body, TextRules(text_field="body"))


@pytest.mark.parametrize("block_bytes", [3, 1 << 18])
def test_utf_16_is_read_in_blocks(tmp_path, block_bytes):
    text = "a naïve — 他走进了\n" * 9
    documents = in_memory(text.encode("utf-16"))
    for is_text in (True, False):
        rules = TextRules(is_text, encoding="utf-16")
        assert read(documents, rules, block_bytes).decode() == text
    with_one = in_memory("\ud800".encode("utf-16", "surrogatepass"), b"a+2AA-")
    for document, encoding, shown in zip(
        with_one, ("utf-16", "utf-7"), ("\ufffd", "a?"), strict=True
    ):
        rules = TextRules(False, encoding=encoding, invalid_utf8="replace")
        assert read((document,), rules).decode() == shown


def test_another_text_field(tmp_path):
    assert read(jsonl(tmp_path, '{"body": "x"}'), TextRules(text_field="body")) == b"x"


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"MZ\x00", "a NUL at byte 2.*vocab='byte'"),
        (bytes(range(1, 7)) * 9, "54 control bytes"),
        ("hi".encode("utf-16"), "encoding='utf-16'"),
        ("How are you?".encode("utf-16-le"), "encoding='utf-16-le'"),
        ("How are you?".encode("utf-16-be"), "encoding='utf-16-be'"),
        (b"%PDF-1.7\n%", "is a PDF, not plain text; convert it"),
        (b"PK\3\4" + bytes(26) + b"mimetypeapplication/epub+zip", "is an EPUB"),
        (b"PK\3\4" + bytes(26) + b"[Content_Types].xml word/document.xml", "is a Word document"),
        (b"PK\3\4" + bytes(26) + b"[Content_Types].xml xl/workbook.xml", "is an Excel workbook"),
        (b"PK\3\4" + bytes(26) + b"book.txt", "is a zip archive"),
        (bz2.compress(b"a text"), "is compressed by bzip2 or xz, not plain text"),
        (lzma.compress(b"a text"), "is compressed by bzip2 or xz, not plain text"),
    ],
)
def test_binary_is_refused(head, message):
    with pytest.raises(DataError, match=message):
        refuse_binary(head, "x.bin")
    assert read(in_memory(head), TextRules(is_text=False, cut="anywhere")) == head


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("ab cd", 2), ("ab  ", 2), ("ab\n\ncd", 2), ("a\u3000 b", 1), ("a\u00a0 b\nc", 5),
        (" a", 0), ("ab12", 2), ("12ab", 2), ("ab(", 2), ("((ab", 2), ("it's", 2), ("''", 0),
        ("aaaa", 0), ("   ", 0), ("  a", 0), ("東京。大阪", 9), ("é1", 2),
        ("a\x1c", 1), ("(\x1c", 0), ("a\u2132", 0), ("\u02c6a", 0),
        ("a\u0560", 0), ("\u0560a", 0), ("\u0560(", 0), ("a\u0301", 1), ("\u0301(", 0),
    ],
)  # fmt: skip
def test_token_cut_is_where_a_word_surely_ends(text, cut):
    assert token_cut(text.encode()) == cut


def test_a_run_without_a_safe_cut_is_held_to_its_end(monkeypatch):
    rules = TextRules(cut="token")
    run = b"a" * 5000 + b" b" * 5000
    blocks = list(BlockReader(in_memory(run), rules, 16))
    assert b"".join(blocks) == run
    assert len(blocks[0]) > 5000
    assert max(map(len, blocks[1:])) <= 16, "what follows it is in blocks of the usual size"
    monkeypatch.setattr(blocks_module, "_MAX_RUN_BYTES", 1 << 12)
    with pytest.raises(DataError, match=r"doc0: 0 MiB without a word boundary.*vocab='char'"):
        list(BlockReader(in_memory(run), rules, 16))


@pytest.mark.parametrize("bad", [b"\xff", b"\xc3(", b"\xe2\x82", b"\xed\xa0\x80", b"\xc0\xaf"])
@pytest.mark.parametrize("at", [0, 5, blocks_module.BLOCK_BYTES - 1, blocks_module.BLOCK_BYTES + 3])
def test_the_first_bad_byte_is_found(bad, at):
    good = BOM + b"x\r\n" * (at // 3) + b"x" * (at % 3)
    documents = in_memory("fein ä".encode(), good + bad, b"\xff")
    assert find_invalid_byte(documents) == (documents[1], len(good))
    assert find_invalid_byte(documents[:1]) is None
