"""Decides whether a source is text or a table, from names and first lines."""

from __future__ import annotations

import codecs
import glob
import os
import re
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fastlstm.system.object_store import is_url
from fastlstm.text.data.sources import (
    BUILT_IN,
    COLUMNAR_SUFFIXES,
    TEXT_SUFFIXES,
    is_columnar,
    text_columns,
    text_suffix,
    walk,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_BINARY_TABLES = (*COLUMNAR_SUFFIXES, ".feather", ".ipc", ".npy")
_CSV = tuple(kind + packed for kind in (".csv", ".tsv") for packed in ("", ".gz", ".zst"))
_SNIFFED_LINES, _SNIFFED_BYTES = 20, 1 << 20
_QUOTED, _DELIMITER = re.compile(r'"([^"]*)"'), re.compile(r"[,;\t|]")
_VALUE = re.compile(r"(?=.*\d)[-+\d.,:/eETZ% ]+")
"""A number or a time."""
_HEADER_LINES = 4
"""Lines that may stand above the rows of a table."""
_MAX_FILES = 100_000
"""Limit of files of a directory that are looked at."""

SourceKind = Literal["binary table", "csv", "text", "mixed", "unknown"]


def kind_of_source(source: str, text_field: str | None = None) -> SourceKind:
    """Returns the kind of a source of `train`; "unknown" if it does not exist. With `text_field`,
    Parquet files are texts if the first one has a column of texts of this name."""
    tables, texts = files_of(source)
    first = None if text_field is None else next(filter(is_columnar, tables), None)
    if first is not None and text_field in text_columns(first):
        texts += filter(is_columnar, tables)
        tables = [path for path in tables if not is_columnar(path)]
    if tables and texts:
        return "mixed"
    if tables:
        return "binary table" if any(map(_is_binary, tables)) else "csv"
    is_built_in = source == "-" or source in BUILT_IN
    return "text" if texts or is_built_in else "unknown"


def column_of_texts(source: str) -> str | None:
    """Returns the column of the first Parquet file of a source that holds long texts, or None."""
    file = next(filter(is_columnar, files_of(source)[0]), None)
    if file is None:
        return None
    from fastlstm.text.data import parquet  # pyarrow takes a while to import

    return parquet.column_of_texts(file)


def _is_binary(path: Path) -> bool:
    return path.name.lower().endswith(_BINARY_TABLES)


def files_of(source: str) -> tuple[list[Path], list[Path]]:
    """Returns the tables and the texts among the files of a source."""
    path = Path(os.path.expanduser(source))
    if not source:  # its path would be the current directory
        files = []
    elif is_url(source):  # an object store; texts are read from none
        path = Path(source.partition("?")[0])
        is_text = text_suffix(path) in TEXT_SUFFIXES and not path.name.lower().endswith(_CSV)
        return ([], [path]) if is_text else ([path], [])
    elif os.path.isdir(path):
        files = [
            p
            for p in islice(walk(path), _MAX_FILES)
            if _is_binary(p) or text_suffix(p) in TEXT_SUFFIXES
        ]
    elif os.path.exists(path):
        files = [path]
    else:
        found = glob.glob(str(path), recursive=True) if glob.has_magic(source) else []
        files = [Path(p) for p in found] or [path] * _is_binary(path)
    tables: list[Path] = []
    texts: list[Path] = []
    for file in files:
        (tables if _is_table(file) else texts).append(file)
    return tables, texts


def _is_table(path: Path) -> bool:
    name = path.name.lower()
    is_named_so = name.endswith((*_BINARY_TABLES, *_CSV))
    return is_named_so or (name.endswith((".txt", ".dat")) and _has_columns(path))


def _has_columns(path: Path) -> bool:
    """Whether first lines have equally many delimiters, and nine of ten rows hold a number or time.

    A row is every line but comments (#) and the first ones, such as names and units; one of its
    cells is nothing but that number or time. Few rows may be something else.
    """
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            start = file.read(_SNIFFED_BYTES)
        is_wide = start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        text = start.decode("utf-16" if is_wide else "utf-8", "replace")
    except OSError:
        return False
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    lines = lines[:_SNIFFED_LINES]
    lines = [_QUOTED.sub(lambda quoted: _DELIMITER.sub(" ", quoted[1]), line) for line in lines]
    tables = ([line.split(mark) for line in lines] for mark in ",;\t|")
    return len(lines) > 2 and any(map(_are_rows, tables))


def _are_rows(table: list[list[str]]) -> bool:
    has_value = [any(_VALUE.fullmatch(cell.strip()) for cell in row) for row in table]
    most = min(_HEADER_LINES, len(table) - 2)
    odd = (n for n in range(most) if not has_value[n] or len(table[n]) != len(table[-1]))
    rows = slice(max(odd, default=0) + 1, None)
    is_even = len({*map(len, table[rows])}) == 1
    return is_even and has_value[rows].count(False) <= len(table) // 10


def few(paths: Sequence[Path]) -> str:
    """Returns the name of the first file and the number of others."""
    return paths[0].name if len(paths) == 1 else f"{paths[0].name} and {len(paths) - 1:,} more"
