"""Byte-level BPE on the `tokenizers` library, imported when a BPE vocabulary is used."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from fastlstm.errors import CorruptFileError, MissingExtraError
from fastlstm.text.data.tokenizer import Ids, Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Engine

TRAINING_BYTES = 32 << 20
"""Limit of text that a BPE is trained on, spread evenly."""
_CACHED_CHARS = 1 << 23
"""Limit of the characters of cached words, about 100 MB of memory."""

# White space as the library's pattern sees it, which is not Python's: no U+001C to U+001F.
_SPACE = r"\t\n\v\f\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_WORD = re.compile(rf"[{_SPACE}]*[^{_SPACE}]+|[{_SPACE}]+")
"""White space and the word after it; no token crosses matches."""

_PRINTABLE, _OTHERS = {*range(33, 127), *range(161, 173), *range(174, 256)}, iter(range(256, 512))
BYTE_SYMBOLS = [chr(byte if byte in _PRINTABLE else next(_OTHERS)) for byte in range(256)]
"""The printable character for each byte (GPT-2's table)."""
_SYMBOL_BYTES = {symbol: byte for byte, symbol in enumerate(BYTE_SYMBOLS)}


class BpeTokenizer(Tokenizer):
    """Byte-level BPE with all 256 bytes, so that it encodes any text.

    Symbols are in the printable alphabet of `BYTE_SYMBOLS`, merges are pairs of them, best first.
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
        """See `Tokenizer.encode`; 80 ns of CPU time per byte for cached words, 450 for new ones."""
        words: list[str] = _WORD.findall(text)
        known = self._known
        new = sorted(set(words).difference(known))
        if new:
            parts = self._engine.encode_batch_fast(new, add_special_tokens=False)
            arrays = (np.array(part.ids, dtype=self.dtype) for part in parts)
            fresh = {word: ids.tobytes() for word, ids in zip(new, arrays, strict=True)}
            num_chars = sum(map(len, new))
            if num_chars > self._room:
                data = b"".join([known.get(word) or fresh[word] for word in words])
                return np.frombuffer(data, self.dtype)
            self._room -= num_chars
            known.update(fresh)
        return np.frombuffer(b"".join(map(known.__getitem__, words)), self.dtype)

    def _fields(self) -> dict[str, Any]:
        return {"vocab": self.symbols, "merges": [list(pair) for pair in self.merges]}


def train_bpe(texts: Iterable[str], vocab_size: int) -> BpeTokenizer:
    """Learns `vocab_size` tokens from `texts`, fewer if they have fewer."""
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


def load_bpe(record: dict[str, Any], origin: str) -> BpeTokenizer:
    """Builds a BPE tokenizer from its JSON record; raises CorruptFileError for an invalid one."""
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
