"""A look at the first and last lines of a CSV: which options its format needs.

Nothing is guessed silently: a file that looks unlike the format it is read with is refused, with
all the options that it needs in one message.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa

from fastlstm.errors import DataError, counted
from fastlstm.forecast.csv_format import CsvFormat
from fastlstm.forecast.data.csv_records import DELIMITERS, delimiter_of, open_text
from fastlstm.forecast.data.records import NULL_WORDS, NUMBER
from fastlstm.forecast.data.table_files import TableFile, open_input
from fastlstm.forecast.data.time_text import (
    are_times,
    columns_of_time,
    formats_of,
    is_like_time,
)
from fastlstm.system.charset import encoding_of
from fastlstm.system.object_store import RemoteFile

_LINES = 1000
_CELLS, _FEWEST_LINES = 50_000, 100
"""Fewer lines of a wide file are looked at."""
_BYTES = 1 << 20
_NUMBER = re.compile(NUMBER)
_MARKED = re.compile(r"[+-]?(\d{1,3}([.,' \u2019\u00a0\u202f]\d{3})+([.,]\d+)?|\d*,\d+)")
_DECIMAL_COMMA = re.compile(r"[+-]?(\d{1,3}(\.\d{3})+,\d+|0*,\d+|\d{4,},\d+|\d+,(\d{1,2}|\d{4,}))")
_GROUPS = re.compile(
    r"[+-]?\d{1,3}(?:([,.])\d{3}(?:\1\d{3})+|(,)\d{3}\.\d*|(\.)\d{3},\d*"
    r"|(['\u2019 \u00a0\u202f])\d{3})[\d,.' \u2019\u00a0\u202f]*"
)
"""Numbers whose mark certainly groups thousands."""
_ISO = re.compile(r"\d{4}-\d\d-\d\d([T ]|$)")
_CLOCK = re.compile(r"\d{1,2}[:.]\d{2}([:.]\d{2}(\.\d+)?)?( ?[AaPp][Mm])?")
_YEAR = re.compile(r"(18|19|20)\d\d")
_MONTH = re.compile(r"0?[1-9]|1[0-2]")
_MONTHS = re.compile(r"[A-Z][a-z]{2,8}[-/ .]\d{2}(\d{2})?|\d{1,2}[-/.]\d{4}|\d{4}[-/.]\d{1,2}")
_MARKS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_PARTS = (("year", "yr"), ("month", "mon", "mo"), ("day", "dy"), ("hour", "hr"))
"""Names of columns that are parts of a time."""
_KINDS = 200
"""Rows that are looked at to see what a column holds."""
_FEW_WORDS = 3
"""Different texts among numbers, each so often, that are taken to mean "no value"."""
_PLACEHOLDERS = (
    "-",
    "--",
    "---",
    ".",
    "..",
    "...",
    ":",
    "?",
    "*",
    "/",
    "x",
    "n.a.",
    "none",
    "missing",
)
"""Those that are taken so where they occur once."""
_COUNTED = re.compile(r"([A-Za-z]+[_ ]?)(\d+)")
_FEWEST_STEPS = 10
_FEWEST_DATES = 3
"""Columns named by dates from which a table is wide."""

Finding = tuple[str, str]
"""What a file looks like, and the options that read it so."""


@dataclass(frozen=True)
class Asked:
    """What was said of a table besides its `CsvFormat`.

    Attributes:
        time: the column of times, or None.
        time_format: of its texts, or None.
        wide: a column per series or per time.
        others: columns that are left out, and columns of names.
    """

    time: str | None = None
    time_format: str | None = None
    wide: bool = False
    others: tuple[str, ...] = ()


def require_expected(file: TableFile, form: CsvFormat, asked: Asked) -> None:
    """Raises DataError if a file looks unlike the format it is read with; names the options."""
    sample = _sample(file, form)
    found = list(sample.findings)
    if sample.body:
        found += [*_numbers(sample, form, asked), *_times(sample, asked)]
    if not found:
        return
    words = [text for text, _ in found]
    listed = ", ".join(words[:-1]) + (" and " if words[1:] else "") + words[-1]
    raise DataError(
        f"{file} looks like {listed}: add {', '.join(option for _, option in found)}; if it is not"
        " so, add `look=False`"
    )


@dataclass(frozen=True)
class _Sample:
    """The first and last rows of a file.

    Attributes:
        names: of the columns.
        body: rows below the header, as long as `names`.
        findings: about encoding, delimiter, header and footer.
        delimiter: between columns.
    """

    names: list[str]
    body: list[list[str]]
    findings: list[Finding]
    delimiter: str

    def column(self, name: str) -> list[str]:
        """Returns the values of a column that are not empty."""
        place = self.names.index(name)
        return [row[place].strip() for row in self.body if row[place].strip()]


def _sample(file: TableFile, form: CsvFormat) -> _Sample:
    found = list[Finding]()
    try:
        head, tail, encoding = _lines(file, form)
        mark = form.delimiter or _delimiter(head)
        rows, last = (list(csv.reader(lines, delimiter=mark)) for lines in (head, tail))
    except (pa.ArrowException, OSError, csv.Error):  # whoever reads it says why
        return _Sample([], [], [], "")
    if encoding != form.encoding:
        found.append((f"text in {encoding}", f"`encoding={encoding!r}`"))
    widths = Counter(len(row) for row in rows if any(row))
    if not widths:
        return _Sample([], [], [], "")
    width = widths.most_common(1)[0][0]
    is_row = _row_test([row for row in (rows or last) if len(row) == width])
    first = next((k for k, row in enumerate(rows) if is_row(row)), 0)
    line = _header_line(rows[: first + 1], width)
    names, begin = [cell.strip() for cell in rows[line]], max(first, line + 1)
    has_header = form.header and not _is_row_of_numbers(names, rows[1:], is_row)
    if not has_header:
        names, begin = [str(number + 1) for number in range(len(names))], line
        if form.header:
            found.append(("rows without a header", "`header=False`"))
    elif line:
        what = f"a header in line {form.skip_rows + line + 1}"
        found.append((what, f"`skip_rows={form.skip_rows + line}`"))
    if has_header and (below := begin - line - 1) > form.skip_below:
        what = f"{counted(below, 'line')} below the header that are no rows"
        found.append((what, f"`skip_below={below}`"))
    if mark != (form.delimiter or delimiter_of(head[line])):
        found.append((f"{_MARKS[mark]} between columns", f"`delimiter={mark!r}`"))
    repeats = [k for k in range(begin, len(rows)) if has_header and rows[k] == rows[line]]
    if repeats and not form.skip_headers:
        what = f"a header that line {form.skip_rows + repeats[0] + 1} repeats"
        found.append((what, "`skip_headers=True`"))
    end = _footer(last or rows[begin:], is_row)
    if end:
        kept = form.skip_footer + end
        shown = " | ".join("".join(row) for row in (last or rows)[-end:])
        what = f"a footer of {counted(kept, 'line')} ({shown:.60})"
        found.append((what, f"`skip_footer={kept}`"))
    rows = rows[begin : len(rows) - (0 if last else end)]
    body = [row for row in rows if len(row) == len(names) and (not repeats or is_row(row))]
    return _Sample(names, body, found, mark)


def _lines(file: TableFile, form: CsvFormat) -> tuple[list[str], list[str], str]:
    """Returns the first lines, the last ones of a longer file, and the encoding of both."""
    raw, text = open_text(file, form)
    data = text.read(_BYTES).removeprefix(b"\xef\xbb\xbf")
    is_whole, is_mapped = not text.read(1), raw is text and not isinstance(file, RemoteFile)
    other = encoding_of(data) if form.encoding == "utf-8" else None
    lines = data.decode(other or "utf-8", "replace").rstrip("\r\n").split("\n")
    limit = min(_LINES, max(_FEWEST_LINES, _CELLS // (1 + max(map(lines[-1].count, DELIMITERS)))))
    tail: list[str] = []
    if is_whole:
        lines = lines[: len(lines) - form.skip_footer]
        tail = lines if len(lines) > form.skip_rows + limit else []
    elif is_mapped:
        with open_input(file) as stream:
            stream.seek(stream.size() - _BYTES)
            end = stream.read().decode(other or "utf-8", "replace").rstrip("\r\n").split("\n")
        tail = end[1 : len(end) - form.skip_footer]
    head, tail = lines[form.skip_rows : form.skip_rows + limit], tail[-limit:]
    if not is_whole and len(head) < limit:
        head = head[:-1]  # cut within a line
    clean = [[line.rstrip("\r") for line in part] for part in (head, tail)]
    return clean[0], clean[1], other or form.encoding


def _delimiter(lines: Sequence[str]) -> str:
    """Returns the delimiter with which most lines have equally many columns."""

    def agreement(mark: str) -> tuple[float, int]:
        rows = [row for row in csv.reader(lines, delimiter=mark) if any(row)]
        common = Counter(map(len, rows)).most_common(1)
        width, count = common[0] if common else (1, 0)
        return (count / len(rows), width) if width > 1 else (0.0, 1)

    return max(DELIMITERS, key=agreement)


@lru_cache(1 << 16)
def _kind(cell: str) -> str:
    """Returns what a cell holds: "", number, clock, date or text."""
    cell = cell.strip()
    if not cell or _NUMBER.fullmatch(cell) or _MARKED.fullmatch(cell):
        return "number" if cell else ""
    if _CLOCK.fullmatch(cell):
        return "clock"
    if _ISO.match(cell) or _MONTHS.fullmatch(cell):
        return "date"
    return "date" if is_like_time(cell) else "text"


def _row_test(rows: list[list[str]]) -> Callable[[list[str]], bool]:
    """Returns whether a row is like most: dates and numbers where they have dates and numbers."""
    if not rows:
        return lambda row: False
    usual = [_usual(column) for column in zip(*rows[-_KINDS:], strict=True)]
    telling = [place for place, kind in enumerate(usual) if kind not in ("text", "")]
    times = [place for place in telling if usual[place] in ("date", "clock")]

    def is_row(row: list[str]) -> bool:
        if len(row) != len(usual):
            return False
        if times:
            return all(_kind(row[place]) == usual[place] for place in times)
        kinds = [_kind(row[place]) for place in telling]
        alike = [kind == usual[place] for kind, place in zip(kinds, telling, strict=True) if kind]
        return sum(alike) * 2 >= len(alike) > 0 if telling else any(row)

    return is_row


def _usual(cells: Sequence[str]) -> str:
    kinds = Counter(kind for kind in map(_kind, cells) if kind)
    return kinds.most_common(1)[0][0] if kinds else ""


def _is_row_of_numbers(
    names: list[str], others: list[list[str]], is_row: Callable[[list[str]], bool]
) -> bool:
    """Returns whether the first line is a row like the others, and no header."""
    has_number = any(map(_NUMBER.fullmatch, names))
    return has_number and is_row(names) and any(map(is_row, others)) and not are_dates(names)


def are_dates(names: Sequence[str]) -> bool:
    """Returns whether most columns are named by dates or by years."""
    dates = list(filter(is_date, names))
    return len(dates) >= _FEWEST_DATES and 2 * len(dates) > len(names)


def numbered(names: Sequence[str]) -> list[str]:
    """Returns the columns whose names count, such as d_1, d_2 …; none if fewer than ten do."""
    matches = [match for match in map(_COUNTED.fullmatch, names) if match]
    numbers = [int(match[2]) for match in matches]
    starts = {match[1] for match in matches}
    is_run = len(starts) == 1 and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return [match[0] for match in matches] if is_run and len(numbers) >= _FEWEST_STEPS else []


def is_date(name: str) -> bool:
    """Returns whether a column is named by a date or a year."""
    return _kind(name) == "date" or _YEAR.fullmatch(name.strip()) is not None


def _header_line(rows: list[list[str]], width: int) -> int:
    """Returns the line of the column names: the first one with a different name for each column,
    else the last one of the width of the rows, before the first row; that one if there is none."""
    before = [k for k in range(len(rows) - 1) if len(rows[k]) == width]
    whole = [k for k in before if len({cell.strip() for cell in rows[k]} - {""}) == width]
    return next(iter(whole), before[-1] if before else len(rows) - 1)


def _footer(rows: list[list[str]], is_row: Callable[[list[str]], bool]) -> int:
    """Returns the number of last lines that are no rows; 0 if none is one."""
    ends = [number for number, row in enumerate(reversed(rows)) if is_row(row)]
    return ends[0] if ends else 0


def _numbers(sample: _Sample, form: CsvFormat, asked: Asked) -> list[Finding]:
    """Looks for marks in numbers, and for words that mean "no value"."""
    found, cells, nulls = list[Finding](), list[str](), {*NULL_WORDS, *form.na}
    for name in sample.names:
        values = [cell for cell in sample.column(name) if cell not in nulls]
        if name not in asked.others and _usual(values[-_KINDS:]) == "number":
            cells += values
    words = Counter(cell for cell in cells if _kind(cell) != "number")
    numbers = [cell for cell in cells if cell not in words and not _NUMBER.fullmatch(cell)]
    matches = [match for match in map(_GROUPS.fullmatch, numbers) if match]
    marks = Counter(next(filter(None, match.groups())) for match in matches)
    has_commas = any("," in cell for cell in numbers)
    if "," not in (form.decimal, form.thousands) and has_commas and not marks[","]:
        if sample.delimiter != "," or any(map(_DECIMAL_COMMA.fullmatch, numbers)):
            found.append(("numbers with a decimal comma", "`decimal=','`"))
        else:
            marks[","] = 1
    if marks and not form.thousands:
        mark = marks.most_common(1)[0][0]
        found.append(
            (
                "numbers in groups of three digits",
                f"`thousands={mark!r}`" if mark.isascii() else f"`thousands='{mark}'`",
            )
        )
    is_usual = all(n >= _FEW_WORDS or word in _PLACEHOLDERS for word, n in words.items())
    if is_usual and 0 < len(words) <= _FEW_WORDS:
        shown = " and ".join(map(repr, words))
        found.append((f"a table with {shown} for no value", f"`na={','.join(words)!r}`"))
    return found


def _times(sample: _Sample, asked: Asked) -> list[Finding]:
    """Looks for columns named by times, for times in several columns, and for their format."""
    wide: Finding = ("a column for each time", "`wide=True`")
    if are_dates(sample.names):
        dates = list(filter(is_date, sample.names))
        return [*([] if asked.wide else [wide]), *_format(dates, asked)]
    if steps := numbered(sample.names):
        others = {_usual(sample.column(n)[:_KINDS]) for n in sample.names if n not in steps}
        if others & {"text"} and not others & {"date", "clock"}:
            return [] if asked.wide else [wide]
    names = _time_columns(sample, asked)
    if asked.wide or not names:
        return []
    found = list[Finding]()
    if len(names) > 1 and asked.time is None:
        what = f"times in the columns {' and '.join(map(repr, names))}"
        found.append((what, f"`time={','.join(names)!r}`"))
    places = [sample.names.index(name) for name in names]
    rows = [[row[place].strip() for place in places] for row in sample.body]
    form = _format([" ".join(row) for row in rows if all(row)], asked)
    if form and not found and asked.time is None:
        what = f"times in the column {names[0]!r}"
        found.append((what, f"`time={names[0]!r}`"))
    return found + form


def _time_columns(sample: _Sample, asked: Asked) -> list[str]:
    if asked.time is not None:
        names = [asked.time] if asked.time in sample.names else columns_of_time(asked.time)
        return names if set(names) <= set(sample.names) else []
    usual = {name: _usual(sample.column(name)[:_KINDS]) for name in sample.names}
    free = [name for name in sample.names if name not in asked.others]
    dates, clocks = ([n for n in free if usual[n] == kind] for kind in ("date", "clock"))
    if dates:
        return [dates[0], *(clocks if len(clocks) == 1 else [])]
    parts = [next((n for n in free if n.lower() in names), None) for names in _PARTS]
    given = [name for name in parts if name is not None and usual[name] == "number"]
    if parts[0] and parts[1] and len(given) > 1:
        return given
    are_years_and_months = (
        free[:2] == ["1", "2"]
        and len(free) > 2
        and all(
            form.fullmatch(cell)
            for name, form in zip(free, (_YEAR, _MONTH), strict=False)
            for cell in sample.column(name)
        )
    )
    return free[:2] if are_years_and_months else []


def _format(texts: list[str], asked: Asked) -> list[Finding]:
    """Returns the formats that read all texts, if they need one."""
    texts = texts[:_LINES]
    if asked.time_format is not None or not texts or are_times(pa.array(texts)):
        return []
    forms = formats_of(pa.array(texts))
    if not forms:
        return []
    others = f" (or {' or '.join(forms[1:])})" if forms[1:] else ""
    return [(f"times as {forms[0]}{others}", f"`time_format={forms[0]!r}`")]
