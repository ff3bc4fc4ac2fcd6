"""Sources of text: files, directories, globs, stdin, JSON lines, Parquet, built-in corpora."""

from __future__ import annotations

import glob
import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from fastlstm.errors import DataError, counted, kind_of_value, nearest_hint
from fastlstm.system.cache import file_signature

BUILT_IN = {
    "python-docs": "the language reference behind help(), 0.5 MB of English",
    "python-stdlib": "the standard library's Python source, 12 MB",
}
_SKIPPED_DIRECTORIES = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib-dynload"}
)


def corpus_text() -> str:
    """Returns the topics of `pydoc_data`, sorted by title and joined by a newline."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "python-docs needs pydoc_data, which this Python lacks; use python-stdlib or a file"
        ) from error
    return "\n".join(str(topics[title]) for title in sorted(topics))


def corpus_files() -> list[Path]:
    """Returns the standard library's ``.py`` files without its tests, sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for directory, names, leaves in os.walk(root):
        names[:] = [name for name in names if name not in _SKIPPED_DIRECTORIES]
        paths = (Path(directory, leaf) for leaf in leaves if leaf.endswith(".py"))
        files += [path for path in paths if path.is_file() and path.stat().st_size]
    files.sort()
    if not files:
        raise DataError(f"{root} has no source of the standard library; use python-docs or a file")
    return files


_SUFFIXES = """
    .txt .text .md .markdown .rst .tex .org .adoc .srt .csv .tsv .log .jsonl .ndjson .html .htm .xml
    .json .yaml .yml .toml .ini .cfg .py .pyi .c .h .cc .cpp .hpp .cu .rs .go .java .kt .js .ts .jsx
    .tsx .css .sh .rb .php .pl .lua .r .jl .scala .swift .sql .hs .ml .el .vim
"""
TEXT_SUFFIXES = frozenset(_SUFFIXES.split())
COMPRESSED_SUFFIXES = frozenset({".gz", ".zst"})
_NO_SOURCE = "no source given; name a file, a directory, a glob, - or a built-in corpus"
_SIMILAR_NAME = 0.7
_RAW_JSON = (
    "{} is read as it is, with its brackets and quotes; for the texts in it write one JSON object"
    " per line to a .jsonl file"
)
COLUMNAR_SUFFIXES = (".parquet", ".pq", ".arrow")
Form = Literal["plain", "jsonl", "parquet"]
_JSONL_SUFFIXES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Document:
    """A file at `path`, or UTF-8 `data` in memory; `name` is for messages.

    Every line of JSON lines is an object with a document in its text field, every row of a Parquet
    file has a document in the column of this name. A stream (a pipe or stdin) is readable once, so
    it is copied to a file first.
    """

    name: str
    path: Path | None = None
    data: bytes | None = None
    form: Form = "plain"
    is_stream: bool = False

    def size(self) -> int | None:
        """Returns the bytes on disk (compressed size for .gz and .zst); None for a stream."""
        if self.data is not None:
            return len(self.data)
        if self.is_stream or self.path is None:
            return None
        try:
            return self.path.stat().st_size
        except OSError as error:
            raise DataError(f"cannot read {self.name}: {error.strerror}") from error


@dataclass(frozen=True)
class InputText:
    """At least one document, in reading order; `notes` are remarks such as skipped files."""

    name: str
    documents: tuple[Document, ...]
    notes: tuple[str, ...] = ()

    @cached_property
    def total_bytes(self) -> int | None:
        """Bytes on disk of all documents, or None if one is a stream."""
        sizes = [document.size() for document in self.documents]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def signature(self) -> list[list[str | int]] | None:
        """Returns `file_signature` of every file, or None if not all documents are files."""
        rows: list[list[str | int]] = []
        for document in self.documents:
            if document.path is None or document.is_stream:
                return None
            try:
                path, *rest = file_signature(document.path)
            except OSError:
                return None
            rows.append([path, document.form, *rest])
        return rows


def open_source(source: str | Path | Sequence[str | Path], text_field: str = "text") -> InputText:
    """Finds the documents of a source without reading them.

    Args:
        source: a file, a directory (searched recursively for text suffixes), a glob pattern,
            ``"-"`` for stdin, the name of a built-in corpus (``python-docs``, ``python-stdlib``),
            or a sequence of those, taken in order. ``.gz`` and ``.zst`` are decompressed;
            ``.jsonl`` holds one JSON object per line, ``.parquet`` one document per row.
        text_field: the column of texts that Parquet files of a directory must have.

    Raises:
        DataError: there is no such file, or no text in it.
    """
    if isinstance(source, str | Path):
        return _open_one(source, text_field)
    if not isinstance(source, Sequence) or not all(isinstance(p, str | Path) for p in source):
        raise DataError(
            f"the source is {kind_of_value(source)}, expected a path or a list of paths; for a"
            " frame or an array use fastlstm.Forecaster(horizon=N).fit(table)"
        )
    parts = [_open_one(part, text_field) for part in source]
    if not parts:
        raise DataError(_NO_SOURCE)
    if len(parts) == 1:
        return parts[0]
    return InputText(
        f"{parts[0].name} and {len(parts) - 1} more",
        tuple(document for part in parts for document in part.documents),
        tuple(note for part in parts for note in part.notes),
    )


def _open_one(source: str | Path, text_field: str) -> InputText:
    name = str(source)
    if source == "":  # Path("") would be the current directory
        raise DataError(_NO_SOURCE)
    if name == "-":
        return InputText("stdin", (Document("stdin", is_stream=True),))
    if name == "python-docs":
        return InputText(name, (Document(name, data=corpus_text().encode("utf-8")),))
    if name == "python-stdlib":
        return InputText(name, tuple(Document(str(path), path) for path in corpus_files()))
    path = Path(os.path.expanduser(source))
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        if isinstance(source, str) and glob.has_magic(name):
            return _open_glob(name)
        raise _missing(name, path, error) from error
    if stat.S_ISDIR(mode):
        return _open_directory(path, text_field)
    notes = (_RAW_JSON.format(name),) if text_suffix(path) == ".json" else ()
    return InputText(name, (_file(path, name, mode),), notes)


def _missing(name: str, path: Path, error: Exception) -> DataError:
    if isinstance(error, FileNotFoundError):
        hint = hint_of_file(path, BUILT_IN)
        return DataError(
            f"no such file or directory: {name}{hint}; give a text file, a directory, a glob,"
            f" - for stdin, or a built-in corpus ({', '.join(BUILT_IN)})"
        )
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return DataError(f"cannot read {name}: {reason}; check the path and its permissions")


def hint_of_file(path: Path, others: Iterable[str] = ()) -> str:
    """Returns ``" (did you mean 'x'?)"`` for a missing path, or an empty string."""
    try:
        siblings = [entry.name for entry in os.scandir(path.parent)]
    except FileNotFoundError:
        return f" (there is no directory {path.parent})"
    except OSError:
        siblings = []
    return nearest_hint(path.name, [*siblings, *others], _SIMILAR_NAME)


def _file(path: Path, name: str, mode: int) -> Document:
    if not os.access(path, os.R_OK):
        raise DataError(f"cannot read {name}: Permission denied; check its permissions")
    form: Form = "jsonl" if text_suffix(path) in _JSONL_SUFFIXES else "plain"
    form = "parquet" if is_columnar(path) else form
    return Document(name, path, form=form, is_stream=not stat.S_ISREG(mode))


def is_columnar(path: Path) -> bool:
    """Returns whether a file is named as a Parquet or Arrow file, which is compressed inside."""
    return path.suffix.lower() in COLUMNAR_SUFFIXES


def text_suffix(path: Path) -> str:
    """Returns the suffix in lower case, without .gz or .zst; "" if there is none."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if len(suffixes) > 1 and suffixes[-1] in COMPRESSED_SUFFIXES:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _open_glob(pattern: str) -> InputText:
    matches = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
    paths = [Path(match) for match in matches if os.path.isfile(match)]
    if not paths:
        raise DataError(f"no file matches {pattern}; check the pattern (** crosses directories)")
    documents = tuple(_file(path, str(path), path.stat().st_mode) for path in paths)
    return InputText(pattern, documents)


def _open_directory(root: Path, text_field: str) -> InputText:
    documents: list[Document] = []
    skipped: Counter[str] = Counter()
    paths = sorted(walk(root, _refuse))
    columns = {path for path in paths if is_columnar(path) and text_field in text_columns(path)}
    plain = TEXT_SUFFIXES - ({".json"} if columns else set())  # it describes them
    for path in paths:
        is_text = path in columns or text_suffix(path) in plain
        if not is_text or not path.is_file():
            skipped[path.suffix.lower() or "no suffix"] += 1
        elif (info := path.stat()).st_size:
            documents.append(_file(path, str(path), info.st_mode))
    kinds = ", ".join(f"{count} {kind}" for kind, count in skipped.most_common(5))
    if not documents:
        what = f"has no text files, only {kinds}" if kinds else "is empty"
        raise DataError(
            f"{root} {what}; known suffixes are .txt .md .rst .py .jsonl and others, also with .gz"
            " or .zst; name other files directly or by a glob"
        )
    files = counted(sum(skipped.values()), "file")
    notes = (f"{root}: {files} skipped ({kinds})",) if skipped else ()
    return InputText(str(root), tuple(documents), notes)


def text_columns(file: Path) -> list[str]:
    """Returns the columns of texts of a Parquet file; none if it cannot be read."""
    from fastlstm.text.data import parquet  # pyarrow takes a while to import

    return parquet.text_columns(file)


def walk(root: Path, onerror: Callable[[OSError], object] | None = None) -> Iterator[Path]:
    """Yields the files below a directory, except hidden files and Python's caches."""
    for directory, names, files in os.walk(root, onerror=onerror):
        names[:] = sorted(n for n in names if not n.startswith(".") and n != "__pycache__")
        yield from (Path(directory, name) for name in sorted(files) if not name.startswith("."))


def _refuse(error: OSError) -> None:
    raise DataError(f"cannot read {error.filename}: {error.strerror}") from error
