"""Vocabularies: ids, text, counts of bytes and characters, and JSON that is not trusted."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastlstm.errors import CorruptFileError, DataError, FormatError
from fastlstm.text.data.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    code_points,
    load_tokenizer,
)

ALPHABET = "\n abcé€𝄞😀"
CHAR = CharTokenizer("".join(sorted(ALPHABET)))
BYTE = ByteTokenizer()
TEXTS = st.text(alphabet=ALPHABET, max_size=30)


@given(TEXTS)
def test_char_ids_are_the_index_in_the_vocabulary(text):
    ids = CHAR.encode(text)
    assert ids.tolist() == [CHAR.chars.index(char) for char in text]
    assert CHAR.encode_utf8(text.encode()).tolist() == ids.tolist()


def test_more_than_256_characters_take_two_bytes_each():
    chars = "".join(map(chr, range(0x4E00, 0x4E00 + 300))) + "😀"
    tokenizer = CharTokenizer("ab" + chars)
    assert tokenizer.dtype == np.uint16
    for text in ("abba", chars[::-1], "a😀b"):
        assert tokenizer.encode_utf8(text.encode()).tolist() == tokenizer.encode(text).tolist()
        assert tokenizer.decode(tokenizer.encode(text)) == text


@given(TEXTS)
def test_byte_ids_are_the_bytes(text):
    assert BYTE.encode(text).tolist() == list(text.encode())


@pytest.mark.parametrize("tokenizer", [CHAR, BYTE], ids=["char", "byte"])
@given(text=TEXTS)
def test_decode_stream_and_counts(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_chars[ids].sum() == len(text)
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    stream = tokenizer.stream_decoder()
    parts = [stream.push(int(token)) for token in ids]
    assert "".join(parts) == text
    assert "\ufffd" not in "".join(parts)
    assert stream.flush() == ""


def test_a_stream_that_ends_inside_a_character_says_so():
    stream = BYTE.stream_decoder()
    assert stream.push(0xE2) == ""
    assert stream.push(0x82) == ""
    assert stream.flush() == "\ufffd"
    assert BYTE.decode([0xE2, 0x82, 65]) == "\ufffdA"


def test_unseen_characters_are_listed_with_their_positions():
    with pytest.raises(DataError) as caught:
        CHAR.encode("aXbXYé")
    assert str(caught.value).startswith("characters that are not in the vocabulary: 'X' at 1, 'Y'")
    with pytest.raises(DataError, match="'M' at 12 and 3 more") as caught:
        CHAR.encode("abcDEFGHIJKLMNOP")
    assert str(caught.value).count(" at ") == 10


def test_code_points_outside_the_first_plane():
    assert code_points("a😀").tolist() == [97, 0x1F600]
    assert code_points("aé").dtype == np.uint16


@pytest.mark.parametrize(
    ("size", "dtype"), [(256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.uint32)]
)
def test_smallest_dtype(size, dtype):
    tokenizer = ByteTokenizer()
    tokenizer.pieces = [b"x"] * size
    assert tokenizer.dtype == dtype


@pytest.mark.parametrize("tokenizer", [CHAR, BYTE], ids=["char", "byte"])
def test_json_and_back(tokenizer):
    data = tokenizer.to_json()
    again = load_tokenizer(data)
    assert type(again) is type(tokenizer)
    assert again.to_json() == data
    assert again.fingerprint == tokenizer.fingerprint
    assert len(tokenizer.fingerprint) == 64
    assert CharTokenizer("ab").fingerprint != CharTokenizer("ac").fingerprint


def record(**changes):
    good = {"format": "fastlstm-tokenizer", "format_version": 1, "kind": "char", "chars": "ab"}
    return json.dumps({**good, **changes}).encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[1]", "is not a fastlstm tokenizer"),
        (b"[" * 100_000, "nested deeper"),
        (b'{"format": NaN}', "NaN is not JSON"),
        (b'{"a": 1, "a": 2}', "appears twice"),
        (record(format="x"), "not a fastlstm tokenizer"),
        (record(kind="word"), "kind is 'word', expected char, byte or bpe"),
        (record(chars=3), "chars is int"),
        (record(chars=""), "distinct and ascending"),
        (record(chars="ba"), "distinct and ascending"),
        (record(chars="aa"), "distinct and ascending"),
        (record(chars="a\ud800"), "surrogates not allowed"),
    ],
)
def test_hostile_json_is_refused_and_named(data, message):
    with pytest.raises(CorruptFileError, match=message) as caught:
        load_tokenizer(data, "run/tokenizer.json")
    assert "run/tokenizer.json" in str(caught.value)


@pytest.mark.parametrize("version", [0, 2, True, "1"])
def test_another_format_is_named(version):
    with pytest.raises(FormatError, match=f"format version {version!r}, this fastlstm reads 1;"):
        load_tokenizer(record(format_version=version))


@given(st.data())
def test_any_damage_gives_a_typed_error_or_a_tokenizer(data):
    good = bytearray(CHAR.to_json())
    at = data.draw(st.integers(0, len(good) - 1))
    good[at] = data.draw(st.integers(0, 255))
    try:
        load_tokenizer(bytes(good))
    except (CorruptFileError, FormatError):
        return


def test_tokens_that_are_not_there_are_refused():
    for tokenizer in (BYTE, CharTokenizer("abé")):
        for ids in ([tokenizer.vocab_size], [-tokenizer.vocab_size - 1]):
            with pytest.raises(IndexError):
                tokenizer.decode(ids)
    assert CharTokenizer("abé😀").decode([2, 0, 3]) == "éa😀"
