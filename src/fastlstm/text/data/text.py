"""Prepares any supported text as memory-mapped ids in the cache."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import DataError, FastLSTMError, Stopped, UnknownCharacterError, counted
from fastlstm.system import environment
from fastlstm.system.cache import Cache, is_intact, make_key, release_pages
from fastlstm.system.fields import parse_split
from fastlstm.system.storage import read_json, storage_errors, write_file, write_json
from fastlstm.text.config import Vocab
from fastlstm.text.data.blocks import BLOCK_BYTES, TextRules
from fastlstm.text.data.encoding import (
    Pass,
    Progress,
    Scan,
    find_unseen,
    learn_bpe,
    scan,
    share_of,
    write_ids,
)
from fastlstm.text.data.sources import Document, InputText, open_source
from fastlstm.text.data.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    Ids,
    KnownCharacters,
    Tokenizer,
    describe_unseen,
    load_tokenizer,
)

UnknownPolicy = Literal["refuse", "count"]
READING = (*("text_field", "keep_crlf", "invalid_utf8", "encoding", "missing_text", "cache_dir"),)
"""Options of `prepare_text` that a run stores, for texts that are read later."""
MIN_TOKENS = 200
"""Least number of tokens for a split into parts."""
_COUNT_BLOCK = 1 << 20
_SPOOL_BYTES = 1 << 20
_RACY_NS = 100_000_000
"""A file changed this recently may change again within one timestamp tick."""
_COUNTS = ("num_bytes", "num_chars", "num_replaced", "num_skipped")


@dataclass(frozen=True)
class Splits:
    """Contiguous parts of a text's ids, in this order; views."""

    train: Ids
    valid: Ids
    test: Ids


@dataclass(frozen=True)
class TextDataset:
    """An encoded text of the cache, and where it came from.

    Its key is a hash of the clean text, the reading rules and the tokenizer. Data remembered under
    that key can therefore not become stale.

    Attributes:
        ids: all token ids, 1-d, memory-mapped, in the smallest unsigned dtype.
        num_bytes, num_chars: UTF-8 bytes and characters of the clean text.
        unknown: up to ten characters that the tokenizer lacks and `ids` leaves out, with the first
            position of each.
        num_replaced: invalid bytes that became U+FFFD.
        num_skipped: documents without a text.
        from_cache: nothing had to be encoded.
        source: the source, as the user wrote it.
        notes: remarks such as skipped files, a line each.
    """

    ids: Ids
    tokenizer: Tokenizer
    key: str
    cache: Cache
    num_bytes: int
    num_chars: int
    unknown: tuple[tuple[str, int], ...]
    num_replaced: int
    num_skipped: int
    from_cache: bool = True
    seconds: float = 0.0
    source: str = ""
    notes: tuple[str, ...] = ()

    @property
    def num_unknown(self) -> int:
        """Number of characters left out of `ids`."""
        return self.num_chars - len(self.ids) if self.unknown else 0

    def split(self, spec: str = "90/5/5", files: Collection[str] = ()) -> Splits:
        """Splits the text into parts, see `split_shares`; parts in `files` are empty."""
        first, second = self._edges(spec, files)
        return Splits(self.ids[:first], self.ids[first:second], self.ids[second:])

    def train_counts(self, spec: str = "90/5/5", files: Collection[str] = ()) -> NDArray[np.int64]:
        """Returns how often each token occurs in the training part, ``(V,)``; remembered."""
        end, _ = self._edges(spec, files)
        memo = make_key("counts", self.key, end)
        counts = self.cache.recall(memo)
        if counts is None:
            counts = token_counts(self.ids[:end], self.tokenizer.vocab_size).tolist()
            self.cache.remember(memo, counts)
        return np.array(counts, dtype=np.int64)

    def _edges(self, spec: str, files: Collection[str]) -> tuple[int, int]:
        shares = split_shares(spec, files)
        num = len(self.ids)
        second = num if shares[2] == 0 else self._edge(shares[0] + shares[1])
        first = second if shares[1] == 0 else self._edge(shares[0])
        if num < MIN_TOKENS or first < 2 or (shares[1] > 0 and second - first < 2):
            raise DataError(
                f"{self.source} has only {counted(self.num_chars, 'character')}"
                f" ({counted(num, 'token')}); training needs at least {MIN_TOKENS} tokens, and far"
                " more to be useful"
            )
        return first, second

    def _edge(self, share: float) -> int:
        """Returns the number of tokens in the first share of the text.

        BPE merges are learned from the characters of the training split, so a share of a BPE text
        is a share of its characters. The edge of the share is remembered, because finding it reads
        all ids before the edge.
        """
        if self.tokenizer.kind != "bpe":
            return share_of(len(self.ids), share)
        num_chars = share_of(self.num_chars, share)
        memo = make_key("edge", self.key, num_chars)
        known = self.cache.recall(memo)
        if known is not None:
            return int(known)
        edge, chars, sizes = 0, 0.0, self.tokenizer.token_chars
        while edge < len(self.ids) and chars < num_chars:
            ends = chars + np.cumsum(sizes[self.ids[edge : edge + _COUNT_BLOCK]])
            count = min(len(ends), int(np.searchsorted(ends, num_chars)) + 1)
            edge, chars = edge + count, float(ends[count - 1])
            release_pages(self.ids)
        self.cache.remember(memo, edge)
        return edge


class TextCache(Cache):
    """Encoded texts."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, "text")

    def find(self, key: str) -> TextDataset | None:
        """Opens an entry; returns None if it is missing or damaged, so that it is encoded again."""
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
        return TextDataset(ids, tokenizer, key, self, unknown=unknown, **counts)

    def store(
        self,
        key: str,
        work: Path,
        tokenizer: Tokenizer,
        num_tokens: int,
        unknown: Sequence[tuple[str, int]] = (),
        **counts: int,
    ) -> TextDataset:
        """Turns a work directory with ids.bin into the entry `key`; counts as in `TextDataset`."""
        about = {"num_tokens": num_tokens, "fingerprint": tokenizer.fingerprint, **counts}
        write_file(work / "tokenizer.json", tokenizer.to_json())
        write_json(work / "meta.json", {**about, "unknown": list(unknown)})
        return self.place(key, work, lambda: self.find(key))


def split_shares(spec: str, files: Collection[str] = ()) -> tuple[float, float, float]:
    """Returns the train, validation and test shares of a text; they sum to 1.

    If a part ("valid", "test") is in `files`, it has its own file, and its share goes to training.
    """
    train, valid, test = parse_split(spec)
    if "valid" in files:
        train, valid = train + valid, 0.0
    if "test" in files:
        train, test = train + test, 0.0
    return train, valid, test


def token_counts(ids: Ids, vocab_size: int) -> NDArray[np.int64]:
    """Returns how often each token occurs, shape ``(V,)``; resident memory stays flat."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(ids), _COUNT_BLOCK):
        block = np.asarray(ids[start : start + _COUNT_BLOCK])
        is_large = len(block) > 1 << 16
        if (
            block.dtype != np.uint8
            or not is_large
            or len(block) % 2
            or not block.flags.c_contiguous
        ):
            counts += np.bincount(block, minlength=vocab_size)
        else:  # bincount widens each item to int64: counting pairs is twice as fast
            pairs = np.bincount(block.view(np.uint16), minlength=1 << 16).reshape(256, 256)
            counts += (pairs.sum(axis=0) + pairs.sum(axis=1))[:vocab_size]
        if is_large:
            release_pages(ids)
    return counts


def prepare_text(
    source: str | Path | Sequence[str | Path] | InputText,
    *,
    vocab: Vocab = "char",
    vocab_size: int = 4096,
    cache_dir: str | Path | None = None,
    train_share: float = 0.9,
    tokenizer: Tokenizer | None = None,
    unknown: UnknownPolicy = "refuse",
    on_progress: Progress | None = None,
    should_stop: Callable[[], bool] | None = None,
    **reading: Any,
) -> TextDataset:
    """Encodes a text into the cache, or opens it from there.

    Options mean the same as in `TrainConfig`; `reading` are fields of `TextRules`. A BPE is learned
    from the first `train_share` of the characters, the training split. An existing `tokenizer`, to
    resume a run or to evaluate another text, replaces `vocab`; characters that it lacks raise an
    error (`unknown` ``refuse``), or are left out and reported (``count``). `on_progress` is called
    with bytes done and the total in bytes, or None; `should_stop` is polled every MB or 0.2 s.

    Raises:
        DataError: the text cannot be used; the message says where and why.
        Stopped: `should_stop` returned True; nothing was stored.
        StorageError: a write failed.

    Cost:
        Reads the text twice (bpe: three times) and holds a few dozen blocks. Opening a cached text
        reads its description only, if `stat` shows the files unchanged.
    """
    started = time.monotonic()
    kind = tokenizer.kind if tokenizer is not None else vocab
    cuts: dict[str, Literal["character", "token", "anywhere"]] = {
        "char": "character", "byte": "anywhere", "bpe": "token",
    }  # fmt: skip
    rules = TextRules(kind != "byte", cuts[kind], **reading)
    opened = source if isinstance(source, InputText) else open_source(source, rules.text_field)
    cache = TextCache(Path(cache_dir) if cache_dir is not None else environment.cache_dir())
    passes = 3 if kind == "bpe" and tokenizer is None else 2
    work = Pass(opened, rules, BLOCK_BYTES, should_stop, on_progress, passes)
    job = _Job(cache, work, kind, vocab_size, train_share, tokenizer, unknown)
    entry = job.find_unchanged()
    if entry is None:
        with cache.work_directory() as directory:
            entry = job.encode(directory)
    notes = (*opened.notes, *_repairs(entry))
    return replace(entry, seconds=time.monotonic() - started, source=opened.name, notes=notes)


def _repairs(entry: TextDataset) -> Iterator[str]:
    if entry.num_replaced:
        share = entry.num_replaced / max(entry.num_chars, 1)
        invalid = counted(entry.num_replaced, "invalid byte")
        yield f"{invalid} replaced by U+FFFD ({share:.2%} of the text)"
    if entry.num_skipped:
        yield f"{counted(entry.num_skipped, 'line')} without a text left out"


@dataclass
class _Job:
    """Encodes one text into the cache."""

    cache: TextCache
    work: Pass
    kind: str
    vocab_size: int
    train_share: float
    tokenizer: Tokenizer | None
    unknown: UnknownPolicy

    def find_unchanged(self) -> TextDataset | None:
        """Returns the entry of the same files, if `stat` shows them unchanged."""
        signature = self.work.source.signature()
        content = self.cache.recall(self._key("stat", signature)) if signature else None
        return self._find(content) if isinstance(content, str) else None

    def encode(self, directory: Path) -> TextDataset:
        """Scans the source, and encodes it unless it is cached."""
        self.work = replace(self.work, source=_spool(self.work, directory))
        source = self.work.source
        before, read_at = source.signature(), time.time_ns()
        scanned = scan(self.work)
        entry = self._find(scanned.content) or self._encode(scanned, directory)
        if before and before == source.signature():
            changed_at = max(int(time_ns) for row in before for time_ns in row[3:5])
            if read_at - changed_at >= _RACY_NS:
                self.cache.remember(self._key("stat", before), scanned.content)
        return entry

    def _encode(self, scanned: Scan, directory: Path) -> TextDataset:
        tokenizer, unknown = self._tokenizer(scanned)
        target = directory / "entry"
        with storage_errors(target, "write"):
            target.mkdir()
        count = write_ids(self.work, tokenizer, scanned, target / "ids.bin")
        kind = "known ids" if unknown else "ids"
        key = self._key(kind, scanned.content, tokenizer.fingerprint)
        entry = self.cache.store(
            key, target, tokenizer, count, unknown,
            num_bytes=scanned.num_bytes, num_chars=scanned.num_chars,
            num_replaced=self.work.repairs["replaced"], num_skipped=self.work.repairs["skipped"],
        )  # fmt: skip
        if self.tokenizer is None:
            self.cache.remember(self._vocab_key(scanned.content), tokenizer.fingerprint)
        if self.work.on_progress is not None:
            total = self.work.source.total_bytes
            self.work.on_progress(scanned.num_bytes if total is None else total, total)
        return replace(entry, from_cache=False)

    def _tokenizer(self, scanned: Scan) -> tuple[Tokenizer, list[tuple[str, int]]]:
        """Returns the tokenizer, and characters that it leaves out."""
        if isinstance(self.tokenizer, CharTokenizer):
            num = self.tokenizer.num_unseen(scanned.seen)
            positions = find_unseen(self.work, self.tokenizer, num) if num else []
            knows_none = num == np.count_nonzero(scanned.seen)
            if positions and (self.unknown == "refuse" or knows_none):
                raise UnknownCharacterError(
                    f"{self.work.source.name}: {describe_unseen(positions)}"
                )
            if positions:
                return KnownCharacters(self.tokenizer.chars), positions[:10]
        if self.tokenizer is not None:
            return self.tokenizer, []
        if self.kind == "char":
            return CharTokenizer("".join(map(chr, np.flatnonzero(scanned.seen)))), []
        if self.kind == "byte":
            return ByteTokenizer(), []
        return learn_bpe(self.work, self.vocab_size, scanned, self.train_share), []

    def _find(self, content: str) -> TextDataset | None:
        if self.tokenizer is None:
            fingerprint = self.cache.recall(self._vocab_key(content))
        else:
            fingerprint = self.tokenizer.fingerprint
        if not isinstance(fingerprint, str):
            return None
        entry = self.cache.find(self._key("ids", content, fingerprint))
        if entry is None and self.unknown == "count":
            entry = self.cache.find(self._key("known ids", content, fingerprint))
        return entry

    def _vocab_key(self, content: str) -> str:
        learned = (self.vocab_size, self.train_share) if self.kind == "bpe" else None
        return self._key("vocab", content, self.kind, learned)

    def _key(self, name: str, of: Any, *more: Any) -> str:
        return make_key(name, of, asdict(self.work.rules), *more)


def _spool(work: Pass, directory: Path) -> InputText:
    """Copies pipes and stdin to files, which every pass can read."""
    documents = list(work.source.documents)
    for index, document in enumerate(documents):
        if not document.is_stream:
            continue
        path = directory / f"spool-{index}"
        with _open_pipe(document) as pipe, storage_errors(path, "write"), path.open("xb") as file:
            while chunk := _read_pipe(pipe, work, file.tell()):
                file.write(chunk)
        documents[index] = replace(document, path=path, is_stream=False)
    return replace(work.source, documents=tuple(documents))


def _open_pipe(document: Document) -> FileIO:
    is_stdin = document.path is None
    if is_stdin and (sys.stdin is None or sys.stdin.closed):
        raise DataError("stdin is closed; pipe text into it or name a file")
    try:
        return FileIO(document.path or sys.stdin.fileno(), closefd=not is_stdin)
    except OSError as error:
        raise DataError(f"cannot read {document.name}: {error.strerror}") from error


def _read_pipe(pipe: FileIO, work: Pass, done: int) -> bytes:
    """Waits for data while polling `should_stop`."""
    work.poll(done, 0)
    while not select.select([pipe], [], [], 0.2)[0]:
        if work.should_stop is not None and work.should_stop():
            raise Stopped(f"stopped while reading {work.source.name}; nothing was stored")
    return os.read(pipe.fileno(), _SPOOL_BYTES)
