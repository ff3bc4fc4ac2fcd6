"""`POST /forecast`: the rows of a table in, the steps after them out, as `fastlstm forecast`."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import parse_qsl

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from fastlstm.errors import UsageError, counted, nearest_hint
from fastlstm.forecast.read_options import READING, ReadOptions
from fastlstm.report.markup import clipped
from fastlstm.serve.admission import Reservation
from fastlstm.serve.http.errors import MAX_SHOWN, ApiError, decode, refused
from fastlstm.serve.http.transfer import media_type

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from fastlstm.forecast.data.dataset import SeriesDataset
    from fastlstm.forecast.forecast_table import Forecasts
    from fastlstm.serve.forecast.engine import ForecastEngine
    from fastlstm.serve.service import Service

CSV, JSON = b"text/csv", b"application/json"
BODIES = {JSON: 1, CSV: 8}
"""Types of a body, and how many times --max-body it may have: of a CSV no objects are made."""
PARAMETERS = ("quantiles", "charts", *READING)
"""Parameters of the query."""
_KINDS = {field.name: str(field.type) for field in fields(ReadOptions)}
_WORDS = {"true": True, "false": False}
_MAX_CHARTS, _MAX_COLUMNS, _MAX_NAME, _MAX_MESSAGE = 10_000, 4096, 256, 4000
_OF_A_CHART = 9
"""Numbers of a chart for each step: the forecast, six ends of intervals, the past."""
_ROWS_AT_ONCE = 1 << 12

Row = dict[str, str | int | float | None]
Numbers = list[float | None]


class Table(Struct, forbid_unknown_fields=True):
    """A table, and the future columns of the steps to forecast: rows, or the text of a CSV."""

    rows: str | list[Row]
    future: str | list[Row] | None = None


class Interval(Struct):
    """The interval that holds so many percent of the values."""

    level: int
    low: Numbers
    high: Numbers


class Chart(Struct):
    """The end of the past of a series, its forecast, and its intervals: 80 %, in `bands` others."""

    series: str | None
    target: str
    times: Annotated[list[str] | None, Meta(description="of the past and of the forecast")]
    past: Numbers
    center: Numbers
    low: Numbers
    high: Numbers
    bands: list[Interval]


class TableAnswer(Struct):
    """The steps after the end of every series; null is a number that is not known."""

    model: str
    rows: list[Row]
    notes: list[str]
    charts: list[Chart] | UnsetType = UNSET


_DECODER = msgspec.json.Decoder(Table | list[Row])


@dataclass(frozen=True)
class TableRequest:
    """A request, its query checked; `reading` are options of reading its table."""

    body: bytes
    is_csv: bool
    wants_csv: bool
    levels: tuple[float, ...]
    num_charts: int
    reading: dict[str, Any]


@dataclass
class TableForecasts:
    """Answers tables, an ASGI application."""

    _service: Service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, engine = self._service, self._service.forecast_engine
        headers, given = dict(scope["headers"]), parse_query(scope["query_string"])
        wants_csv = _wants_csv(headers.get(b"accept", b""))
        pending = Reservation(scope["state"]["tenant"])
        admitted = service.admitted(engine, pending, scope, receive, send, BODIES)
        async with admitted as (sender, body):
            request = TableRequest(body, media_type(headers) == CSV, wants_csv, **given)
            del body
            data = await engine.call(pending, forecast_table, engine, pending, request)
            del request
            scope["state"]["record"].windows = pending.num_places
            service.metrics.windows.inc(pending.num_places)
            kind = CSV + b"; charset=utf-8" if wants_csv else JSON
            await sender.start(kind, len(data))
            await sender.body(data, is_last=True)


def parse_query(query: bytes) -> dict[str, Any]:
    """Returns the levels, the number of charts and the options of reading that a query gives.

    Raises ApiError for another parameter; the values of options are checked when they are used.
    """
    given = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
    for name in given:
        if name not in PARAMETERS:
            hint = nearest_hint(name[:64], PARAMETERS) or "; leave it out"
            raise ApiError(400, f"unknown parameter '{clipped(name, MAX_SHOWN)}'{hint}")
    try:
        levels = tuple(map(float, given["quantiles"].split(","))) if "quantiles" in given else ()
    except ValueError:
        raise refused("quantiles", "expected numbers between 0 and 1, as 0.1,0.5,0.9") from None
    charts = _typed("int", given.get("charts", "0"))
    if not isinstance(charts, int) or charts > _MAX_CHARTS:
        raise refused("charts", f"expected how many charts, at most {_MAX_CHARTS}")
    reading = {n: _typed(_KINDS[n], text) for n, text in given.items() if n in _KINDS}
    return {"levels": levels, "num_charts": charts, "reading": reading}


def _typed(kind: str, text: str) -> Any:
    """Returns a value of that kind, or the text: `ForecastConfig` says what is wrong with it."""
    if kind == "int" and text.isdecimal() and len(text) < 10:
        return int(text)
    return _WORDS.get(text.lower(), text) if kind == "bool" else text


def _wants_csv(accept: bytes) -> bool:
    kinds = [part.partition(b";")[0].strip() for part in accept.lower().split(b",")]
    return [kind for kind in kinds if kind in BODIES][:1] == [CSV]


# What follows runs on the reader's thread, one table at a time.


def forecast_table(engine: ForecastEngine, pending: Reservation, request: TableRequest) -> bytes:
    """Reads a table as `fastlstm forecast`; returns the forecasts as CSV or as JSON.

    The request then holds a place for every series.
    """
    from fastlstm.forecast.forecast_table import Forecasts, read_future, read_past
    from fastlstm.forecast.table_schema import apply_schema

    stored, notes = engine.model.stored, list[str]()
    try:
        stored = replace(stored, config=replace(stored.config, **request.reading))
        rows, future = _tables(request)
        past = read_past(stored, rows)
        ahead = read_future(stored, future, past)
        inputs = apply_schema(past, stored)
        found = Forecasts(stored, past, inputs, request.levels, ahead, notes.append)
        notes += past.repairs
        if request.levels and (text := stored.unsupported(request.levels)):
            notes.append(text)
        _admit(engine, pending, request, found)
        return _csv(found) if request.wants_csv else _json(engine, request, found, notes)
    except UsageError as error:
        raise ApiError(400, clipped(str(error), _MAX_MESSAGE)) from None


def _tables(request: TableRequest) -> tuple[Any, Any]:
    """Returns the table of a request and that of its future columns, as the reader takes them."""
    from fastlstm.forecast.data.table_files import MemoryFile

    if request.is_csv:
        return MemoryFile("the table", request.body, _MAX_COLUMNS), None
    fields = decode(request.body, _DECODER, Table.__struct_fields__)
    sent = Table(fields) if isinstance(fields, list) else fields
    return _records("the table", sent.rows), _records("the future table", sent.future)


def _records(title: str, rows: str | list[Row] | None) -> Any:
    import pyarrow as pa

    from fastlstm.forecast.data.records import FrameRecords, require_few
    from fastlstm.forecast.data.table_files import MemoryFile

    if rows is None or isinstance(rows, str):
        return None if rows is None else MemoryFile(title, rows.encode("utf-8"), _MAX_COLUMNS)
    if not rows or not rows[0]:
        raise ApiError(400, f"{title} has no rows; send one object for each, with its columns")
    require_few(rows[0], title, _MAX_COLUMNS)
    for number, row in enumerate(rows):
        if other := row.keys() ^ rows[0].keys():
            has = "has" if min(other) in row else "lacks"
            column = clipped(min(other), MAX_SHOWN)
            message = f"row {number + 1} of {title} {has} '{column}', unlike the first"
            raise ApiError(
                400, f"{message}; send the same columns in all, null where a value lacks"
            )
    columns = dict[str, Any]()
    for name in rows[0]:
        values = [row[name] for row in rows]
        try:
            columns[name] = pa.array(values)
        except (pa.ArrowException, OverflowError, ValueError):
            message = f"column '{clipped(name, MAX_SHOWN)}' of {title} mixes numbers and texts"
            raise ApiError(400, f"{message}, or has one beyond 64 bits; send one kind") from None
    records = FrameRecords(pa.table(columns))
    records.name = title
    return records


def _admit(
    engine: ForecastEngine, pending: Reservation, request: TableRequest, found: Forecasts
) -> None:
    """Checks the sizes of an answer, and takes a place for each series."""
    names: SeriesDataset = found.dataset
    count, limit = found.num_rows // engine.model.horizon, engine.scheduler.limit
    if count > limit:
        message = f"the table has {counted(count, 'series')}, this server forecasts at most {limit}"
        what = "send fewer, or start the server with a larger --max-streams"
        raise ApiError(400, f"{message} at a time; {what}")
    if (longest := max(len(str(name)) for name in names.series)) > _MAX_NAME:
        message = f"the name of a series has {longest:,} characters, expected at most {_MAX_NAME}"
        raise ApiError(400, f"{message}; shorten it")
    values = len(request.levels) or 1
    engine.check_numbers(count, values + (_OF_A_CHART if request.num_charts else 0))
    engine.scheduler.reserve(pending, count)


def _csv(found: Forecasts) -> bytes:
    import pyarrow as pa

    from fastlstm.forecast.forecast_file import write_rows

    sink = pa.BufferOutputStream()
    write_rows(sink, ".csv", found.schema, found.blocks(), found.has_whole_seconds)
    return bytes(sink.getvalue())


def _json(
    engine: ForecastEngine, request: TableRequest, found: Forecasts, notes: list[str]
) -> bytes:
    import pyarrow as pa

    from fastlstm.forecast.forecast_file import csv_schema

    encode, parts = msgspec.json.encode, list[bytes]()
    schema = csv_schema(found.schema, found.has_whole_seconds)
    for batch in found.table().cast(schema).to_batches(max_chunksize=_ROWS_AT_ONCE):
        texts = [c.cast(pa.string()) if pa.types.is_timestamp(c.type) else c for c in batch]
        rows = pa.record_batch(texts, names=schema.names).to_pylist()
        parts.append(encode(rows)[1:-1])
    answer: dict[str, Any] = {"model": engine.name}
    answer["rows"] = msgspec.Raw(b"[" + b",".join(parts) + b"]")
    if request.num_charts:
        answer["charts"] = found.events(None, request.num_charts)
    return encode({**answer, "notes": list(dict.fromkeys(notes))})
