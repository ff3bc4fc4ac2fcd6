"""Encoded texts in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from fastlstm.errors import FastLSTMError
from fastlstm.system.cache import Cache, is_intact
from fastlstm.system.storage import read_json, write_file, write_json
from fastlstm.text.data.tokenizer import Ids, Tokenizer, load_tokenizer, smallest_dtype


@dataclass(frozen=True)
class Meta:
    """The content of meta.json; `fingerprint` is the tokenizer's, for the rest see `Entry`."""

    num_tokens: int
    num_bytes: int
    num_chars: int
    fingerprint: str
    unknown: Sequence[tuple[str, int]] = ()
    num_replaced: int = 0
    num_skipped: int = 0

    @property
    def numbers(self) -> tuple[int, ...]:
        """The counts."""
        sizes = (self.num_tokens, self.num_bytes, self.num_chars)
        return (*sizes, self.num_replaced, self.num_skipped)


@dataclass(frozen=True)
class Entry:
    """An encoded text in the cache.

    Attributes:
        ids: all token ids, 1-d, memory-mapped, in the smallest unsigned dtype.
        num_bytes: UTF-8 bytes of the clean text.
        num_chars: its characters.
        unknown: up to ten characters that the tokenizer lacks and `ids` leaves out, with the first
            position of each.
        num_replaced: invalid bytes that became U+FFFD.
        num_skipped: documents without a text.
    """

    ids: Ids
    tokenizer: Tokenizer
    key: str
    num_bytes: int
    num_chars: int
    unknown: tuple[tuple[str, int], ...]
    num_replaced: int
    num_skipped: int

    @property
    def num_unknown(self) -> int:
        """Number of characters left out of `ids`."""
        return self.num_chars - len(self.ids) if self.unknown else 0


class TextCache(Cache):
    """Encoded texts."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, "text")

    def find(self, key: str) -> Entry | None:
        """Opens an entry; None if there is none or it is damaged, so that it is encoded again."""
        directory = self.path(key)
        try:
            if not is_intact(directory):
                return None
            meta = Meta(**read_json(directory / "meta.json"))
            if any(type(number) is not int for number in meta.numbers):
                return None
            tokenizer = load_tokenizer((directory / "tokenizer.json").read_bytes())
            if tokenizer.fingerprint != meta.fingerprint:
                return None
            path = directory / "ids.bin"
            dtype = smallest_dtype(tokenizer.vocab_size)
            if path.stat().st_size != meta.num_tokens * dtype.itemsize:
                return None
            ids = np.memmap(path, dtype=dtype, mode="r")
            unknown = tuple((char, position) for char, position in meta.unknown)
        except (OSError, FastLSTMError, TypeError, ValueError):
            return None
        return Entry(
            ids, tokenizer, key, meta.num_bytes, meta.num_chars, unknown, meta.num_replaced,
            meta.num_skipped,
        )  # fmt: skip

    def store(self, key: str, work: Path, tokenizer: Tokenizer, meta: Meta) -> Entry:
        """Turns a work directory with ids.bin into the entry `key`."""
        write_file(work / "tokenizer.json", tokenizer.to_json())
        write_json(work / "meta.json", asdict(meta))
        return self.place(key, work, lambda: self.find(key))
