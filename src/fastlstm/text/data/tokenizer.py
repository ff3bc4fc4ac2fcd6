"""Tokenizers: text to token ids and back, by characters, bytes or BPE.

BPE is byte-level and uses the `tokenizers` library, which is imported when a BPE vocabulary is
used.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import (
    CorruptFileError,
    DataError,
    FormatError,
    MissingExtraError,
    UnknownCharacterError,
)
from fastlstm.system.storage import parse_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Engine

FORMAT_VERSION = 1
_NUM_CODE_POINTS = 0x110000
TRAINING_BYTES = 32 << 20
"""Limit of text that a BPE is trained on, spread evenly."""
_CACHED_CHARS = 1 << 23
"""Limit of the characters of cached words, which take about 100 MB of memory."""

# White space in the library's pattern. Unlike Python's, it lacks U+001C to U+001F.
_SPACE = r"\t\n\v\f\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_WORD = re.compile(rf"[{_SPACE}]*[^{_SPACE}]+|[{_SPACE}]+")
"""White space and the word after it; no token crosses the edge of a match."""

_BYTES = np.arange(256, dtype=np.uint8)
_PRINTABLE, _OTHERS = {*range(33, 127), *range(161, 173), *range(174, 256)}, iter(range(256, 512))
BYTE_SYMBOLS = [chr(byte if byte in _PRINTABLE else next(_OTHERS)) for byte in range(256)]
"""The printable character for each byte (GPT-2's table)."""
_SYMBOL_BYTES = {symbol: byte for byte, symbol in enumerate(BYTE_SYMBOLS)}

Ids = NDArray[Any]


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
        """Returns the ids of `text`, 1-d, in `dtype`; raises a DataError that lists up to ten
        unknown characters."""

    def encode_utf8(self, data: bytes) -> Ids:
        """Returns the ids of UTF-8 text without unknown characters; thread-safe, for files."""
        return self.encode(data.decode("utf-8"))

    def _fields(self) -> dict[str, Any]:
        return {}

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens."""
        return len(self.pieces)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned dtype that holds every id."""
        return np.min_scalar_type(self.vocab_size - 1)

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

    def bytes_of(self, ids: Ids) -> bytes:
        """Returns the bytes of `ids`, 1-d."""
        pieces = self.pieces
        return b"".join([pieces[token] for token in ids.tolist()])

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`; invalid bytes become U+FFFD."""
        return self.bytes_of(np.fromiter(ids, np.int64)).decode("utf-8", "replace")

    def stream_decoder(self, held: bytes = b"") -> StreamDecoder:
        """Returns a decoder for ids that arrive one by one; it never splits a character."""
        return StreamDecoder(self, held)

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
    """Decodes ids as they arrive, and holds back the bytes of an incomplete character. Raises
    ValueError: `held`, from an earlier decoder, is not an incomplete character."""

    def __init__(self, tokenizer: Tokenizer, held: bytes = b"") -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        if self._decoder.decode(held) or self.held != held:
            raise ValueError(f"{held[:8]!r} is not the beginning of one UTF-8 character")

    @property
    def held(self) -> bytes:
        """The bytes held back, at most three."""
        return self._decoder.getstate()[0]

    def push_all(self, tokens: Ids) -> str:
        """Returns the text that `tokens` complete."""
        return self._decoder.decode(self._tokenizer.bytes_of(tokens))

    def push(self, token: int) -> str:
        """Returns the text that `token` completes; may be empty."""
        return self._decoder.decode(self._tokenizer.pieces[token])

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
        self._points = np.frombuffer(chars.encode("utf-32-le"), np.uint32)
        self._table = np.zeros(_NUM_CODE_POINTS, dtype=self.dtype)
        self._table[code_points(chars)] = np.arange(len(chars))
        self._known = np.zeros(_NUM_CODE_POINTS, dtype=np.bool_)
        self._known[code_points(chars)] = True
        # bytes.translate runs at 1 GB/s on ASCII blocks, a gather at 0.4 GB/s (2-core Xeon)
        fits = len(chars) <= 256
        self._ascii = self._table[:256].astype(np.uint8).tobytes() if fits else None

    def bytes_of(self, ids: Ids) -> bytes:
        return self._points[ids].tobytes().decode("utf-32-le").encode()

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

    def num_unseen(self, seen: NDArray[np.bool_]) -> int:
        """Returns how many characters are marked in `seen` (by code point) and have no token."""
        return int(np.count_nonzero(seen & ~self._known))

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

    def bytes_of(self, ids: Ids) -> bytes:
        return _BYTES[ids].tobytes()

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)

    def encode_utf8(self, data: bytes) -> Ids:
        return np.frombuffer(data, np.uint8)


class BpeTokenizer(Tokenizer):
    """Byte-level BPE with all 256 bytes, so that it encodes any text.

    Symbols are written in the printable alphabet of `BYTE_SYMBOLS`. Merges are pairs of symbols,
    best first.
    """

    kind = "bpe"

    def __init__(self, symbols: list[str], merges: list[tuple[str, str]]) -> None:
        self.symbols = symbols
        self.merges = merges
        self.pieces = [bytes([_SYMBOL_BYTES[char] for char in symbol]) for symbol in symbols]
        library, vocab = _library(), {symbol: number for number, symbol in enumerate(symbols)}
        self._engine: Engine = library.Tokenizer(library.models.BPE(vocab=vocab, merges=merges))
        self._engine.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._known: dict[str, bytes] = {}
        self._room = _CACHED_CHARS

    def encode(self, text: str) -> Ids:
        """See `Tokenizer.encode`. A byte takes 80 ns of CPU time in cached words, 450 ns in new
        ones."""
        words: list[str] = _WORD.findall(text)
        known = self._known
        new = sorted(set(words).difference(known))
        if new:
            try:
                parts = self._engine.encode_batch_fast(new, add_special_tokens=False)
            except TypeError:
                raise DataError("an unpaired surrogate, which is no character") from None
            arrays = (np.array(part.ids, dtype=self.dtype) for part in parts)
            fresh = {word: ids.tobytes() for word, ids in zip(new, arrays, strict=True)}
            num_chars = sum(map(len, new))
            if num_chars > self._room:
                data = b"".join([known.get(word) or fresh[word] for word in words])
                return np.frombuffer(data, self.dtype)
            self._room -= num_chars
            known.update(fresh)
        return np.frombuffer(b"".join(map(known.__getitem__, words)), self.dtype)

    def hugging_face_json(self) -> bytes:
        """Returns the JSON of Hugging Face's tokenizers, `Tokenizer.from_file`."""
        engine = _library().Tokenizer.from_str(self._engine.to_str())
        engine.decoder = _library().decoders.ByteLevel()
        return str(engine.to_str()).encode()

    def _fields(self) -> dict[str, Any]:
        return {"vocab": self.symbols, "merges": [list(pair) for pair in self.merges]}


def train_bpe(texts: Iterable[str], vocab_size: int) -> BpeTokenizer:
    """Learns `vocab_size` tokens from `texts`, or fewer if the texts have fewer."""
    library = _library()
    engine = library.Tokenizer(library.models.BPE())
    engine.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(BYTE_SYMBOLS),
    )
    engine.train_from_iterator(texts, trainer)
    model = json.loads(engine.to_str())["model"]
    ids: dict[str, int] = model["vocab"]
    pairs = (m.split(" ") if isinstance(m, str) else m for m in model["merges"])
    return BpeTokenizer(sorted(ids, key=ids.__getitem__), [(left, right) for left, right in pairs])


def _load_bpe(record: dict[str, Any], origin: str) -> BpeTokenizer:
    symbols, merges = record.get("vocab"), record.get("merges")
    if not isinstance(symbols, list) or not all(isinstance(s, str) and s for s in symbols):
        raise CorruptFileError(f"{origin}: vocab must be a list of tokens")
    known = set(symbols)
    if len(known) != len(symbols):
        raise CorruptFileError(f"{origin}: a token occurs twice in vocab")
    if not known.issuperset(BYTE_SYMBOLS):
        raise CorruptFileError(f"{origin}: vocab lacks some of the 256 bytes")
    if not set("".join(symbols)) <= set(BYTE_SYMBOLS):
        raise CorruptFileError(f"{origin}: a token has a character that is not a byte symbol")
    if not isinstance(merges, list):
        raise CorruptFileError(f"{origin}: merges must be a list of pairs")
    for pair in merges:
        is_list = isinstance(pair, list) and len(pair) == 2
        if (
            not is_list
            or not all(isinstance(p, str) for p in pair)
            or not known.issuperset([*pair, pair[0] + pair[1]])
        ):
            raise CorruptFileError(f"{origin}: merge {str(pair)[:60]} does not join known tokens")
    return BpeTokenizer(symbols, [(pair[0], pair[1]) for pair in merges])


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtraError(
            "a BPE vocabulary needs the tokenizers library: pip install 'fastlstm[bpe]' (or use"
            " `vocab='char'` or byte)"
        ) from error
    return tokenizers


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
        return _load_bpe(record, origin)
    raise CorruptFileError(f"{origin}: kind is {kind!r:.60}, expected char, byte or bpe")
