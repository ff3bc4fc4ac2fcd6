"""CSV files: their format, and their rows through Arrow's parser."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from fastlstm.errors import DataError, counted
from fastlstm.forecast.config import ReadOptions
from fastlstm.forecast.data.names import is_text
from fastlstm.forecast.data.records import (
    MAX_COLUMNS,
    NULL_WORDS,
    FileRecords,
    MemoryFile,
    TableFile,
    damaged,
    numbers_of,
    open_input,
    require_distinct,
    require_few,
    with_nulls,
)

DELIMITERS = ",;\t|"
_BLOCK_BYTES = 8 << 20
_HEAD_BYTES = 1 << 20
_UNNAMED = re.compile(r"unnamed \d+")
_SPACES = " \u00a0\u202f"
"""Marks of thousands that a space stands for: also no-break and narrow no-break spaces."""
_CURRENCY = r"(?:USD|EUR|GBP|CHF|JPY|CNY|INR|[$€£¥₹])"
_UNITS = (
    rf"^\s*(?P<below><?)\s*(?P<open>\(?)(?P<sign>[+-]?){_CURRENCY}?\s*(?P<minus>[+-]?)(?P<number>~)"
    rf"(?P<scale>K|k|M|B|bn)?\s*(?:%|{_CURRENCY}|\s[bcdefnprsuz]{{1,3}})?(?P<close>\)?)(?P<behind>-?)\s*$"
)
"""A number, in place of ~, with signs and units that may stand beside it, or Eurostat's flags."""
_UNIT = re.compile(_UNITS.replace("~", "[\\d.,' \u2019\u00a0\u202f]*\\d[.,]?"))
_SCALES = {"K": 1e3, "k": 1e3, "M": 1e6, "B": 1e9, "bn": 1e9}
_OTHER_COLUMNS = re.compile(
    r"CSV parse error: (?:Row #(\d+): )?Expected (\d+) columns, got (\d+): ([^\n]*)"
)
_NO_ROWS = {
    "Could not skip initial": "the first line is longer than any header; is it a CSV?",
    "straddling object": f"a line has more than {_BLOCK_BYTES >> 20} MiB; is it a CSV?",
    "Empty CSV file or block": "the first line has no column names; is it a CSV?",
    "out of sync with chunker": "a quoted value spans lines, or a quote is not closed; write every"
    " row on one line",
}
"""Explanations of Arrow's messages."""


def split_lines(lines: Sequence[str], form: ReadOptions, delimiter: str) -> list[list[str]]:
    """Returns the cells of lines; raises csv.Error for one of more than 128 KiB."""
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if form.quotes else csv.QUOTE_NONE
    return list(csv.reader(lines, delimiter=delimiter, quoting=quoting, escapechar=form.escape))


def open_text(file: TableFile, form: ReadOptions) -> tuple[Any, Any]:
    """Opens a CSV; returns its bytes on disk, and its text in UTF-8 decompressed."""
    raw = open_input(file)
    compression = {".gz": "gzip", ".zst": "zstd"}.get(file.suffix)
    text = pa.CompressedInputStream(raw, compression) if compression else raw
    if codecs.lookup(form.encoding).name != "utf-8":
        text = pa.transcoding_input_stream(text, form.encoding, "utf-8")
    return raw, text


def null_words_of(form: ReadOptions) -> tuple[str, ...]:
    """Returns the texts that mean "no value"; with an escape also N: MySQL's NULL."""
    return (*NULL_WORDS, *form.na, *(["N"] if form.escape else []))


class CsvRecords(FileRecords):
    """A CSV file, plain or compressed."""

    is_parsed = True

    def __init__(self, file: TableFile, form: ReadOptions) -> None:
        self.form = form
        self.null_words = null_words_of(form)
        super().__init__(file)

    def _read_schema(self) -> pa.Schema:
        form = self.form
        with self._reading():
            text = open_text(self.file, form)[1]
            head = text.read(_HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").split(b"\n")
        if head[0].startswith(b"PK\x03\x04"):
            raise DataError(f"{self.name} is a workbook or a zip; save its sheet as CSV")
        header = next(islice(head, form.skip_rows, None), b"")
        line = header.decode("utf-8", "replace")
        if not line.strip():
            raise DataError(f"{self.name} is empty; expected a line of column names, then rows")
        self._header, self.delimiter = header, form.delimiter or delimiter_of(line)
        self._has_one_column = self.delimiter not in line
        try:
            [columns] = split_lines([line.rstrip("\r")], form, self.delimiter)
        except csv.Error:  # a name of more than 128 KiB
            columns = [line]
        limit = self.file.max_columns if isinstance(self.file, MemoryFile) else MAX_COLUMNS
        require_few(columns, self.name, limit)  # Arrow takes kilobytes for each
        self._names: list[str] | None = None
        if not form.header:
            self._names = [str(number + 1) for number in range(len(columns))]
        elif columns.count("") > 1 or (columns[-1] == "" and len(columns) > 1):
            numbered = enumerate(columns, 1)  # an empty first name is of a row counter
            self._names = [n or (f"unnamed {k}" if k > 1 else "") for k, n in numbered]
        self._marked = dict[str, pa.DataType]()
        try:
            with self._open() as reader:
                _ = reader.schema.names  # decodes them
                return self._without_marks(reader)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.name}: the column names are not UTF-8 ({error.reason} at byte"
                f" {error.start}); save the file as UTF-8, or give `encoding='cp1252'` or another"
            ) from error
        except (pa.ArrowException, OSError) as error:
            raise self._malformed(error) or damaged(self.name, error) from error

    def _without_marks(self, reader: Any) -> pa.Schema:
        """Returns the schema; texts of numbers with a mark of thousands or units are numbers."""
        is_null = pa.types.is_null
        kept = [f for f in reader.schema if not (_UNNAMED.fullmatch(f.name) and is_null(f.type))]
        schema = pa.schema(kept)
        require_distinct(schema.names, self.name)
        may_be_marked = self.form.thousands or self.form.units
        if not may_be_marked or (batch := next(iter(reader), None)) is None:
            return schema
        for name in (field.name for field in schema if is_text(field.type)):
            values = with_nulls(batch.column(name), self.null_words)
            if values.null_count < len(values):
                parts = pc.extract_regex(values, self._pattern)
                if parts.null_count == values.null_count:
                    self._marked[name] = pa.float64()
        kinds = [(f.name, self._marked.get(f.name, f.type)) for f in schema]
        return pa.schema(kinds)

    @property
    def _thousands(self) -> str:
        mark = self.form.thousands
        return f"[{_SPACES}]" if mark and mark in _SPACES else re.escape(mark)

    @property
    def _pattern(self) -> str:
        """Numbers with marks of thousands, signs and units, as an expression of groups."""
        decimal = re.escape(self.form.decimal)
        groups = rf"\d{{1,3}}(?:{self._thousands}\d{{3}})+|" if self.form.thousands else ""
        number = rf"(?:(?:{groups}\d+)(?:{decimal}\d*)?|{decimal}\d+)(?:[eE][+-]?\d+)?"
        form = _UNITS if self.form.units else r"^\s*(?P<sign>[+-]?)(?P<number>~)\s*$"
        return form.replace("~", number)

    def batches(self, types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        row = 0
        asked = {n: pa.string() if n in self._marked else kind for n, kind in types.items()}
        try:
            with self._open(asked) as reader:
                for batch in reader:
                    is_plain = self._raw is self._text
                    self.done_bytes = self._raw.tell() if is_plain else 0
                    yield self._unmarked(batch, types, row)
                    row += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise self._malformed(error) or self._bad_value(asked, row, error) from error

    def _unmarked(
        self, batch: pa.RecordBatch, types: Mapping[str, pa.DataType], row: int
    ) -> pa.RecordBatch:
        """Returns a batch with empty texts as nulls, and numbers for texts with marks."""
        columns = {
            name: pc.if_else(pc.equal(c, ""), pa.scalar(None, c.type), c) if is_text(c.type) else c
            for name, c in zip(batch.schema.names, batch.columns, strict=True)
        }
        for name in self._marked.keys() & types.keys():
            if is_text(types[name]):
                continue
            column = with_nulls(columns[name], self.null_words)
            parts = pc.extract_regex(column, self._pattern)
            group = {f.name: parts.field(f.name) for f in parts.type}
            number = group["number"]
            if self.form.thousands:
                number = pc.replace_substring_regex(number, self._thousands, "")
            number = pc.replace_substring(number, self.form.decimal, ".")
            signs = [group[n] for n in ("open", "sign", "minus", "behind") if n in group]
            is_negative = pc.match_substring_regex(pc.binary_join_element_wise(*signs, ""), "[-(]")
            number = pc.binary_join_element_wise(pc.if_else(is_negative, "-", ""), number, "")
            is_number = pc.is_valid(parts)
            if "open" in group:
                lengths = (pc.utf8_length(group[n]) for n in ("open", "close"))
                is_number = pc.and_(is_number, pc.fill_null(pc.equal(*lengths), False))
            text = pc.if_else(is_number, number, column)  # another text is refused
            numbers = numbers_of(text, self.name, name, row, is_csv=True)
            if "scale" in group:
                scales = [_SCALES.get(scale, 1.0) for scale in group["scale"].to_pylist()]
                halves = pc.if_else(pc.equal(group["below"], "<"), 0.5, 1.0)
                numbers = pc.multiply(pc.multiply(numbers, pa.array(scales)), halves)
            columns[name] = numbers
        return pa.record_batch(columns)

    def _open(
        self, types: Mapping[str, pa.DataType] | None = None, use_threads: bool = True
    ) -> Any:
        form = self.form
        self._raw, self._text = open_text(self.file, form)
        source = self._text
        if form.skip_footer or form.skip_headers:
            repeated = self._header if form.skip_headers else None
            source = pa.PythonFile(_Lines(source, form.skip_footer, repeated), mode="r")
        # NA can be a name; see `with_nulls`
        convert = arrow_csv.ConvertOptions(strings_can_be_null=False)
        convert.null_values, convert.decimal_point = self.null_words, form.decimal
        if types is not None:
            convert.column_types, convert.include_columns = dict(types), list(types)
        return arrow_csv.open_csv(
            source,
            arrow_csv.ReadOptions(
                use_threads=use_threads,
                block_size=_BLOCK_BYTES,
                skip_rows=form.skip_rows + (self._names is not None and form.header),
                skip_rows_after_names=form.skip_below,
                column_names=self._names,
            ),
            arrow_csv.ParseOptions(
                delimiter=self.delimiter,
                quote_char='"' if form.quotes else False,
                escape_char=form.escape or False,
                ignore_empty_lines=not self._has_one_column,  # or an empty line is a value
            ),
            convert,
        )

    def _malformed(self, error: Exception) -> DataError | None:
        """Returns the error for malformed lines, or None if `error` is about something else.

        Parses Arrow's message: threads of Arrow would call a handler in Python even while the
        process ends.
        """
        match = _OTHER_COLUMNS.search(str(error))
        if match is None:
            reason = next((text for words, text in _NO_ROWS.items() if words in str(error)), None)
            return None if reason is None else DataError(f"{self.name}: {reason}")
        if match[1] is None:  # Arrow counts lines in one thread only
            try:
                with self._open(use_threads=False) as reader:
                    deque(reader, maxlen=0)
            except (pa.ArrowException, OSError) as found:
                match = _OTHER_COLUMNS.search(str(found)) or match
        number = "a line" if match[1] is None else f"line {match[1]}"
        return DataError(
            f"{self.name}: {number} has {counted(int(match[3]), 'column')}, expected {match[2]}:"
            f" {match[4][:80]!r}"
        )

    def _bad_value(self, types: Mapping[str, pa.DataType], row: int, error: Exception) -> DataError:
        """Finds the value that could not be converted, by reading from `row` on as text."""
        numbers = [name for name, kind in types.items() if pa.types.is_floating(kind)]
        try:
            with self._open(dict.fromkeys(numbers, pa.string())) as reader:
                done = 0
                for batch in reader:
                    if done + batch.num_rows > row:
                        for name in numbers:
                            texts = with_nulls(batch.column(name), self.null_words)
                            numbers_of(texts, self.name, name, done, is_csv=True)
                    done += batch.num_rows
        except DataError as bad_value:
            return bad_value
        except (pa.ArrowException, OSError):
            pass
        return damaged(self.name, error)


class _Lines(io.RawIOBase):
    """The lines of a text without its last ones and without repeated headers."""

    def __init__(self, source: Any, num_last: int, header: bytes | None) -> None:
        super().__init__()
        self._source, self._num_last = source, num_last
        repeated = None if header is None else re.compile(b"^" + re.escape(header) + b"\n", re.M)
        self._repeated, self._is_first = repeated, True
        self._held, self._ready, self._is_done = b"", b"", False

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        while not self._ready and not self._is_done:
            self._advance()
        end = len(self._ready) if size < 0 else size
        part, self._ready = self._ready[:end], self._ready[end:]
        return part

    def _advance(self) -> None:
        """Reads a block, and keeps the lines that may be the last ones."""
        block = self._source.read(_HEAD_BYTES)
        data, self._is_done = self._held + block, not block
        if self._is_done:
            data = data.rstrip(b"\r\n") + b"\n"
        end = len(data)
        for _ in range(self._num_last + 1):
            end = max(data.rfind(b"\n", 0, end), 0)
        if self._is_done and not self._num_last:
            end = len(data) - 1
        if end == 0:
            self._held = data
            return
        ready, self._held = data[: end + 1], data[end + 1 :]
        if self._repeated is not None:
            first = self._repeated.search(ready) if self._is_first else None
            begin = 0 if first is None else first.end()
            ready = ready[:begin] + self._repeated.sub(b"", ready[begin:])
        self._ready, self._is_first = ready, False


def without_unit(cell: str) -> str:
    """Returns the number of a text that has signs or units beside it; another text as it is."""
    match = _UNIT.fullmatch(cell)
    if match is None or bool(match["open"]) != bool(match["close"]):
        return cell
    if cell.strip().lstrip("+-") == match["number"]:
        return cell
    is_negative = match["open"] or "-" in match["sign"] + match["minus"] + match["behind"]
    return "-" * bool(is_negative) + match["number"]


def delimiter_of(line: str) -> str:
    """Returns the most frequent delimiter of a line."""
    return max(DELIMITERS, key=line.count)
