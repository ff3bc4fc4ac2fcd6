"""The metrics of a run as one wide CSV table."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from fastlstm.errors import ConfigError, CorruptFileError, Setting
from fastlstm.system.storage import open_regular, write_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from fastlstm.monitor.destination import PublishedRun, State
    from fastlstm.monitor.published_rows import PublishedRow

_WRITE_EVERY_S = 10.0
_FIRST_BYTES = b'"run","step"'
"""Of every table that is written here."""


class CsvFile:
    """Writes the table anew as a whole, at most every 10 s: publishing again repeats nothing.

    Args:
        path: of the file; one that is there is replaced if it is such a table.

    Raises:
        ConfigError: something else is there.
    """

    is_append_only = False
    next_command = note = ""

    def __init__(self, path: Path) -> None:
        _refuse_other_file(path)
        self.where = str(path)
        self._path, self._name = path, ""
        self._rows: Sequence[PublishedRow] = ()
        self._written_s = float("-inf")

    def open(self, run: PublishedRun) -> int | None:
        """Returns None: nothing of what is there stays."""
        self._name = run.name
        return None

    def describe(self, config: Mapping[str, Any]) -> None:
        """A table has no configuration."""

    def send(self, rows: Sequence[PublishedRow]) -> None:
        self._rows = rows
        if time.monotonic() - self._written_s >= _WRITE_EVERY_S:
            self._write()

    def close(self, state: State) -> None:
        if self._rows:
            self._write()

    def _write(self) -> None:
        write_file(self._path, csv_table(self._rows, self._name))
        self._written_s = time.monotonic()


def _refuse_other_file(path: Path) -> None:
    if not os.path.lexists(path):
        return
    try:
        with open_regular(path) as (descriptor, size):
            is_own = not size or os.pread(descriptor, len(_FIRST_BYTES), 0) == _FIRST_BYTES
    except CorruptFileError as error:
        raise ConfigError(Setting("out", str(path)), f": {error}; choose another file") from None
    if not is_own:
        raise ConfigError(
            Setting("out", str(path)),
            " is there and was not written by publish; choose another file, or remove it",
        )


def csv_table(rows: Sequence[PublishedRow], name: str) -> bytes:
    """Returns a CSV table (RFC 4180, UTF-8) with a line for each step.

    Text is always in quotation marks, numbers never are; a number that reads back as the same
    float; a value that was not recorded is empty.

    Args:
        rows: of one run.
        name: of the run, the first column of each line.
    """
    keys = list(dict.fromkeys(key for row in rows for key in row.values))
    lines: list[list[str | float | None]] = [["run", "step", *keys, "sample"]]
    lines += [[name, row.step, *map(row.values.get, keys), row.sample] for row in rows]
    text = "".join(",".join(map(_cell, line)) + "\r\n" for line in lines)
    return text.encode("utf-8", "replace")  # of a name of bytes


def _cell(value: str | float | None) -> str:
    if value is None:
        return ""
    return '"' + value.replace('"', '""') + '"' if isinstance(value, str) else repr(value)
