"""Makes foreign text safe to show: control characters visible, long text cut, HTML escaped."""

from __future__ import annotations

import functools
import unicodedata
from html import escape

MAX_NAME = 80
"""Most characters shown of a name, such as a column's; a file may hold names of any length."""
MAX_TEXT = 1000
"""Most characters shown of a longer text, such as a message or a setting."""
_DIRECTIONS = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})
"""Classes of characters that change the order of the text around them."""


def visible(value: object, keep: str = "") -> str:
    r"""Returns a text with visible control characters: ESC is written as ``\x1b``.

    Characters in `keep`, such as line ends, are unchanged.
    """
    return str(value).translate(_shown(keep))


class _Shown(dict[int, str]):
    """The visible form of each character, computed once: a text may have millions."""

    def __init__(self, keep: str) -> None:
        super().__init__({ord(char): char for char in keep})

    def __missing__(self, point: int) -> str:
        char = chr(point)
        is_turned = unicodedata.bidirectional(char) in _DIRECTIONS
        is_control = unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp")
        if is_turned or is_control or point & 0xFFFE == 0xFFFE:
            char = char.encode("unicode_escape").decode("ascii")
        self[point] = char
        return char


_shown = functools.cache(_Shown)


def clipped(text: str, limit: int) -> str:
    """Returns at most `limit` characters of a text; a cut text ends with its length."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text):,} characters)"


def name_text(value: object) -> str:
    """Returns the name of a column or a series as one short line; ``""`` for an empty name."""
    return clipped(visible(value), MAX_NAME) or '""'


def to_html(value: object, keep: str = "") -> str:
    """Returns a text for HTML, between tags or in a quoted attribute; `keep` as in `visible`."""
    return escape(visible(value, keep))


def failure_text(error: Exception) -> str:
    """Returns an error as one line: its class and its message."""
    return clipped(visible(f"{type(error).__name__}: {error}".removesuffix(": ")), MAX_TEXT)
