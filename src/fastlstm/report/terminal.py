"""What a terminal can show, and how numbers, sizes, times and shares are written everywhere."""

from __future__ import annotations

import importlib
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TextIO

from fastlstm.system import environment

MIN_COLUMNS = 40
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


@dataclass(frozen=True)
class Glyphs:
    """Characters beyond ASCII; `ASCII_GLYPHS` replaces them on terminals that lack them."""

    done: str = "━"
    todo: str = "─"
    dot: str = "·"
    bar: str = "│"
    best: str = "★"
    times: str = "×"


ASCII_GLYPHS = Glyphs(done="=", todo="-", dot="|", bar="|", best="*", times="x")


def is_terminal(stream: TextIO) -> bool:
    """Returns whether `stream` is a terminal with carriage return and erase."""
    try:
        return stream.isatty() and environment.value("TERM") != "dumb"
    except (AttributeError, ValueError):
        return False


def notebook_display() -> Callable[..., Any] | None:
    """Returns IPython's `display` in a notebook, else None."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if getattr(shell, "kernel", None) is None:
        return None
    return importlib.import_module("IPython.display").display  # type: ignore[no-any-return]


def style_for(stream: TextIO) -> Callable[..., str]:
    """Returns a function of a text and names of `_CODES` that wraps the text in colour codes, on a
    terminal without NO_COLOR."""
    is_on = is_terminal(stream) and not environment.value("NO_COLOR")

    def styled(text: str, *names: str) -> str:
        if not is_on or not names or not text:
            return text
        return f"\x1b[{';'.join(_CODES[name] for name in names)}m{text}\x1b[0m"

    return styled


def glyphs_for(stream: TextIO) -> Glyphs:
    """Returns box-drawing characters if the stream's encoding has them, else ASCII."""
    try:
        "━─·│★×".encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII_GLYPHS
    return Glyphs()


def columns() -> int:
    """Returns the columns that can be written without wrapping, one less than the terminal's."""
    return max(MIN_COLUMNS, shutil.get_terminal_size((80, 24)).columns) - 1


def cell_width(text: str) -> int:
    """Returns the columns of `text`: 2 for East Asian wide characters, 0 for combining ones."""
    if text.isascii():
        return len(text)
    return sum(_char_width(char) for char in text)


def _char_width(char: str) -> int:
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1


def clip(text: str, width: int) -> str:
    """Returns at most `width` columns of `text`; a cut text ends with an ellipsis."""
    return text if cell_width(text) <= width else _chop(text, width - 3)[0] + "..."


def wrap(text: str, width: int) -> list[str]:
    """Breaks a paragraph into lines of at most `width` columns, at spaces if possible.

    Keeps spaces at the start of the paragraph.
    """
    lines: list[str] = []
    body = text.lstrip(" ")
    line = indent = " " * min(len(text) - len(body), width // 2)
    for word in body.split(" "):
        candidate = f"{line} {word}" if line != indent else line + word
        indent = ""
        if cell_width(candidate) <= width:
            line = candidate
            continue
        if line.strip():
            lines.append(line)
        pieces = _chop(word, width)
        lines += pieces[:-1]
        line = pieces[-1]
    return [*lines, line]


def _chop(word: str, width: int) -> list[str]:
    pieces, used = [""], 0
    for char in word:
        if used + _char_width(char) > width:
            pieces.append("")
            used = 0
        pieces[-1] += char
        used += _char_width(char)
    return pieces


_UNITS = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}


def short_count(value: float) -> str:
    """Returns at most five characters: 950, 12.3k, 999k, 1.23M, 45.6G."""
    for unit, size in _UNITS.items():
        if value >= 0.9995 * size:
            scaled = value / size
            digits = 2 if scaled < 9.995 and unit != "k" else 1 if scaled < 99.95 else 0
            return f"{scaled:.{digits}f}{unit}"
    return f"{value:.0f}"


def short_bytes(value: float) -> str:
    """Returns a size in decimal units: 950 B, 12.3 kB, 1.23 GB."""
    short = short_count(value)
    return f"{short[:-1]} {short[-1]}B" if short[-1] in "kMGT" else f"{short} B"


def tick_texts(values: Iterable[float]) -> list[str]:
    """Returns the labels of an axis: 1.5, 2018, 20k, 3M; its values are round to 12 digits.

    Below 10,000 no label has a unit: a year is not 2.018k.
    """
    values, texts = list(values), []
    units = _UNITS if max(map(abs, values), default=0.0) >= 10_000 else {}
    for value in values:
        unit, size = next(((u, s) for u, s in units.items() if abs(value) >= s), ("", 1.0))
        texts.append(f"{value / size:.12g}{unit}")
    return texts


def clock(seconds: float) -> str:
    """Returns 0:07, 12:34, 1:02:03 or 4d03h."""
    whole = max(0, round(seconds))
    if whole >= 100 * 3600:
        return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def percent(share: float) -> str:
    """Returns a share between 0 and 1 as 0.1%, 9.5% or 61%."""
    value = 100 * share
    return f"{value:.1f}%" if 0 < value < 9.95 else f"{value:.0f}%"
