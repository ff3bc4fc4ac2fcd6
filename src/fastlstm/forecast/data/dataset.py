"""Opens any table (paths, URLs, frames, arrays) and prepares it as mapped rows in the cache."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import DataError, FastLSTMError, counted, hint_of_other_table
from fastlstm.forecast.config import READING, ReadOptions
from fastlstm.forecast.data.arrange import Arrangement
from fastlstm.forecast.data.column_stats import ColumnStats, best_origins, shown
from fastlstm.forecast.data.csv_look import require_expected
from fastlstm.forecast.data.csv_records import CsvRecords
from fastlstm.forecast.data.ingest import TableIngest, require_columns
from fastlstm.forecast.data.problems import CurableError, Problems, settings
from fastlstm.forecast.data.records import (
    SUFFIXES,
    ArrowRecords,
    FileRecords,
    FrameRecords,
    JoinedRecords,
    NumpyRecords,
    ParquetRecords,
    Records,
    TableFile,
    require_files,
)
from fastlstm.forecast.data.reshaped import HEAD_ROWS, Head, reshaped
from fastlstm.forecast.data.roles import (
    CODE,
    RoleRequest,
    Roles,
    find_roles,
    is_year,
    listed,
    series_key,
)
from fastlstm.forecast.data.table import MISSING_INT16, Segments, Table, row_blocks
from fastlstm.forecast.data.timeline import ROWS, Frequency, Timeline
from fastlstm.system import environment
from fastlstm.system.cache import Cache, is_intact, make_key
from fastlstm.system.storage import append, fsync_file, read_json, write_file, write_json

FORMAT_VERSION = 9
DROPPED, COUNTED = "duplicate timestamps", "rows are counted as steps in time"
"""How repairs begin that training warns of."""
_EXACT = 1 << 24
"""Largest whole number up to which float32 is exact."""
_KINDS: dict[str, type[FileRecords]] = {
    **dict.fromkeys((".parquet", ".pq"), ParquetRecords),
    **dict.fromkeys((".arrow", ".feather", ".ipc"), ArrowRecords),
    ".npy": NumpyRecords,
}

_MAX_LOOKS = 8


@dataclass(frozen=True)
class SeriesDataset:
    """A prepared table; see also `TableIngest`.

    Attributes:
        series: names, by number; `categories` has those of categorical columns.
        statics: one number per series, by static column.
        constant: columns with one value in every row.
        notes: findings and decisions, a line each.
        repairs: the `notes` on rows that were moved, dropped, added or changed, and on columns
            that were left out.
        key: of the table, as asked for; the cache entry's, unless it was written for another use.
        seconds: taken to prepare, which read nothing if `from_cache`.
    """

    table: Table
    roles: Roles
    frequency: Frequency
    series: tuple[Any, ...]
    statics: dict[str, NDArray[np.float64]]
    categories: dict[str, list[Any]]
    time_zone: str | None
    has_clock: bool
    is_wall: bool
    has_missing: bool
    constant: tuple[str, ...]
    notes: tuple[str, ...]
    repairs: tuple[str, ...]
    name: str
    key: str
    from_cache: bool
    seconds: float

    @property
    def timeline(self) -> Timeline:
        """What another table's times must match."""
        return Timeline(self.frequency, self.time_zone, self.is_wall, may_miss=False)


def prepare_table(
    source: Any,
    options: ReadOptions | None = None,
    request: RoleRequest | None = None,
    like: Timeline | None = None,
    cache_dir: str | Path | None = None,
    on_progress: Callable[[int, int | None], None] | None = None,
    is_trial: bool = False,
) -> SeriesDataset:
    """Reads a table into the cache, or opens it from there.

    For `source` see `open_records`. `like` is the timeline of a table that this one must match.
    `on_progress` is called with bytes done and the total in bytes, or None. A trial reads the first
    rows only, to try the options.

    Raises:
        DataError: the table cannot be used; says where and why.
        StorageError: a write failed.

    Cost: a pass over the source and one over the times; another over the values if rows move or the
    dtype changes. Opening a cached table compares its hashes: about 1 GB/s on each core.
    """
    started = time.monotonic()
    options, request = options or ReadOptions(), request or RoleRequest()
    others = (*request.ignore, *request.categorical, *request.static)
    records = open_records(source, options, others)
    cache = Cache(Path(cache_dir) if cache_dir is not None else environment.cache_dir(), "series")
    signature = None if is_trial else records.signature
    reading = {name: getattr(options, name) for name in READING}

    def key_for(asked: RoleRequest, like: Timeline | None) -> str:
        timeline = None if like is None else asdict(like)
        return make_key(FORMAT_VERSION, "series", reading, asdict(asked), timeline, signature)

    asked = key_for(request, like)
    key = cache.recall(asked) or asked  # a forecast reads the rows that training read
    # With the key as asked for: a run that is resumed asks for the same, wherever it is.
    opened = partial(_open, key=asked, name=records.name, started=started)
    find_entry = partial(_open_entry, cache.path(key), opened)
    if signature is not None and (dataset := find_entry(from_cache=True)) is not None:
        return dataset
    looked = _look_at(records, others)
    given, records = request, Head(records) if is_trial else records
    records, request = reshaped(records, request, options)
    problems = Problems(records.name)
    with problems.fatal():
        roles = find_roles(records, request, problems, like)
        roles = replace(roles, notes=(*looked, *roles.notes))
        if request.has_target and like is None:
            require_columns(options, records.schema.names, records.name)
    with cache.work_directory() as work:
        with problems.fatal():
            _prepare(work, records, request, roles, options, like, problems, on_progress)
        records.require_unchanged()
        if signature is not None:
            dataset = cache.place(key, work, partial(find_entry, from_cache=False))
            may_miss = dataset.has_missing or options.gaps == "fill"
            given = replace(given, target=dataset.roles.target, past=dataset.roles.past)
            if like is None or like.may_miss == may_miss:  # else gaps were split, not filled
                cache.remember(key_for(given, replace(dataset.timeline, may_miss=may_miss)), key)
            return dataset
        return opened(work, from_cache=False)  # stays mapped when removed


def open_records(source: Any, form: ReadOptions, others: Sequence[str]) -> Records:
    """Opens a source of rows; reads only its columns.

    The source is a path, a directory, a glob, a URL, several of them, or a frame; records are
    returned as they are. `form` is how CSV files are read; `others` are columns that a look at a
    CSV without readable columns leaves out. Raises DataError: there is no such file, or no table
    in it.
    """
    if isinstance(source, Records):
        return source
    files = require_files(source)
    if files is None:
        return FrameRecords(source)
    parts = [_open_file(path, form, others) for path in files]
    return parts[0] if len(parts) == 1 and not parts[0].partition else JoinedRecords(parts)


def _look_at(records: Records, others: Sequence[str]) -> list[str]:
    """Raises DataError if CSV files, of many a few, look like another format than theirs; returns
    notes on the look."""
    files = records.parts if isinstance(records, JoinedRecords) else [records]
    few = files[:: -(-len(files) // _MAX_LOOKS)]
    looked = [part for part in few if isinstance(part, CsvRecords) and part.form.look]
    return [note for part in looked for note in require_expected(part.file, part.form, others)]


def _open_file(file: TableFile, form: ReadOptions, others: Sequence[str]) -> FileRecords:
    if isinstance(file, Path) and not file.is_file():
        raise DataError(f"{file} is a pipe or a device; save the table to a file: it is read twice")
    suffix = next((end for end in SUFFIXES if file.name.lower().endswith(end)), None)
    if suffix is None:
        raise DataError(
            f"{file} is not a table; expected a name ending in {', '.join(SUFFIXES)}"
            f"{hint_of_other_table(str(file))}"
        )
    kind = _KINDS.get(suffix)
    try:
        return CsvRecords(file, form) if kind is None else kind(file)
    except DataError:
        if kind is None and form.look:
            require_expected(file, form, others)
        raise
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeEncodeError as error:
        raise DataError(f"{file}: the name is not UTF-8; rename the file") from error


def _prepare(
    work: Path,
    records: Records,
    request: RoleRequest,
    roles: Roles,
    options: ReadOptions,
    like: Timeline | None,
    problems: Problems,
    on_progress: Callable[[int, int | None], None] | None,
) -> None:
    """Writes an entry's files into `work`; raises DataError of all errors that can be found."""
    find_key = partial(series_key, records, request, roles, options)

    def read(origins: dict[str, Any]) -> TableIngest:
        ingested = TableIngest(work, records, roles, problems, options, like, origins)
        ingested.run(on_progress)
        return ingested

    ingested = read({})
    if ingested.num_rows == 0:
        raise DataError(f"{records.name} has column names but no rows")
    _refuse_sentinels(ingested, records.name, problems)
    left_out = _left_out(ingested, roles, request)
    target, past = (tuple(n for n in r if n not in left_out) for r in (roles.target, roles.past))
    roles = replace(roles, target=target, past=past)
    origins = _best_origins(ingested)
    if (origins or left_out) and not problems:  # far from 0: read again, minus the origin
        ingested = read(origins)
    notes = [*roles.notes, *_column_notes(ingested, records, problems), *ingested.notes]
    arrangement = Arrangement(ingested, records.name, like, find_key)
    segments = arrangement.run()
    problems.raise_all()
    columns = [ingested.columns[name] for name in roles.values]
    dtype = _store_values(work, arrangement.num_rows, columns)
    repairs = [*ingested.repairs, *_repairs(arrangement, ingested, records, left_out)]
    notes += [*_time_notes(arrangement, ingested), *repairs]
    notes += ["values stored as int16: lossless"] * (dtype == "int16")
    rows = [segments.series, segments.first_rows, segments.num_rows, segments.start_times]
    _save(work / "segments.npy", np.stack(rows))
    own = [ingested.columns[name].origin for name in roles.values]
    _save(work / "origins.npy", np.stack(np.broadcast_arrays(*map(np.atleast_1d, own)), 1))
    names = {name: getattr(ingested, name) for name in ("series", "statics", "categories")}
    # Not write_json: the strict reader would refuse the names of a million series.
    write_file(work / "series.json", json.dumps(names).encode("ascii"))
    schema = _schema(roles, ingested, arrangement, dtype, notes)
    write_json(work / "schema.json", schema | {"repairs": repairs})
    fsync_file(work / "values.bin")
    for path in (ingested.codes, ingested.times):
        if path is not None:
            path.unlink(missing_ok=True)


def _save(path: Path, array: NDArray[Any]) -> None:
    file = BytesIO()
    np.save(file, array, allow_pickle=False)
    write_file(path, file.getvalue())


def _store_values(work: Path, num_rows: int, columns: Sequence[ColumnStats]) -> str:
    """Makes values.bin of values.f32: int16 where that loses nothing; returns the dtype."""
    source, target = work / "values.f32", work / "values.bin"
    if not all(column.is_short for column in columns):
        source.replace(target)
        return "float32"
    values = np.memmap(source, dtype=np.float32, mode="r", shape=(num_rows, len(columns)))
    with target.open("wb", buffering=0) as file:
        for begin, end in row_blocks(0, num_rows, len(columns)):
            block = np.where(np.isnan(values[begin:end]), MISSING_INT16, values[begin:end])
            append(file, block.astype(np.int16).data.cast("B"))
    source.unlink()
    return "int16"


def _best_origins(ingested: TableIngest) -> dict[str, Any]:
    """Returns the columns far from 0, each with its origin or those of its series."""
    origins: dict[str, Any] = {}
    for name, column in ingested.columns.items():
        if column.is_category or column.is_short:
            continue
        ranges = ingested.ranges.get(name, column) if len(ingested.series) > 1 else column
        best = best_origins(np.atleast_1d(ranges.low), np.atleast_1d(ranges.high))
        if best.any():
            origins[name] = best if np.ptp(best) else float(best[0])
    return origins


def _schema(
    roles: Roles, ingested: TableIngest, arrangement: Arrangement, dtype: str, notes: list[str]
) -> dict[str, Any]:
    columns = ingested.columns
    return {
        "roles": {**asdict(roles), "notes": []},
        "dtype": dtype,
        "num_rows": arrangement.num_rows,
        "frequency": arrangement.frequency.to_json(),
        "time_zone": ingested.time_zone,
        "has_clock": ingested.has_clock and ingested.times is not None,
        "has_missing": arrangement.counts["filled"] > 0
        or any(column.missing for column in columns.values()),
        "is_wall": ingested.is_wall,
        "constant": [name for name, column in columns.items() if column.low == column.high],
        "notes": notes,
    }


def _open_entry(
    entry: Path, opened: Callable[..., SeriesDataset], from_cache: bool
) -> SeriesDataset | None:
    """Opens an entry; None if there is none or it is damaged, so that it is prepared again."""
    with suppress(OSError, FastLSTMError):
        if is_intact(entry):
            return opened(entry, from_cache=from_cache)
    return None


def _open(directory: Path, key: str, name: str, started: float, from_cache: bool) -> SeriesDataset:
    """Maps the files of `_prepare`; the native code trusts their segments."""
    schema = read_json(directory / "schema.json")
    fields: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in schema["roles"].items()
    }
    roles = Roles(**fields)
    names = json.loads((directory / "series.json").read_text(encoding="utf-8"))
    shape = schema["num_rows"], len(roles.values)
    values = np.memmap(directory / "values.bin", dtype=schema["dtype"], mode="r", shape=shape)
    segments = Segments(*np.load(directory / "segments.npy", allow_pickle=False))
    origin = np.load(directory / "origins.npy", allow_pickle=False)
    return SeriesDataset(
        table=Table(values, roles.values, segments, origin),
        roles=roles,
        frequency=Frequency.from_json(schema["frequency"]),
        series=tuple(names["series"]),
        statics={n: np.asarray(v, dtype=np.float64) for n, v in names["statics"].items()},
        categories=names["categories"],
        **{k: schema[k] for k in ("time_zone", "has_clock", "has_missing", "is_wall")},
        constant=tuple(schema["constant"]),
        notes=tuple(schema["notes"]),
        repairs=tuple(schema["repairs"]),
        name=name,
        key=key,
        from_cache=from_cache,
        seconds=time.monotonic() - started,
    )


def _column_notes(ingested: TableIngest, records: Records, problems: Problems) -> list[str]:
    """Returns notes on the columns; a column without any value is an error, unless only the first
    rows were read."""
    is_part = isinstance(records, Head) and ingested.num_rows >= HEAD_ROWS
    origin, codes = records.name, ingested.options.missing_value
    notes = []
    for name, column in ingested.columns.items():
        if column.is_category or name in problems:
            continue
        low, high = column.low, column.high
        if column.missing == ingested.num_rows:
            if is_part:
                continue
            what, cure = f"column '{name}' has no values", {"ignore": (name,)}
            text = f"{origin}: {what}; leave it out with {settings(cure)}"
            problems.add(CurableError(text, (f"{what} in {ingested.num_rows:,} rows", cure)), name)
            continue
        if low == high:
            notes.append(f"column '{name}' is constant ({low:g}): it carries no information")
        if CODE.search(name) and name in ingested.roles.past and low % 1 == high % 1 == 0:
            named = settings({"categorical": (*ingested.roles.categorical, name)})
            notes.append(f"column '{name}' is read as an amount; if it is a code, give {named}")
        if column.missing:
            share = column.missing / ingested.num_rows
            rows = counted(column.missing, "row")
            taken = ingested.num_taken[name]
            more = f", {taken:,} of them given by `missing_value`" if taken else ""
            inside = [c for c in codes if isinstance(c, float) and low < c < high]
            if taken and inside:
                more += (
                    f"; {shown(inside[0])} is within its other values, {low:g} to {high:g}: for one"
                    f" column give `missing_value='COLUMN={shown(inside[0])}'`"
                )
            notes.append(f"column '{name}' has missing values in {rows} ({share:.2%}){more}")
        largest = max(map(abs, column.range))
        if largest > _EXACT:
            notes.append(
                f"column '{name}' ranges from {low:g} to {high:g}: float32 keeps seven digits and"
                f" loses steps below {np.spacing(np.float32(largest)):g}; use differences if such"
                " steps matter"
            )
        for code in column.near_sentinels():
            count = counted(column.sentinels[code], "row")
            is_code = f"column '{name}' is {shown(code)} in {count}: if that means no value, give "
            own = _code_of(name, code, ingested)
            notes.append(f"{is_code}{settings({'missing_value': (*codes, own)})}")
    return notes


def _left_out(ingested: TableIngest, roles: Roles, request: RoleRequest) -> dict[str, str]:
    """Returns why columns that were not asked for are left out: they carry no information."""
    found = dict[str, str]()
    names = [*roles.target * (not request.target), *roles.past * (request.past is None)]
    for name in (name for name in names if name not in roles.categorical):
        if ingested.columns[name].low == ingested.columns[name].high:
            found[name] = "the same in every row"
        elif name in roles.past and name in ingested.ranges and ingested.ranges[name].tell_apart():
            found[name] = "another number for each series; for such numbers give `static`"
    return {} if {*roles.target} <= found.keys() else found


def _refuse_sentinels(ingested: TableIngest, origin: str, problems: Problems) -> None:
    options = ingested.options
    for name, column in (ingested.columns | ingested.static_columns).items():
        if far := column.far_values():
            low, high = column.others_than(far)
            what = "row" if name in ingested.columns else "series"
            count = counted(sum(far.values()), what)
            what = f"column '{name}' is {' and '.join(map(shown, far))} in {count}"
            own = tuple(_code_of(name, code, ingested) for code in far)
            missing, kept = (*options.missing_value, *own), (*options.keep_value, *own)
            error = CurableError(
                f"{origin}: {what} and between {low:g} and {high:g} in all others, which looks like"
                f" a code for no value; give {settings({'missing_value': missing})}"
                f" if it is one, or {settings({'keep_value': kept})} if it is a"
                " value",
                (what, {"missing_value": own}),
            )
            problems.add(error, name)


def _code_of(name: str, code: float, ingested: TableIngest) -> float | str:
    """Returns a code of a column; "COLUMN=CODE" if it may be a value of another column."""
    if code not in ingested.value_of:
        every = (ingested.columns | ingested.static_columns).items()
        near = [(n, s) for n, s in every if s.low <= code <= s.high and not s.is_category]
        ingested.value_of[code] = [n for n, stats in near if code not in stats.far_values()]
    is_value = any(other != name for other in ingested.value_of[code])
    return f"{name}={shown(code)}" if is_value else code


def _time_notes(arrangement: Arrangement, ingested: TableIngest) -> list[str]:
    counts, notes = arrangement.counts, []
    what = counted(arrangement.num_rows, "row")
    if len(ingested.series) > 1:
        what += f", {len(ingested.series):,} series"
    is_step = ingested.times and arrangement.frequency != ROWS
    notes.append(f"{what}, one row every {arrangement.frequency}" if is_step else what)
    if not ingested.is_grouped:
        notes.append("rows of different series were interleaved: grouped by series")
    if counts["ends"]:
        rows = counted(counts["ends"], "row")
        notes.append(f"{rows} behind the last target of a series: dropped, forecasts begin there")
    if counts["gaps"] and not counts["filled"]:
        gaps = f"{counted(counts['gaps'], 'gap')} in time: windows do not cross them"
        notes.append(gaps)
    return notes


def _repairs(
    arrangement: Arrangement, ingested: TableIngest, records: Records, left_out: dict[str, str]
) -> list[str]:
    """Returns notes on rows that were moved, dropped or added, and on columns that do not count."""
    counts, repairs, roles = arrangement.counts, list[str](), ingested.roles
    if counts["sorted"]:
        repairs.append(f"{counted(counts['sorted'], 'row')} out of order: sorted by time")
    if counts["duplicates"]:
        rows = counted(counts["duplicates"], "row")
        repairs.append(f"{DROPPED}: kept the {ingested.options.duplicates}, dropped {rows}")
    if counts["filled"]:
        rows = counted(counts["filled"], "empty row")
        more = "" if ingested.options.gaps else "; `gaps='split'` cuts there"
        gaps = f"{counted(counts['gaps'], 'gap')} in time: filled with {rows}{more}"
        repairs.append(gaps)
    left_out |= dict.fromkeys(roles.dropped, "not numbers and without a role")
    for why in dict.fromkeys(left_out.values()):
        names = listed([name for name in left_out if left_out[name] == why])
        repairs.append(f"ignored columns ({why}): {names}")
    for name, column in ingested.columns.items() if roles.time is None else ():
        if is_year(name, *column.range) and name not in roles.target:
            repairs.append(f"{COUNTED}, although column '{name}' holds years: see `time`")
    if records.jumps and roles.time is None and roles.series is None:
        repairs.append(
            f"{records.jumps}, but rows are counted as steps in time: give a column of times, or"
            " reset_index(drop=True) if they follow each other; scikit-learn divides rows in time"
            " by TimeSeriesSplit, not by KFold"
        )
    return repairs
