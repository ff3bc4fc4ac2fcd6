"""From whatever table the user names to a mapped one, through the cache."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastlstm.errors import (
    CorruptFileError,
    DataError,
    FastLSTMError,
    Message,
    Setting,
    counted,
    in_flags,
)
from fastlstm.forecast.data.arrange import Arranged, Arrangement, Policy
from fastlstm.forecast.data.column_stats import shown
from fastlstm.forecast.data.ingest import NO_CODES, Codes, IngestResult, TableIngest, ingest
from fastlstm.forecast.data.problems import Problems
from fastlstm.forecast.data.records import Records, open_records
from fastlstm.forecast.data.roles import RoleRequest, Roles, find_roles
from fastlstm.forecast.data.stored_values import Stored, store_values
from fastlstm.forecast.data.table import DTYPES, Segments, Table
from fastlstm.forecast.data.timeline import ROWS, Frequency, Timeline
from fastlstm.system import environment
from fastlstm.system.cache import Cache, make_key
from fastlstm.system.fields import key_fields
from fastlstm.system.storage import fsync_file, read_json, write_file, write_json

FORMAT_VERSION = 4
_FIRST_FIELDS = frozenset(
    {
        *("roles", "target", "time", "series", "past", "future", "static", "categorical", "ignore"),
        *("has_target", "policy", "disorder", "duplicates", "gaps", "dtype", "time_format"),
        *("codes", "missing", "kept", "like", "frequency", "step", "unit", "is_month_end"),
        *("time_zone", "is_wall"),
    }
)
"""Fields of PrepareOptions, and of what it holds, that this version of the cache began with."""
_EXACT = 1 << 24
"""Whole numbers up to this are exact in float32."""
_MAX_COLUMNS = 1 << 16
Dtype = Literal["auto", "float32", "float16", "int16"]


@dataclass(frozen=True)
class PrepareOptions:
    """How a table is read.

    Attributes:
        roles: what columns are for.
        policy: what to do about disorder, duplicates and gaps.
        dtype: of the stored values; auto is int16 where all are whole numbers that it holds, else
            float32. float16 and int16 are measured against float32, the error is reported.
        time_format: how times are written where they are text or whole numbers (strptime), or s,
            ms, us, ns: whole numbers are such units since 1970.
        codes: numbers that stand for "no value", and such that look so and are values.
        like: a table whose times these must agree with, or None.
    """

    roles: RoleRequest = field(default_factory=RoleRequest)
    policy: Policy = field(default_factory=Policy)
    dtype: Dtype = "auto"
    time_format: str | None = None
    codes: Codes = NO_CODES
    like: Timeline | None = None


@dataclass(frozen=True)
class SeriesDataset:
    """A table that is ready for windows.

    Attributes:
        table: its rows, mapped.
        roles: what its columns are for.
        frequency: of the rows.
        series: names, by number.
        statics: per static column one number per series.
        categories: names of every categorical column's numbers.
        time_zone: of the times, or None.
        has_clock: times are times; else whole numbers, or rows counted.
        is_wall: times are as the clocks of the zone show them, else UTC.
        has_missing: a value is missing somewhere.
        constant: columns that are the same in every row.
        notes: what was found and decided, a line each.
        name: what messages call it.
        key: name of the cache entry; a frame is in none.
        from_cache: nothing had to be read.
        seconds: that took.
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
    name: str
    key: str
    from_cache: bool
    seconds: float

    @property
    def timeline(self) -> Timeline:
        """How its times are."""
        return Timeline(self.frequency, self.time_zone, self.is_wall)


def prepare_table(
    source: Any,
    options: PrepareOptions | None = None,
    cache_dir: str | Path | None = None,
    on_progress: Callable[[int, int | None], None] | None = None,
) -> SeriesDataset:
    """Reads a table into the cache, or finds it there.

    Args:
        source: see `fastlstm.forecast.data.records.open_records`.
        options: how.
        cache_dir: default `environment.cache_dir()`.
        on_progress: called with (bytes done, bytes in all or None).

    Raises:
        DataError: the table cannot be used; the message says where and why.
        StorageError: the disk refused.

    Cost:
        One pass over the source and one over the times; a second one over the values where rows
        change places or another dtype is asked for. A second start reads the description only.
    """
    started = time.monotonic()
    options = options or PrepareOptions()
    records = open_records(source)
    problems = Problems(records.name)
    with problems.fatal():
        roles = _roles(records, options.roles, problems)
    cache = Cache(Path(cache_dir) if cache_dir is not None else environment.cache_dir(), "series")
    signature = records.signature()
    key = make_key(FORMAT_VERSION, "series", key_fields(options, _FIRST_FIELDS), signature)
    is_cached = signature is not None and not problems
    opened = partial(_open, key=key, name=records.name, started=started)
    dataset = opened(cache.path(key), from_cache=True) if is_cached else None
    if dataset is not None:
        return dataset
    with cache.work_directory() as work:
        with problems.fatal():
            _prepare(work, records, roles, options, problems, on_progress)
        if (name := records.changed_file()) is not None:
            raise DataError(
                f"{name} changed while it was read; start again when nothing writes to it, or give"
                " a copy"
            )
        if signature is not None:
            return cache.place(key, work, lambda: opened(cache.path(key), from_cache=False))
        dataset = opened(work, from_cache=False)  # mapped: its files go with the work directory
        if dataset is None:
            raise CorruptFileError(f"{work} cannot be read back after it was written")
        return dataset


def _roles(records: Records, asked: RoleRequest, problems: Problems) -> Roles:
    import pyarrow.types as kinds

    schema = records.schema
    if len(schema.names) > _MAX_COLUMNS:
        raise DataError(
            f"{records.name} has {len(schema.names):,} columns, at most {_MAX_COLUMNS:,} are read:"
            " a row is of one time, a column of one quantity; is the table turned?"
        )
    numbers = [
        f.name
        for f in schema
        if kinds.is_integer(f.type)
        or kinds.is_floating(f.type)
        or kinds.is_boolean(f.type)
        or kinds.is_decimal(f.type)
        or kinds.is_null(f.type)
    ]
    times = [f.name for f in schema if kinds.is_timestamp(f.type) or kinds.is_date(f.type)]
    return find_roles(schema.names, numbers, times, asked, records.name, problems)


def _prepare(
    work: Path,
    records: Records,
    roles: Roles,
    options: PrepareOptions,
    problems: Problems,
    on_progress: Callable[[int, int | None], None] | None,
) -> None:
    """Writes an entry's files into `work`.

    Raises:
        DataError: all that is wrong with the table, as far as it can be known at once.
    """
    like = options.like

    def read(origins: dict[str, float]) -> IngestResult:
        form, codes = options.time_format, options.codes
        intake = TableIngest(work, records, roles, problems, form, codes, like, origins)
        return ingest(records, intake, on_progress)

    intaken = read({})
    if intaken.num_rows == 0:
        raise DataError(f"{records.name} has no rows below the line of column names")
    _refuse_sentinels(intaken, options.codes, records.name, problems)
    origins = {name: facts.best_origin() for name, facts in intaken.facts.items()}
    if any(origins.values()) and not problems:  # far from 0: read again, less the origin
        intaken = read(origins)
    notes = [
        *roles.notes,
        *_column_notes(intaken, roles, records.name, options.codes.missing, problems),
        *intaken.notes,
    ]
    frequency = None if like is None else like.frequency
    width = len(roles.values)
    arranged = Arrangement(intaken, width, options.policy, records.name, frequency).run()
    problems.raise_all()
    facts = [intaken.facts[name] for name in roles.values]
    stored = store_values(work, arranged, options.dtype, facts, roles.values)
    notes += [*_time_notes(arranged, intaken, options.policy), *stored.notes]
    write_file(work / "segments.npy", _segment_bytes(arranged.segments))
    named = {
        "series": intaken.series,
        "statics": intaken.statics,
        "categories": intaken.categories,
    }
    # Not by write_json: the strict reader would refuse the names of a million series.
    write_file(work / "series.json", json.dumps(named).encode("ascii"))
    write_json(work / "schema.json", _schema(roles, intaken, arranged, stored, tuple(notes)))
    fsync_file(work / "values.bin")
    for path in (intaken.codes, intaken.times):
        if path is not None:
            path.unlink(missing_ok=True)


def _schema(
    roles: Roles, intaken: IngestResult, arranged: Arranged, stored: Stored, notes: tuple[str, ...]
) -> dict[str, Any]:
    return {
        "roles": {**asdict(roles), "notes": []},
        "dtype": stored.dtype,
        "num_rows": arranged.num_rows,
        "scale": stored.scale.tolist(),
        "offset": stored.offset.tolist(),
        "origin": [intaken.facts[name].origin for name in roles.values],
        "frequency": arranged.frequency.to_json(),
        "time_zone": intaken.time_zone,
        "has_clock": intaken.has_clock and intaken.times is not None,
        "has_missing": arranged.counts["filled"] > 0
        or any(facts.missing for facts in intaken.facts.values()),
        "is_wall": intaken.is_wall,
        "constant": [name for name, fact in intaken.facts.items() if fact.low == fact.high],
        "notes": [[note, in_flags(note)] for note in notes],
    }


def _segment_bytes(segments: Segments) -> bytes:
    rows = [segments.series, segments.first_rows, segments.num_rows, segments.start_times]
    file = BytesIO()
    np.save(file, np.stack(rows), allow_pickle=False)
    return file.getvalue()


def _open_table(
    directory: Path, schema: Any, columns: tuple[str, ...], num_series: int
) -> Table | None:
    """Opens the rows of an entry; None where they are not what the schema says."""
    dtype, num_rows = np.dtype(schema["dtype"]), schema["num_rows"]
    path = directory / "values.bin"
    if dtype.name not in DTYPES:
        return None
    if path.stat().st_size != num_rows * len(columns) * dtype.itemsize:
        return None
    values = np.memmap(path, dtype=dtype, mode="r", shape=(num_rows, len(columns)))
    rows = np.load(directory / "segments.npy", allow_pickle=False)
    segments = Segments(*(np.ascontiguousarray(row) for row in rows))
    if rows.dtype != np.int64 or not segments.cover(num_rows, num_series):
        return None  # the native code reads where they say
    table = Table(
        values,
        columns,
        segments,
        np.asarray(schema["scale"], dtype=np.float32),
        np.asarray(schema["offset"], dtype=np.float32),
        np.asarray(schema["origin"], dtype=np.float64),
    )
    sizes = {len(table.scale), len(table.offset), len(table.origin)}
    return table if sizes == {len(columns)} else None


def _open(
    directory: Path, key: str, name: str, started: float, from_cache: bool
) -> SeriesDataset | None:
    """Opens an entry; None when there is none, or a damaged one (which is prepared again)."""
    try:
        schema = read_json(directory / "schema.json")
        named: dict[str, Any] = schema["roles"]
        named = {k: tuple(v) if isinstance(v, list) else v for k, v in named.items()}
        roles = Roles(**named)
        named = json.loads((directory / "series.json").read_text(encoding="utf-8"))
        table = _open_table(directory, schema, roles.values, len(named["series"]))
        if table is None:
            return None
        return SeriesDataset(
            table=table,
            roles=roles,
            frequency=Frequency.from_json(schema["frequency"]),
            series=tuple(named["series"]),
            statics={n: np.asarray(v, dtype=np.float64) for n, v in named["statics"].items()},
            categories=named["categories"],
            time_zone=schema["time_zone"],
            has_clock=schema["has_clock"],
            has_missing=schema["has_missing"],
            is_wall=schema["is_wall"],
            constant=tuple(schema["constant"]),
            notes=tuple(Message(text, flags=flags) for text, flags in schema["notes"]),
            name=name,
            key=key,
            from_cache=from_cache,
            seconds=time.monotonic() - started,
        )
    except (OSError, FastLSTMError, KeyError, TypeError, ValueError, AttributeError, MemoryError):
        return None


def _column_notes(
    intaken: IngestResult, roles: Roles, origin: str, known: Sequence[float], problems: Problems
) -> list[str]:
    """Returns what people should hear of the columns; one without any value is a problem."""
    notes = []
    for name, facts in intaken.facts.items():
        if name in roles.categorical or name in problems:
            continue
        if facts.missing == intaken.num_rows:
            error = DataError(
                f"{origin}: column '{name}' has no value in any row; leave it out with ",
                Setting("ignore", [name]),
            )
            problems.add(error, name)
            continue
        if facts.low == facts.high:
            notes.append(f"column '{name}' is {facts.low:g} in every row: it tells nothing")
        if facts.missing:
            share = facts.missing / intaken.num_rows
            rows = counted(facts.missing, "row")
            notes.append(f"column '{name}' has no value in {rows} ({share:.2%})")
        largest = max(abs(facts.low - facts.origin), abs(facts.high - facts.origin))
        if largest > _EXACT:
            notes.append(
                f"column '{name}' reaches {facts.low:g} and {facts.high:g}: float32 keeps seven"
                f" digits and loses steps below {np.spacing(np.float32(largest)):g}; give"
                " differences where such steps matter"
            )
        notes += [
            Message(
                f"column '{name}' is {shown(code)} in {counted(facts.sentinels[code], 'row')}: if"
                " that stands for no value, give ",
                _codes("missing_value", *known, code),
            )
            for code in facts.near_sentinels()
        ]
    return notes


def _refuse_sentinels(intaken: IngestResult, codes: Codes, origin: str, problems: Problems) -> None:
    for name, facts in (intaken.facts | intaken.static_facts).items():
        found = facts.far_sentinels()
        if found:
            low, high = facts.others
            named = " and ".join(map(shown, found))
            what = "row" if name in intaken.facts else "series"
            count = counted(sum(facts.sentinels[code] for code in found), what)
            error = DataError(
                f"{origin}: column '{name}' is {named} in {count} and between {low:g} and"
                f" {high:g} in all others, as if that stood for no value; give ",
                _codes("missing_value", *codes.missing, *found),
                " if it does, or ",
                _codes("keep_value", *codes.kept, *found),
                " if it is a value",
            )
            problems.add(error, name)


def _codes(name: str, *values: float) -> Setting:
    return Setting(name, values[0] if len(values) == 1 else values)


def _time_notes(arranged: Arranged, intaken: IngestResult, policy: Policy) -> list[str]:
    counts, notes = arranged.counts, []
    num_series = len(intaken.series)
    what = counted(arranged.num_rows, "row") + (f", {num_series:,} series" * (num_series > 1))
    is_step = intaken.times and arranged.frequency != ROWS
    notes.append(f"{what}, one row every {arranged.frequency}" if is_step else what)
    if not intaken.is_grouped:
        notes.append("rows of series were mixed: they are stored series after series")
    if counts["sorted"]:
        notes.append(f"{counted(counts['sorted'], 'row')} out of order: sorted")
    if counts["duplicates"]:
        kept = policy.duplicates
        rows = counted(counts["duplicates"], "row")
        notes.append(f"{rows} of a time that another row has: the {kept} one is kept")
    gaps = counted(counts["gaps"], "gap")
    if counts["gaps"] and policy.gaps == "split":
        notes.append(f"{gaps} in time: no window crosses one")
    elif counts["gaps"]:
        notes.append(f"{gaps} in time: {counted(counts['filled'], 'empty row')} put in")
    return notes
