"""The events of a metrics.jsonl that another process is writing, as they are added."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fastlstm.errors import FastLSTMError
from fastlstm.report.events import decode_event
from fastlstm.system.storage import MAX_JSON_BYTES, open_regular

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fastlstm.report.events import Event

_MARK_BYTES = 64
"""First bytes of a file, and bytes before the position, that are compared to notice another run and
a file that was cut and written on."""

Position = tuple[int, int, str]
"""Inode, bytes read, and the first and the last of these bytes as hexadecimal digits."""
_START: Position = (0, 0, "")


class EventTail:
    """Reads the lines that were added to a metrics.jsonl since the last call.

    A file that was cut or replaced, as a resumed run does, is read again from its beginning;
    `num_replaced` then counts one more. Lines that are not events are skipped. A missing file has
    no events.

    Args:
        path: metrics.jsonl.
        position: where another tail of the same file stopped (`position`).

    Attributes:
        num_replaced: how often the file was read again from its beginning.
        has_more: whether the last call stopped at its limit: call again.
    """

    def __init__(self, path: Path, position: Sequence[object] | None = None) -> None:
        self._path = path
        self._inode, self._offset, self._mark = _checked(position)
        self._seen: tuple[int, int, int] | None = None
        self._is_within_long_line = False
        self.num_replaced = 0
        self.has_more = False

    @property
    def position(self) -> Position:
        """The end of the last complete line read; can be stored as JSON."""
        return self._inode, self._offset, self._mark

    def read(self) -> list[Event]:
        """Returns the events of the complete lines since the last call, as `read_lines` does."""
        return _events(self.read_lines())

    def read_back(self, num_bytes: int) -> list[Event]:
        """Returns the events in the last bytes, so many at most, of what was read so far."""
        begin = max(self._offset - num_bytes, 0)
        try:
            with open_regular(self._path) as (descriptor, _):
                data = os.pread(descriptor, self._offset - begin, begin)
        except (FastLSTMError, OSError):
            return []
        return _events(data.split(b"\n")[1 if begin else 0 :])

    def read_lines(self) -> list[bytes]:
        """Returns the complete lines since the last call.

        One call reads at most 16 MB; a longer line is skipped. A file that has not changed costs
        one `stat`.
        """
        try:
            info = os.lstat(self._path)
            if not self.has_more and self._seen == (info.st_ino, info.st_size, info.st_ctime_ns):
                return []
            self.has_more = False
            with open_regular(self._path) as (descriptor, size):
                info = os.fstat(descriptor)
                if self._is_replaced(descriptor, info.st_ino, size):
                    self._inode, self._offset, self._mark = _START
                    self._is_within_long_line = False
                    self.num_replaced += 1
                self._inode = info.st_ino
                lines = self._new_lines(descriptor, size)
        except (FastLSTMError, OSError):
            self._seen = None
            return []
        self._seen = info.st_ino, size, info.st_ctime_ns
        return lines

    def _is_replaced(self, descriptor: int, inode: int, size: int) -> bool:
        if not self._inode or not self._offset:
            return False
        if inode != self._inode or size < self._offset:
            return True
        return self._bytes_around(descriptor, self._offset) != self._mark

    @staticmethod
    def _bytes_around(descriptor: int, offset: int) -> str:
        length = min(_MARK_BYTES, offset)
        ends = (os.pread(descriptor, length, place) for place in (0, offset - length))
        return b"".join(ends).hex()

    def _new_lines(self, descriptor: int, size: int) -> list[bytes]:
        data = os.pread(descriptor, min(size - self._offset, MAX_JSON_BYTES), self._offset)
        num_complete = data.rfind(b"\n") + 1
        is_full = len(data) == MAX_JSON_BYTES
        lines = data[:num_complete].split(b"\n")[:-1]
        if self._is_within_long_line and num_complete:
            lines = lines[1:]
            self._is_within_long_line = False
        if is_full and not num_complete:
            num_complete = len(data)
            lines = []
            self._is_within_long_line = True
        self.has_more = is_full
        if num_complete:
            self._offset += num_complete
            self._mark = self._bytes_around(descriptor, self._offset)
        return lines


def _events(lines: Sequence[bytes]) -> list[Event]:
    return [event for line in lines if (event := decode_event(line)) is not None]


def _checked(position: Sequence[object] | None) -> Position:
    """Returns a stored position, or the beginning where it is not one."""
    if position is None or len(position) != 3:
        return _START
    inode, offset, mark = position
    if type(inode) is not int or type(offset) is not int or not isinstance(mark, str):
        return _START
    return (inode, offset, mark) if offset > 0 else _START
