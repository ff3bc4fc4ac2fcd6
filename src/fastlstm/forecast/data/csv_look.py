"""A look at the first and last lines of a CSV: which options its format needs.

Nothing is guessed silently: a file that looks unlike the format it is read with is refused, with
all the options that it needs in one message.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import pyarrow as pa

from fastlstm.errors import DataError, counted
from fastlstm.forecast.config import ReadOptions
from fastlstm.forecast.data.csv_records import (
    DELIMITERS,
    delimiter_of,
    null_words_of,
    open_text,
    split_lines,
    without_unit,
)
from fastlstm.forecast.data.problems import Finding, looks_like, settings
from fastlstm.forecast.data.records import NUMBER, TableFile, open_input
from fastlstm.forecast.data.time_text import is_like_time
from fastlstm.system.charset import guess_of
from fastlstm.system.object_store import RemoteFile

_LINES = 1000
_CELLS, _FEWEST_LINES = 50_000, 100
"""Fewer lines of a wide file are looked at."""
_BYTES = 1 << 20
_NUMBER = re.compile(NUMBER)
_MARKED = re.compile(NUMBER + r"|[+-]?(\d{1,3}([.,' \u2019\u00a0\u202f]\d{3})+([.,]\d+)?|\d*,\d+)")
_DECIMAL_COMMA = re.compile(r"[+-]?(\d{1,3}(\.\d{3})+,\d+|0*,\d+|\d{4,},\d+|\d+,(\d{1,2}|\d{4,}))")
_GROUPS = re.compile(
    r"[+-]?\d{1,3}(?:([,.])\d{3}(?:\1\d{3})+|(,)\d{3}\.\d*|(\.)\d{3},\d*"
    r"|(['\u2019 \u00a0\u202f])\d{3})[\d,.' \u2019\u00a0\u202f]*"
)
"""Numbers whose mark certainly groups thousands."""
_MAYBE_GROUP = re.compile(r"[+-]?(\d{1,3}|[1-9]\d{0,2}\.\d{3})")
_ISO = re.compile(r"\d{4}-\d\d-\d\d([T ]|$)")
_CLOCK = re.compile(r"\d{1,2}[:.]\d{2}([:.]\d{2}(\.\d+)?)?( ?[AaPp][Mm])?")
_YEAR = re.compile(r"(18|19|20)\d\d")
_NAMED = (
    r"(?i:jan(?:uary?)?|feb(?:ruary?)?|mar(?:ch)?|märz?|apr(?:il)?|ma[iy]|jun[ei]?|jul[iy]?"
    r"|aug(?:ust)?|sept?(?:ember)?|o[ck]t(?:ober)?|nov(?:ember)?|de[cz](?:ember)?)"
)
_MONTHS = re.compile(
    r"[A-Z][a-z]{2,8}[-/ .]\d{2}(\d{2})?|\d{1,2}[-/.]\d{4}|\d{4}[-/.]\d{1,2}"
    rf"|\d{{4}}[-/ .]{_NAMED}|{_NAMED}[-/.]\d{{1,2}}[-/.]\d{{4}}"
)
_MARKS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_KINDS = 200
"""Rows that are looked at to see what a column holds."""
_FEW_WORDS = 3
"""At most so many different texts among numbers, each at least so often, mean "no value". Letters
among at most so many different numbers are categories."""
_PLACEHOLDERS = (*("-", "--", "---", ".", "..", "..."), *":?*/x", "n.a.", "none", "missing")
"""Those that are taken so where they occur once."""
LOOK_HINT = "; if it is not so, add `look=False`"
_TIME_NAME = re.compile("date|time|datetime|timestamp", re.I)
_COUNTED = re.compile(r"([A-Za-z]+[_ ]?)(\d+)")
_FEWEST_STEPS = 10
_FEWEST_DATES = 3
"""Columns named by dates from which a table is wide."""


def require_expected(file: TableFile, form: ReadOptions, others: Sequence[str]) -> list[str]:
    """Raises DataError if a file looks unlike the format it is read with; names the options.

    `others` are columns that are left out, and columns of names. Returns a note if the lines are
    so long that few were looked at.
    """
    found, num_cut = _findings(file, form, others)
    if found:
        raise looks_like(str(file), found, LOOK_HINT)
    if not num_cut:
        return []
    seen = counted(num_cut, "line")
    return [f"{file}: only {seen} are checked for its format, as its lines are long"]


def _findings(
    file: TableFile, form: ReadOptions, others: Sequence[str]
) -> tuple[list[Finding], int]:
    """Returns what the first and last rows of a file show of its format, and the number of lines if
    they are so long that few were looked at, else 0."""
    found = list[Finding]()
    try:
        head, tail, guess, is_cut = _lines(file, form)
        form = _quoting(file, form, [*head, *tail], found)
        mark = form.delimiter or _delimiter(head, form)
        rows, last = (split_lines(lines, form, mark) for lines in (head, tail))
    except (pa.ArrowException, OSError, csv.Error):  # whoever reads it says why
        return [], 0
    if guess is not None:
        found.append((f"text in {guess[0]} ({guess[1]})", {"encoding": guess[0]}))
    if not (widths := Counter(len(row) for row in rows if any(row))):
        return [], 0
    width = widths.most_common(1)[0][0]
    is_row = _row_test([row for row in (rows or last) if len(row) == width])
    first = next((k for k, row in enumerate(rows) if is_row(row)), 0)
    line = _header_line(rows[: first + 1], width)
    names, begin = [cell.strip() for cell in rows[line]], max(first, line + 1)
    has_header = form.header and not _is_row_of_numbers(names, rows[1:], is_row)
    if sum(map(bool, names)) == 1 and any(len(r) == width and all(r) for r in rows[:line]):
        raise _spread_names(file, form.skip_rows, line)
    if not has_header:
        names, begin = [str(number + 1) for number in range(len(names))], line
        if form.header:
            found.append(("rows without a header", {"header": False}))
    elif line:
        what = f"a header in line {form.skip_rows + line + 1}"
        found.append((what, {"skip_rows": form.skip_rows + line}))
    if has_header and (below := begin - line - 1) > form.skip_below:
        which = "is no row" if below == 1 else "are no rows"
        what = f"{counted(below, 'line')} below the header {which}"
        found.append((what, {"skip_below": below}))
    if mark != (form.delimiter or delimiter_of(head[line])):
        found.append((f"{_MARKS[mark]} between columns", {"delimiter": mark}))
    repeats = [k for k in range(begin, len(rows)) if has_header and rows[k] == rows[line]]
    if repeats and not form.skip_headers:
        what = f"a header that line {form.skip_rows + repeats[0] + 1} repeats"
        found.append((what, {"skip_headers": True}))
    if end := _footer(last or rows[begin:], is_row, null_words_of(form)):
        kept = form.skip_footer + end
        shown = " | ".join((tail or head)[-end:])
        what = f"a footer of {counted(kept, 'line')} ({shown:.60})"
        found.append((what, {"skip_footer": kept}))
    rows = rows[begin : len(rows) - (0 if last else end)]
    body = [row for row in rows if len(row) == len(names) and (not repeats or is_row(row))]
    columns = {name: [c for row in body if (c := row[k].strip())] for k, name in enumerate(names)}
    found += _marks_and_words(columns, mark, form, others)
    return found, is_cut * (len(head) + len(tail))


def _spread_names(file: TableFile, skipped: int, line: int) -> DataError:
    return DataError(
        f"{file}: the names of its columns are spread over lines {skipped + 1} to"
        f" {skipped + line + 1}; write each into one line, such as Close_AAPL, or leave all but its"
        f" time unnamed with {settings({'skip_rows': skipped + line})}"
    )


def _lines(
    file: TableFile, form: ReadOptions
) -> tuple[list[str], list[str], tuple[str, str] | None, bool]:
    """Returns the first lines, the last ones of a longer file, their encoding if it is not the
    given one (see `guess_of`), and whether they are so long that fewer were read."""
    raw, text = open_text(file, form)
    data = text.read(_BYTES).removeprefix(b"\xef\xbb\xbf")
    is_whole, is_mapped = not text.read(1), raw is text and not isinstance(file, RemoteFile)
    guess = guess_of(data) if form.encoding == "utf-8" else None
    encoding = "utf-8" if guess is None else guess[0]
    lines = data.decode(encoding, "replace").rstrip("\r\n").split("\n")
    limit = min(_LINES, max(_FEWEST_LINES, _CELLS // (1 + max(map(lines[-1].count, DELIMITERS)))))
    tail: list[str] = []
    if is_whole:
        lines = lines[: len(lines) - form.skip_footer]
        tail = lines if len(lines) > form.skip_rows + limit else []
    elif is_mapped:
        with open_input(file) as stream:
            stream.seek(stream.size() - _BYTES)
            end = stream.read().decode(encoding, "replace").rstrip("\r\n").split("\n")
        tail = end[1 : len(end) - form.skip_footer]
    head, tail = lines[form.skip_rows : form.skip_rows + limit], tail[-limit:]
    if not is_whole and len(head) < limit:
        head = head[:-1]  # cut within a line
    clean = [[line.rstrip("\r") for line in part] for part in (head, tail)]
    return clean[0], clean[1], guess, not is_whole and len(head) < _FEWEST_LINES


def _quoting(
    file: TableFile, form: ReadOptions, lines: list[str], found: list[Finding]
) -> ReadOptions:
    """Returns the format with its quotes; a single quote in a file without any pair is none."""
    marks = re.escape(form.delimiter or DELIMITERS)
    escaped = re.compile(rf'\\"[^"{marks}\s]')  # a path in quotes may end with a backslash
    escapes = [match for line in lines if (match := escaped.search(line))]
    if form.quotes and not form.escape and escapes:
        found.append((f"quotes behind a backslash ({escapes[0][0]})", {"escape": "\\"}))
        return replace(form, escape="\\")
    odd = [n for n, line in enumerate(lines) if line.count('"') % 2 and _opens_quote(line, form)]
    if not form.quotes or form.escape or not odd:
        return form
    where = f"a quote that is not closed ({lines[odd[0]]:.60})"
    mark = form.delimiter or delimiter_of(lines[odd[0]])
    usual = Counter(line.count(mark) for line in lines).most_common(1)[0][0]
    is_whole = lines[odd[0]].count(mark) == usual and len(odd) == 1
    if not is_whole or any(line.count('"') > 1 for line in lines):
        raise DataError(
            f"{file}: a quoted value spans lines, or it has {where}; write every row on one line,"
            " or give `quotes=False` if quotes are ordinary characters"
        )
    found.append((where, {"quotes": False}))
    return replace(form, quotes=False)


def _delimiter(lines: Sequence[str], form: ReadOptions) -> str:
    """Returns the delimiter with which most lines have equally many columns."""

    def agreement(mark: str) -> tuple[float, int]:
        rows = [row for row in split_lines(lines, form, mark) if any(row)]
        common = Counter(map(len, rows)).most_common(1)
        width, count = common[0] if common else (1, 0)
        return (count / len(rows), width) if width > 1 else (0.0, 1)

    return max(DELIMITERS, key=agreement)


@lru_cache(1 << 16)
def kind_of(cell: str) -> str:
    """Returns what a cell holds: "", number, clock, date or text."""
    cell = cell.strip()
    if not cell or _NUMBER.fullmatch(cell) or _MARKED.fullmatch(without_unit(cell)):
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
    usual = [usual_kind(column) for column in zip(*rows[-_KINDS:], strict=True)]
    telling = [place for place, kind in enumerate(usual) if kind not in ("text", "")]
    times = [place for place in telling if usual[place] in ("date", "clock")]

    def is_row(row: list[str]) -> bool:
        if len(row) != len(usual):
            return False
        if times:
            return all(kind_of(row[place]) == usual[place] for place in times)
        kinds = [kind_of(row[place]) for place in telling]
        alike = [kind == usual[place] for kind, place in zip(kinds, telling, strict=True) if kind]
        return sum(alike) * 2 >= len(alike) > 0 if telling else any(row)

    return is_row


def are_categories(cells: Sequence[str]) -> bool:
    """Returns whether cells are few codes, some of them letters: 0, a and b."""
    codes = {cell.strip() for cell in cells}
    letters = {code for code in codes if len(code) == 1 and code.isalpha()}
    numbers = codes - letters
    return bool(letters) and len(numbers) <= _FEW_WORDS and all(map(str.isdecimal, numbers))


def usual_kind(cells: Sequence[str]) -> str:
    """Returns the kind of most cells, "" without any."""
    kinds = Counter(kind for kind in map(kind_of, cells) if kind)
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
    return kind_of(name) == "date" or _YEAR.fullmatch(name.strip()) is not None


def _header_line(rows: list[list[str]], width: int) -> int:
    """Returns the line of the column names: the first one with a different name for each column,
    of those above the first row without a line of another width between them; else one of which
    names are empty, else the last one; that row if there is none. A line that names a time is
    preferred: station data may stand above it."""
    before = len(rows) - 1
    while before and len(rows[before - 1]) != width and any(len(r) == width for r in rows[:before]):
        before -= 1
    begin = before
    while begin and len(rows[begin - 1]) == width:
        begin -= 1
    if begin == before:
        return len(rows) - 1
    names = [[cell.strip() for cell in row] for row in rows[begin:before]]
    filled = [list(filter(None, row)) for row in names]
    whole = [k for k, row in enumerate(filled) if width < 2 * len(row) == 2 * len({*row})]
    likely = [k for k in whole if "" not in names[k]] or whole or [before - begin - 1]
    of_time = (k for k in likely if any(map(_TIME_NAME.fullmatch, names[k])))
    return begin + next(of_time, likely[0])


def _footer(
    rows: list[list[str]], is_row: Callable[[list[str]], bool], nulls: Sequence[str]
) -> int:
    """Returns the number of last lines that are no rows, with totals before them: rows with a text,
    and no values beside it, in a column that has numbers in all others."""
    end = next((n for n, row in enumerate(reversed(rows)) if is_row(row)), 0)
    rows = rows[: -end or None]
    if len(rows) <= _FEWEST_STEPS or len({*map(len, rows)}) > 1:
        return end
    columns = list(zip(*rows[:-_FEW_WORDS], strict=True))
    kinds = [{kind_of(c) for c in column if c not in nulls} for column in columns]
    full = [place for place, column in enumerate(columns) if all(column)]
    places = [place for place in full if kinds[place] == {"number"}]

    def is_total(row: list[str]) -> bool:
        words = [row[k] for k in places if kind_of(row[k]) == "text" and row[k] not in nulls]
        is_word = any(word.strip() not in _PLACEHOLDERS for word in words)
        return is_word and not all(row[k].strip() for k in full)

    last = rows[-_FEW_WORDS:][::-1]
    return end + next((n for n, row in enumerate(last) if not is_total(row)), 0)


def _opens_quote(line: str, form: ReadOptions) -> bool:
    """Whether a field begins with a quote: within one (3" pipe) it is a character."""
    mark = re.escape(form.delimiter or delimiter_of(line))
    return re.search(rf'(?:^|{mark})\s*"', line) is not None


def _marks_and_words(
    columns: dict[str, list[str]], delimiter: str, form: ReadOptions, others: Sequence[str]
) -> list[Finding]:
    """Looks for marks in numbers, and for words that mean "no value"."""
    found, cells, nulls = list[Finding](), list[str](), null_words_of(form)
    for name, texts in columns.items():
        values = [cell for cell in texts if cell not in nulls]
        is_usual = name not in others and usual_kind(values[-_KINDS:]) == "number"
        if is_usual and not are_categories(values):
            cells += values
    words = Counter(cell for cell in cells if kind_of(cell) != "number")
    numbers = [cell for cell in cells if cell not in words and not _NUMBER.fullmatch(cell)]
    plain = list(map(without_unit, numbers))
    if plain != numbers and not form.units:
        odd = [cell for cell, number in zip(numbers, plain, strict=True) if cell != number]
        below = [cell for cell in odd if cell.startswith("<")]
        shown = f"{below[0]}, read as half of it" if below else odd[0]
        found.append((f"numbers with signs and units ({shown})", {"units": True}))
    numbers = [cell for cell in plain if not _NUMBER.fullmatch(cell)]
    matches = [match for match in map(_GROUPS.fullmatch, numbers) if match]
    marks = Counter(next(filter(None, match.groups())) for match in matches)
    has_commas = any("," in cell for cell in numbers)
    if "," not in (form.decimal, form.thousands) and has_commas and not marks[","]:
        if delimiter != "," or any(map(_DECIMAL_COMMA.fullmatch, numbers)):
            found.append(("numbers with a decimal comma", {"decimal": ","}))
        else:
            marks[","] = 1
    grouped = [cell for cell in cells if "." in cell]
    is_mixed = _FEW_WORDS < len(grouped) < len(cells) and all(map(_MAYBE_GROUP.fullmatch, cells))
    if is_mixed and not marks and not form.thousands and form.decimal == ".":
        whole = next(cell for cell in cells if "." not in cell)
        found.append(
            (f"dots between thousands ({whole}, {grouped[0]})", {"decimal": ",", "thousands": "."})
        )
    if marks and not form.thousands:
        mark = marks.most_common(1)[0][0]
        found.append(
            ("numbers in groups of three digits", {"thousands": mark if mark.isascii() else " "})
        )
    is_usual = all(n >= _FEW_WORDS or word in _PLACEHOLDERS for word, n in words.items())
    if is_usual and 0 < len(words) <= _FEW_WORDS:
        shown = " and ".join(f"'{word}'" for word in words)
        found.append((f"a table with {shown} for no value", {"na": tuple(words)}))
    return found
