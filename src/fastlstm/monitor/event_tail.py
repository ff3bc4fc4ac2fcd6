"""Follows the events of a run while it writes them."""

from __future__ import annotations

import json
import os
from pathlib import Path

from fastlstm.errors import FastLSTMError
from fastlstm.report.events import Event, current
from fastlstm.system.storage import MAX_JSON_BYTES, open_regular

_READ_BYTES = 1 << 22


class EventTail:
    """Reads the complete new lines of a metrics.jsonl.

    Args:
        path: the file; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._inode, self._rest = path, 0, -1, b""

    def read(self) -> list[Event]:
        """Returns the events since the last call, of at most 4 MB of lines.

        A file that was replaced or cut is read from its beginning; damaged lines are skipped.
        """
        try:
            with open_regular(self._path) as (descriptor, size):
                inode = os.fstat(descriptor).st_ino
                if inode != self._inode or size < self._offset:
                    self._inode, self._offset, self._rest = inode, 0, b""
                data = os.pread(descriptor, _READ_BYTES, self._offset)
        except FastLSTMError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_JSON_BYTES:
            self._rest = b""
        return [event for line in lines if (event := _decoded(line)) is not None]


def _decoded(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return current(event) if isinstance(event, dict) else None
