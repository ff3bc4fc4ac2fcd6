"""New lines of a metrics.jsonl while another process writes it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fastlstm.errors import FastLSTMError
from fastlstm.system.storage import MAX_JSON_BYTES, open_regular

if TYPE_CHECKING:
    from pathlib import Path

_MARK_BYTES = 64
"""Number of first bytes, and of bytes before the position, that identify a file's content."""


class EventTail:
    """Reads the lines added to a metrics.jsonl since the last call.

    A file that was cut, as by a resumed run, or replaced is read again from its beginning. A
    missing file has no lines.

    Attributes:
        num_replaced: number of new beginnings.
        has_more: the last call stopped at its limit: call again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._offset, self._mark = 0, 0, b""
        self._seen: tuple[int, int, int] | None = None
        self._is_within_long_line = False
        self.num_replaced = 0
        self.has_more = False

    def read(self) -> list[bytes]:
        """Returns the complete lines since the last call.

        One call reads at most 16 MB; a longer line is skipped. An unchanged file costs one `stat`.
        """
        try:
            info = os.lstat(self._path)
            if not self.has_more and self._seen == (info.st_ino, info.st_size, info.st_ctime_ns):
                return []
            self.has_more = False
            with open_regular(self._path) as (descriptor, size):
                info = os.fstat(descriptor)
                if self._offset and self._is_replaced(descriptor, info.st_ino, size):
                    self._offset, self._is_within_long_line = 0, False
                    self.num_replaced += 1
                self._inode = info.st_ino
                lines = self._new_lines(descriptor, size)
        except (FastLSTMError, OSError):
            self._seen = None
            return []
        self._seen = info.st_ino, size, info.st_ctime_ns
        return lines

    def _is_replaced(self, descriptor: int, inode: int, size: int) -> bool:
        is_other = inode != self._inode or size < self._offset
        return is_other or self._bytes_around(descriptor, self._offset) != self._mark

    @staticmethod
    def _bytes_around(descriptor: int, offset: int) -> bytes:
        length = min(_MARK_BYTES, offset)
        return b"".join(os.pread(descriptor, length, place) for place in (0, offset - length))

    def _new_lines(self, descriptor: int, size: int) -> list[bytes]:
        data = os.pread(descriptor, min(size - self._offset, MAX_JSON_BYTES), self._offset)
        num_complete = data.rfind(b"\n") + 1
        self.has_more = len(data) == MAX_JSON_BYTES
        lines = data[:num_complete].split(b"\n")[:-1]
        if self._is_within_long_line and num_complete:
            lines = lines[1:]
            self._is_within_long_line = False
        if self.has_more and not num_complete:
            num_complete = len(data)
            self._is_within_long_line = True
        if num_complete:
            self._offset += num_complete
            self._mark = self._bytes_around(descriptor, self._offset)
        return lines
