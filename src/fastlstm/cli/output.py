"""What a verb prints: aligned rows for people, JSON for machines, notes on standard error."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastlstm.errors import UsageError, as_flags, respelled
from fastlstm.report.markup import visible
from fastlstm.report.terminal import cell_width, columns, is_terminal, style_for, wrap
from fastlstm.system.redaction import redacted
from fastlstm.system.storage import finite, write_file

_NAME = re.compile(r"`([a-z_0-9]+)`")
_OTHERS = (
    *("out", "text", "chars", "vocab", "answer", "classes", "length", "check_text"),
    *("to", "prune", "output_rank", "distil", "max_bytes"),
)
"""Options of import, export and compress that messages name."""


def print_json(values: dict[str, Any]) -> None:
    """Prints one JSON object on one line; NaN and infinity become null."""
    sys.stdout.write(json.dumps(finite(values), allow_nan=False) + "\n")
    sys.stdout.flush()


def print_result(facts: dict[str, Any], rows: Sequence[tuple[str, str]], use_json: bool) -> None:
    """Prints all facts as one JSON object, or (label, text) rows.

    Long text is wrapped on a terminal and left alone in a pipe.
    """
    if use_json:
        print_json(_redacted(facts))
        return
    rows = [(label, redacted(with_flags(text))) for label, text in rows]
    style, on_terminal = style_for(sys.stdout), is_terminal(sys.stdout)
    margin = max((cell_width(label) for label, _ in rows), default=0) + 2
    for label, text in rows:
        parts = wrap(visible(text), columns() - margin) if on_terminal else [visible(text)]
        for index, part in enumerate(parts):
            head = label if index == 0 else ""
            sys.stdout.write(style(head.ljust(margin), "dim") + part + "\n")
    sys.stdout.flush()


def _redacted(value: Any) -> Any:
    """Returns a value of JSON with `***` for each secret in its texts."""
    if isinstance(value, dict):
        return {name: _redacted(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redacted(item) for item in value]
    return redacted(value) if isinstance(value, str) else value


def table(rows: Sequence[Sequence[str]]) -> str:
    """Returns aligned columns; the first is on the left, the others on the right."""
    cells = [[visible(cell) for cell in row] for row in rows]
    widths = [max(map(cell_width, column)) for column in zip(*cells, strict=True)]
    lines = []
    for first, *others in cells:
        line = first + " " * (widths[0] - cell_width(first))
        for cell, width in zip(others, widths[1:], strict=True):
            line += "  " + " " * (width - cell_width(cell)) + cell
        lines.append(line.rstrip())
    return "\n".join(lines)


def with_flags(text: str) -> str:
    """Returns a message with its settings as flags: `gaps='fill'` becomes ``--gaps fill``."""
    text = respelled(text, as_flags)
    if _NAME.search(text) is None:
        return text
    from fastlstm.cli.options import FORECAST_OPTIONS, TEXT_OPTIONS  # not for `fastlstm --help`

    options = (*TEXT_OPTIONS, *FORECAST_OPTIONS)
    flags = {name: f"--{name.replace('_', '-')}" for name in _OTHERS}
    flags |= {option.name: option.flag for option in options}
    return _NAME.sub(lambda name: f"`{flags.get(name[1], name[1])}`", text)


def say(text: str, details: Sequence[str] = ()) -> None:
    """Prints a message on standard error, and indented lines below it."""
    text, details = with_flags(text), list(map(with_flags, details))
    texts = [f"fastlstm: {text}", *(f"  {line}" for line in details)]
    lines = [visible(redacted(line)) for line in texts]
    with contextlib.suppress(OSError, ValueError):  # it is closed, or full
        print("\n".join(lines), file=sys.stderr, flush=True)


def write_page(path: str, data: bytes, flag: str) -> None:
    """Writes an HTML file, atomically; a link stays and its target is written. Raises UsageError: a
    directory or a device is there; StorageError: the write failed, an old file is intact."""
    place = Path(os.path.realpath(path))
    if os.path.lexists(place) and not os.path.isfile(place):
        raise UsageError(f"{flag} is {path}, expected a file such as runs.html")
    write_file(place, data)
