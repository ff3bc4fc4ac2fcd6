"""Encoded texts in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastlstm.errors import FastLSTMError
from fastlstm.system.cache import Cache, is_intact
from fastlstm.system.storage import read_json, write_file, write_json
from fastlstm.text.data.tokenizer import Ids, Tokenizer, load_tokenizer

_COUNTS = ("num_bytes", "num_chars", "num_replaced", "num_skipped")


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
            meta = read_json(directory / "meta.json")
            tokenizer = load_tokenizer((directory / "tokenizer.json").read_bytes())
            ids = np.memmap(directory / "ids.bin", dtype=tokenizer.dtype, mode="r")
            expected = {"num_tokens": len(ids), "fingerprint": tokenizer.fingerprint}
            unknown = tuple((char, position) for char, position in meta.pop("unknown"))
            counts = {name: meta.pop(name) for name in _COUNTS}
        except (OSError, FastLSTMError, AttributeError, KeyError, TypeError, ValueError):
            return None
        if meta != expected or any(type(number) is not int for number in counts.values()):
            return None
        return Entry(ids, tokenizer, key, unknown=unknown, **counts)

    def store(
        self,
        key: str,
        work: Path,
        tokenizer: Tokenizer,
        num_tokens: int,
        unknown: Sequence[tuple[str, int]] = (),
        **counts: int,
    ) -> Entry:
        """Turns a work directory with ids.bin into the entry `key`; counts as in `Entry`."""
        about = {"num_tokens": num_tokens, "fingerprint": tokenizer.fingerprint}
        write_file(work / "tokenizer.json", tokenizer.to_json())
        write_json(work / "meta.json", {**about, "unknown": list(unknown), **counts})
        return self.place(key, work, lambda: self.find(key))
