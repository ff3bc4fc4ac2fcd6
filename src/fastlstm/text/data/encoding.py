"""Passes over a source on all cores: scan (hash, count, characters), learn a BPE, write ids."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import DataError, Setting, Stopped
from fastlstm.system.storage import storage_errors
from fastlstm.text.data.blocks import BLOCK_BYTES, BlockReader, TextRules, find_invalid_utf8
from fastlstm.text.data.bpe import TRAINING_BYTES, BpeTokenizer, train_bpe
from fastlstm.text.data.sources import Source
from fastlstm.text.data.tokenizer import Ids, Tokenizer, code_points

Result = TypeVar("Result")
_NUM_CODE_POINTS = 0x110000
_MAX_WORKERS = 16
_LEARN_BLOCK_BYTES = 1 << 15  # the library counts words 30 % faster than in 256 KiB


Progress = Callable[[int, int | None], object]
"""Called with the bytes done and the bytes in all (None when unknown)."""


@dataclass(frozen=True)
class Pass:
    """What every pass over a source needs.

    Attributes:
        source: the documents, none of them a stream.
        rules: how bytes become text.
        block_bytes: bytes handled at once; the results do not depend on it.
        workers: threads; None takes every core this process may use.
        should_stop: polled for every block.
        on_progress: told about bytes read, of `num_passes` times the source.
        num_passes: how many passes the whole job makes.
    """

    source: Source
    rules: TextRules
    block_bytes: int = BLOCK_BYTES
    workers: int | None = None
    should_stop: Callable[[], bool] | None = None
    on_progress: Progress | None = None
    num_passes: int = 2

    def map(
        self, function: Callable[[bytes], Result], index: int = 0
    ) -> Generator[tuple[bytes, Result]]:
        """Yields every block with `function` of it, in order, computed on several threads.

        Args:
            function: thread-safe; numpy, bytes and `hashlib` release the GIL where it matters.
            index: number of this pass, for the progress.

        Raises:
            DataError: a block is not UTF-8; the byte is named.
            Stopped: `should_stop` said so.
        """
        workers = min(self.workers or num_cores(), _MAX_WORKERS)
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
        except UnicodeDecodeError as error:
            raise self._invalid_utf8(error) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def poll(self, consumed: int, index: int) -> None:
        """Reports the bytes read in pass `index`; raises Stopped when asked to stop."""
        if self.should_stop is not None and self.should_stop():
            raise Stopped(f"stopped while encoding {self.source.name}; nothing was kept")
        if self.on_progress is not None:
            total = self.source.total_bytes
            done = consumed if total is None else (index * total + consumed) // self.num_passes
            self.on_progress(done, total)

    def _invalid_utf8(self, error: UnicodeDecodeError) -> DataError:
        found = find_invalid_utf8(self.source.documents)
        name, offset = found or (self.source.name, error.start)
        return DataError(
            f"{name}: invalid UTF-8 at byte {offset}; convert the file to UTF-8, or pass ",
            Setting("invalid_utf8", "replace"),
            " (writes U+FFFD there) or ",
            Setting("vocab", "byte"),
            " (takes any bytes)",
        )


@dataclass(frozen=True)
class Scan:
    """What the first pass finds out.

    Attributes:
        content: SHA-256 of the clean text.
        num_bytes: UTF-8 bytes of the clean text.
        num_chars: characters of it (bytes that start one, where it need not be UTF-8).
        seen: which code points occur, shape ``(0x110000,)``; all False for vocabulary byte.
    """

    content: str
    num_bytes: int
    num_chars: int
    seen: NDArray[np.bool_]


def scan(work: Pass) -> Scan:
    """Reads the source once.

    Cost: 6 ns of CPU time a byte (2-core Xeon, War and Peace), a few dozen blocks held.
    """
    seen = np.zeros(_NUM_CODE_POINTS, dtype=np.bool_)
    digest = hashlib.sha256()
    num_bytes = num_chars = 0

    def look(block: bytes) -> int:
        if not work.rules.is_text:
            return int(np.count_nonzero((np.frombuffer(block, np.uint8) & 0xC0) != 0x80))
        is_ascii = block.isascii()
        text = "" if is_ascii else block.decode("utf-8")
        points = np.frombuffer(block, np.uint8) if is_ascii else code_points(text)
        # Looking is half the price of marking. Threads may mark at once: they only write True.
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


def learn_bpe(work: Pass, vocab_size: int, num_bytes: int) -> BpeTokenizer:
    """Learns a BPE from blocks spread evenly over the text, at most `TRAINING_BYTES` of them."""
    every = max(1, -(-num_bytes // TRAINING_BYTES))

    def texts() -> Iterator[str]:
        reader = BlockReader(work.source.documents, work.rules, _LEARN_BLOCK_BYTES)
        for number, block in enumerate(reader):
            work.poll(reader.consumed, 1)
            if number % every == 0:
                yield block.decode("utf-8")

    return train_bpe(texts(), vocab_size)


def write_ids(work: Pass, tokenizer: Tokenizer, found: Scan, path: Path) -> int:
    """Encodes the source into a new file of ids and fsyncs it.

    The file is written with `write`, not through a mapping, whose pages would count as memory.

    Returns:
        The number of ids.

    Raises:
        DataError: the source changed since it was scanned.
        StorageError: the disk refused.
    """
    digest = hashlib.sha256()
    count = 0
    with storage_errors(path, "write"):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with closing(work.map(tokenizer.encode_utf8, work.num_passes - 1)) as results:
            for block, ids in results:
                digest.update(block)
                count += len(ids)
                with storage_errors(path, "write"):
                    _write_all(descriptor, ids.astype(tokenizer.dtype, copy=False))
        with storage_errors(path, "write"):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if digest.hexdigest() != found.content:
        raise DataError(f"{work.source.name} changed while it was being read; run again")
    return count


def _write_all(descriptor: int, ids: Ids) -> None:
    rest = np.ascontiguousarray(ids).data.cast("B")
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def find_unseen(work: Pass, unseen: str) -> list[tuple[str, int]]:
    """Returns ten or more of the characters `unseen`, or all, with the first place of each."""
    positions: dict[str, int] = {}
    wanted = set(unseen)
    offset = 0
    for block in BlockReader(work.source.documents, work.rules, work.block_bytes):
        text = block.decode("utf-8")
        for char in wanted.intersection(text):
            positions[char] = offset + text.index(char)
        wanted -= positions.keys()
        if len(positions) >= 10 or not wanted:
            break
        offset += len(text)
    return sorted(positions.items(), key=lambda pair: pair[1])


def num_cores() -> int:
    """Returns the cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
