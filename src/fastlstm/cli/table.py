"""Results of a verb as aligned rows for people or as one JSON object for machines."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from fastlstm.report.terminal import cell_width, clean, columns, is_terminal, style_for, wrap

if TYPE_CHECKING:
    from collections.abc import Sequence


def print_rows(rows: Sequence[tuple[str, str]]) -> None:
    """Prints (label, text) rows; long text is wrapped on a terminal and left alone in a pipe."""
    style = style_for(sys.stdout)
    on_terminal = is_terminal(sys.stdout)
    margin = max((cell_width(label) for label, _ in rows), default=0) + 2
    for label, text in rows:
        body = clean(text).replace("\n", " ")
        parts = wrap(body, columns() - margin) if on_terminal else [body]
        for index, part in enumerate(parts):
            head = label if index == 0 else ""
            sys.stdout.write(style(head.ljust(margin), "dim") + part + "\n")
    sys.stdout.flush()


def print_json(values: dict[str, Any]) -> None:
    """Prints one JSON object on one line; what is not finite has become None before."""
    sys.stdout.write(json.dumps(values, allow_nan=False) + "\n")
    sys.stdout.flush()
