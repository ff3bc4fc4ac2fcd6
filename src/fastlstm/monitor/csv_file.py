"""The metrics of runs as one wide CSV table."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastlstm.monitor.published_rows import PublishedRow


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
    return text.encode("utf-8", "replace")  # half a surrogate pair is no UTF-8


def _cell(value: str | float | None) -> str:
    if value is None:
        return ""
    return '"' + value.replace('"', '""') + '"' if isinstance(value, str) else repr(value)
