"""Tokenizers: text to token ids and back; char and byte here, BPE in bpe.py."""

from __future__ import annotations

import codecs
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import (
    CorruptFileError,
    DataError,
    FormatError,
    UnknownCharacterError,
)
from fastlstm.system.storage import parse_json

FORMAT_VERSION = 1
_NUM_CODE_POINTS = 0x110000

Ids = NDArray[Any]


def smallest_dtype(vocab_size: int) -> np.dtype[Any]:
    """Returns the smallest unsigned dtype that holds ids below `vocab_size`."""
    num_bytes = 1 if vocab_size <= 1 << 8 else 2 if vocab_size <= 1 << 16 else 4
    return np.dtype(f"u{num_bytes}")


def code_points(text: str) -> Ids:
    """Returns the Unicode code points of `text`, uint16 where they all fit, else uint32."""
    data = text.encode("utf-16-le", "surrogatepass")
    if len(data) == 2 * len(text):
        return np.frombuffer(data, np.uint16)
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


class Tokenizer(ABC):
    """A vocabulary of V tokens, each a string of bytes.

    Attributes:
        kind: ``char``, ``byte`` or ``bpe``.
        pieces: the bytes of every token, by id.
    """

    kind: str
    pieces: list[bytes]

    @abstractmethod
    def encode(self, text: str) -> Ids:
        """Returns the ids of `text`, 1-d, in `dtype`; DataError lists up to ten unknown
        characters."""

    def encode_utf8(self, data: bytes) -> Ids:
        """Returns the ids of UTF-8 text without unknown characters; thread-safe, for files."""
        return self.encode(data.decode("utf-8"))

    def _fields(self) -> dict[str, Any]:
        """Returns the fields of `to_json` besides the kind."""
        return {}

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens."""
        return len(self.pieces)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned dtype that holds an id."""
        return smallest_dtype(self.vocab_size)

    @cached_property
    def token_bytes(self) -> NDArray[np.int64]:
        """UTF-8 bytes of every token, shape ``(V,)``."""
        return np.array([len(piece) for piece in self.pieces], dtype=np.int64)

    @cached_property
    def token_chars(self) -> NDArray[np.float64]:
        """Characters of every token, shape ``(V,)``; UTF-8 continuation bytes are not counted.

        The sum over a text is its number of characters, for any vocabulary.
        """
        counts = [sum((byte & 0xC0) != 0x80 for byte in piece) for piece in self.pieces]
        return np.array(counts, dtype=np.float64)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`; invalid bytes become U+FFFD."""
        pieces = self.pieces
        return b"".join([pieces[int(token)] for token in ids]).decode("utf-8", "replace")

    def stream_decoder(self, held: bytes = b"") -> StreamDecoder:
        """Returns a decoder for ids that arrive one by one; it never splits a character."""
        return StreamDecoder(self.pieces, held)

    def to_json(self) -> bytes:
        """Returns canonical JSON for `load_tokenizer`."""
        record = {
            "format": "fastlstm-tokenizer",
            "format_version": FORMAT_VERSION,
            "kind": self.kind,
        }
        text = json.dumps({**record, **self._fields()}, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8")

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of `to_json()`, hexadecimal."""
        return hashlib.sha256(self.to_json()).hexdigest()


class StreamDecoder:
    """Decodes ids as they arrive, holding back bytes of an incomplete character.

    Raises:
        ValueError: `held`, from an earlier decoder, is not an incomplete character.
    """

    def __init__(self, pieces: list[bytes], held: bytes = b"") -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        if self._decoder.decode(held) or self.held != held:
            raise ValueError(f"{held[:8]!r} is not the beginning of one UTF-8 character")

    @property
    def held(self) -> bytes:
        """The bytes held back, at most three."""
        return self._decoder.getstate()[0]

    def push_all(self, tokens: Iterable[int]) -> str:
        """Returns the text that `tokens` complete."""
        pieces = self._pieces
        return self._decoder.decode(b"".join([pieces[token] for token in tokens]))

    def push(self, token: int) -> str:
        """Returns the text that `token` completes; may be empty."""
        return self._decoder.decode(self._pieces[token])

    def flush(self) -> str:
        """Returns U+FFFD for an incomplete character, else an empty text."""
        return self._decoder.decode(b"", final=True)


class CharTokenizer(Tokenizer):
    """One token per character; `chars` are ascending by code point."""

    kind = "char"

    def __init__(self, chars: str) -> None:
        if not chars or list(chars) != sorted(set(chars)):
            raise DataError("characters of a vocabulary must be distinct and ascending")
        self.chars = chars
        self.pieces = [char.encode("utf-8") for char in chars]
        self._table = np.zeros(_NUM_CODE_POINTS, dtype=smallest_dtype(len(chars)))
        self._table[code_points(chars)] = np.arange(len(chars))
        self._known = np.zeros(_NUM_CODE_POINTS, dtype=np.bool_)
        self._known[code_points(chars)] = True
        # bytes.translate runs at 1 GB/s on ASCII blocks, a gather at 0.4 (2-core Xeon)
        fits = len(chars) <= 256
        self._ascii = self._table[:256].astype(np.uint8).tobytes() if fits else None

    def encode(self, text: str) -> Ids:
        points = code_points(text)
        if not self._known[points].all():
            raise UnknownCharacterError(describe_unseen(self.unknown_in(text)))
        return self._table[points]

    def unknown_in(self, text: str) -> list[tuple[str, int]]:
        """Returns the unknown characters in order, with the first position of each."""
        points = code_points(text)
        positions = np.flatnonzero(~self._known[points])
        chars, first = np.unique(points[positions], return_index=True)
        unknown = [(chr(c), int(positions[at])) for c, at in zip(chars, first, strict=True)]
        return sorted(unknown, key=lambda pair: pair[1])

    def encode_utf8(self, data: bytes) -> Ids:
        if self._ascii is not None and data.isascii():
            return np.frombuffer(data.translate(self._ascii), np.uint8)
        return self._table.take(code_points(data.decode("utf-8")), mode="clip")

    def holds_any(self, seen: NDArray[np.bool_]) -> bool:
        """Returns whether any character marked in `seen` (by code point) has a token."""
        return bool((seen & self._known).any())

    def unseen(self, seen: NDArray[np.bool_]) -> str:
        """Returns the characters marked in `seen` (by code point) without a token."""
        return "".join(map(chr, np.flatnonzero(seen & ~self._known)))

    def _fields(self) -> dict[str, Any]:
        return {"chars": self.chars}


class KnownCharacters(CharTokenizer):
    """A `CharTokenizer` that skips unknown characters."""

    def encode(self, text: str) -> Ids:
        points = code_points(text)
        return self._table[points[self._known[points]]]

    def encode_utf8(self, data: bytes) -> Ids:
        return self.encode(data.decode("utf-8"))


def shown_characters(characters: Sequence[tuple[str, int]]) -> str:
    """Returns ``'☃' at 12, 'ß' at 35`` for (character, position) pairs."""
    return ", ".join(f"{char!r} at {position:,}" for char, position in characters)


def describe_unseen(characters: list[tuple[str, int]]) -> str:
    """Returns the message for unknown characters, as (character, position) pairs."""
    more = f" and {len(characters) - 10} more" if len(characters) > 10 else ""
    return (
        f"characters that are not in the vocabulary: {shown_characters(characters[:10])}{more};"
        " remove them, or train with `vocab='byte'` or bpe, which encode any text"
    )


class ByteTokenizer(Tokenizer):
    """256 tokens, the bytes of UTF-8."""

    kind = "byte"

    def __init__(self) -> None:
        self.pieces = [bytes([byte]) for byte in range(256)]

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)

    def encode_utf8(self, data: bytes) -> Ids:
        return np.frombuffer(data, np.uint8)


def load_tokenizer(data: bytes, origin: str = "tokenizer.json") -> Tokenizer:
    """Reads the JSON of `Tokenizer.to_json` and checks it."""
    record = parse_json(data, Path(origin))
    if not isinstance(record, dict) or record.get("format") != "fastlstm-tokenizer":
        raise CorruptFileError(f"{origin} is not a fastlstm tokenizer (no such format field)")
    version = record.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise FormatError(
            f"{origin} has format version {version!r:.60}, this fastlstm reads {FORMAT_VERSION};"
            " use the fastlstm that wrote it"
        )
    kind = record.get("kind")
    if kind == "byte":
        return ByteTokenizer()
    if kind == "char":
        if not isinstance(chars := record.get("chars"), str):
            raise CorruptFileError(f"{origin}: chars is {type(chars).__name__}, expected a string")
        try:
            chars.encode("utf-8")
            return CharTokenizer(chars)
        except ValueError as error:
            raise CorruptFileError(f"{origin}: {error}") from error
    if kind == "bpe":
        from fastlstm.text.data.bpe import load_bpe

        return load_bpe(record, origin)
    raise CorruptFileError(f"{origin}: kind is {kind!r:.60}, expected char, byte or bpe")
