"""Parallel passes over a source: scan it, train a BPE, write ids."""

from __future__ import annotations

import hashlib
import os
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import DataError, Stopped
from fastlstm.system import hardware
from fastlstm.system.charset import guess_of
from fastlstm.system.storage import append, storage_errors
from fastlstm.text.data.blocks import (
    BLOCK_BYTES,
    BlockReader,
    TextRules,
    find_invalid_byte,
    open_document,
)
from fastlstm.text.data.sources import InputText
from fastlstm.text.data.tokenizer import (
    TRAINING_BYTES,
    BpeTokenizer,
    CharTokenizer,
    Tokenizer,
    code_points,
    train_bpe,
)

Result = TypeVar("Result")
_NUM_CODE_POINTS = 0x110000
_MAX_WORKERS = 16
_LOOK_BYTES = 1 << 20
_LEARN_BLOCK_BYTES = 1 << 15  # the library counts words 30 % faster than in 256 KiB

Progress = Callable[[int, int | None], object]
"""Called with bytes done and the total in bytes, or None if unknown."""


@dataclass(frozen=True)
class Pass:
    """A parallel pass over a source without streams, whose results do not depend on its threads.

    `on_progress` is called with the bytes read and `num_passes` times the size of the source.
    `repairs` is what the first pass changed; see `BlockReader`.
    """

    source: InputText
    rules: TextRules
    block_bytes: int = BLOCK_BYTES
    should_stop: Callable[[], bool] | None = None
    on_progress: Progress | None = None
    num_passes: int = 2
    repairs: Counter[str] = field(default_factory=Counter)

    def map(
        self, function: Callable[[bytes], Result], index: int = 0
    ) -> Generator[tuple[bytes, Result]]:
        """Yields every block and its result of `function`, in order, computed by threads.

        `index` is the number of this pass, for the progress. DataError names an invalid byte.
        """
        workers = min(hardware.cores(), _MAX_WORKERS)
        reader = BlockReader(self.source.documents, self.rules, self.block_bytes)
        waiting: deque[tuple[bytes, Future[Result]]] = deque()
        pool = ThreadPoolExecutor(workers, "fastlstm-encode")
        try:
            for block in reader:
                self.poll(reader.consumed, index)
                waiting.append((block, pool.submit(function, block)))
                if len(waiting) > 2 * workers:
                    done, future = waiting.popleft()
                    yield done, future.result()
            while waiting:
                self.poll(reader.consumed, index)
                done, future = waiting.popleft()
                yield done, future.result()
            if index == 0:
                self.repairs.clear()
                self.repairs.update(reader.repairs)
        except (UnicodeDecodeError, UnicodeEncodeError) as error:  # UTF-7 may hold surrogates
            raise self._invalid_utf8(error) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def poll(self, consumed: int, index: int) -> None:
        """Reports the bytes read in pass `index`; raises Stopped if asked to stop."""
        if self.should_stop is not None and self.should_stop():
            raise Stopped(f"stopped while encoding {self.source.name}; nothing was stored")
        if self.on_progress is not None:
            total = self.source.total_bytes
            done = consumed if total is None else (index * total + consumed) // self.num_passes
            self.on_progress(done, total)

    def _invalid_utf8(self, error: UnicodeDecodeError | UnicodeEncodeError) -> DataError:
        encoding = self.rules.encoding
        place = find_invalid_byte(self.source.documents, encoding)
        name, offset = self.source.name, error.start
        cure = "convert the file to UTF-8"
        if place is not None:
            document, offset = place
            name = document.name
            with closing(open_document(document)[0]) as stream:
                guess = guess_of(stream.read(_LOOK_BYTES)) if encoding == "utf-8" else None
            if guess is not None:
                cure = f"it looks like {guess[0]} ({guess[1]}): pass `encoding={guess[0]!r}`"
        return DataError(
            f"{name}: invalid {encoding.upper()} at byte {offset}; {cure}, or pass"
            " `invalid_utf8='replace'` (writes U+FFFD) or `vocab='byte'` (accepts any bytes)"
        )


@dataclass(frozen=True)
class Scan:
    """Result of the first pass: SHA-256 of the clean text, its size, and which code points occur.

    `seen` is `(0x110000,)`. For vocabulary byte it is all False, and bytes that start a character
    are counted as characters.
    """

    content: str
    num_bytes: int
    num_chars: int
    seen: NDArray[np.bool_]


def scan(work: Pass) -> Scan:
    """Reads the source once, in 6 ns of CPU time a byte (2-core Xeon); holds a few dozen blocks."""
    seen = np.zeros(_NUM_CODE_POINTS, dtype=np.bool_)
    digest = hashlib.sha256()
    num_bytes = num_chars = 0

    def look(block: bytes) -> int:
        if not work.rules.is_text:
            return int(np.count_nonzero((np.frombuffer(block, np.uint8) & 0xC0) != 0x80))
        is_ascii = block.isascii()
        text = "" if is_ascii else block.decode("utf-8")
        points = np.frombuffer(block, np.uint8) if is_ascii else code_points(text)
        # Checking costs half of marking. Threads may mark concurrently: all write True.
        if not seen.take(points, mode="clip").all():
            seen[points] = True
        return len(points)

    with closing(work.map(look, 0)) as results:
        for block, chars in results:
            digest.update(block)
            num_bytes += len(block)
            num_chars += chars
    if not num_bytes:
        raise DataError(f"{work.source.name} is empty; give a file with text in it")
    return Scan(digest.hexdigest(), num_bytes, num_chars, seen)


def share_of(count: int, share: float) -> int:
    """Returns how many of `count` characters or tokens are in the first `share` of them."""
    return int(count * share + 1e-6)


def learn_bpe(work: Pass, vocab_size: int, scanned: Scan, share: float) -> BpeTokenizer:
    """Trains a BPE on at most `TRAINING_BYTES` of the first `share` of the characters."""
    every = max(1, -(-share_of(scanned.num_bytes, share) // TRAINING_BYTES))

    def texts() -> Iterator[str]:
        reader = BlockReader(work.source.documents, work.rules, _LEARN_BLOCK_BYTES)
        left = share_of(scanned.num_chars, share)
        for number, block in enumerate(reader):
            work.poll(reader.consumed, 1)
            text = block.decode("utf-8")[:left]
            if number % every == 0:
                yield text
            left -= len(text)
            if not left:
                return

    return train_bpe(texts(), vocab_size)


def write_ids(work: Pass, tokenizer: Tokenizer, scanned: Scan, path: Path) -> int:
    """Encodes the source into a new file of ids and fsyncs it; returns the number of ids."""
    digest = hashlib.sha256()
    count = 0
    # Not mapped: mapped pages would count as memory.
    with storage_errors(path, "write"), path.open("xb", buffering=0) as file:
        with closing(work.map(tokenizer.encode_utf8, work.num_passes - 1)) as results:
            for block, ids in results:
                digest.update(block)
                count += len(ids)
                append(file, np.ascontiguousarray(ids, dtype=tokenizer.dtype).data.cast("B"))
        os.fsync(file.fileno())
    if digest.hexdigest() != scanned.content:
        raise DataError(f"{work.source.name} changed while it was being read; run again")
    return count


def find_unseen(work: Pass, tokenizer: CharTokenizer, num_unseen: int) -> list[tuple[str, int]]:
    """Returns the `num_unseen` characters that a tokenizer lacks, ten or more if there are many, in
    order of their first positions."""
    positions: dict[str, int] = {}
    offset = 0
    for block in BlockReader(work.source.documents, work.rules, work.block_bytes):
        text = block.decode("utf-8")
        for char, position in tokenizer.unknown_in(text):
            positions.setdefault(char, offset + position)
        if len(positions) >= min(10, num_unseen):
            break
        offset += len(text)
    return list(positions.items())
