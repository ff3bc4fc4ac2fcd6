"""`POST /forecast`: the rows of a table in, the steps after them out, as `fastlstm forecast`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import parse_qsl, quote, urlencode

import msgspec
from msgspec import UNSET, Meta, Struct
from starlette.types import Receive, Scope, Send

from fastlstm.errors import UsageError, as_flags, respelled
from fastlstm.forecast.config import READING, ReadOptions
from fastlstm.report.markup import clipped
from fastlstm.serve.admission import Reservation
from fastlstm.serve.forecast.engine import ForecastEngine
from fastlstm.serve.http.errors import MAX_SHOWN, ApiError, decode, invalid, refused
from fastlstm.serve.http.transfer import media_type
from fastlstm.serve.service import Service
from fastlstm.system import environment
from fastlstm.system.cache import Cache

if TYPE_CHECKING:
    from fastlstm.forecast.forecast_table import Forecasts

CSV, JSON = b"text/csv", b"application/json"
BODIES = {JSON: 1, CSV: 8}
"""Types of a body, and how many times --max-body it may have: of a CSV no objects are made."""
_MAX_COLUMNS, _MAX_NAME, _MAX_MESSAGE = 4096, 256, 4000
_OF_A_CHART = 9
"""Numbers of a chart for each step: the forecast, six ends of intervals, the past."""
_ROWS_AT_ONCE = 1 << 12

Row = dict[str, str | int | float | None]


class TableBody(Struct, forbid_unknown_fields=True):
    """A table, and the future columns of the steps to forecast: rows, or the text of a CSV."""

    rows: str | list[Row]
    future: str | list[Row] | None = None


_TYPES = {"bool": bool, "int": Annotated[int, Meta(ge=0, le=10**6)]}
_OPTIONS = [(field.name, _TYPES.get(str(field.type), str), UNSET) for field in fields(ReadOptions)]
_OWN = [("quantiles", str, UNSET), ("charts", Annotated[int, Meta(ge=0, le=10_000)], 0)]
Query: Any = msgspec.defstruct("Query", [*_OWN, *_OPTIONS], forbid_unknown_fields=True)
_DECODER = msgspec.json.Decoder(TableBody | list[Row])


@dataclass
class TableForecasts:
    """Answers tables, an ASGI application."""

    _service: Service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, engine = self._service, self._service.forecast_engine
        pending = Reservation(scope["state"]["tenant"])
        admitted = service.admitted(engine, pending, scope, receive, send, BODIES)
        async with admitted as (sender, body):
            data = await engine.call(pending, forecast_table, engine, pending, body, scope)
            del body
            scope["state"]["record"].windows = pending.num_places
            service.metrics.windows.inc(pending.num_places)
            await sender.start(CSV + b"; charset=utf-8" if wants_csv(scope) else JSON, len(data))
            await sender.body(data, is_last=True)


def wants_csv(scope: Scope) -> bool:
    """Whether Accept names CSV, and not JSON before it."""
    accept = dict(scope["headers"]).get(b"accept", b"").lower()
    kinds = [part.partition(b";")[0].strip() for part in accept.split(b",")]
    return [kind for kind in kinds if kind in BODIES][:1] == [CSV]


def parse_query(query: bytes) -> tuple[tuple[float, ...], int, dict[str, Any]]:
    """Returns the levels, the number of charts and the options of reading that a query gives.

    Raises ApiError for other parameters or types; `ForecastConfig` checks the values of options.
    """
    given = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
    try:
        found = msgspec.convert(given, Query, strict=False)
        levels = tuple(map(float, given["quantiles"].split(","))) if "quantiles" in given else ()
    except msgspec.ValidationError as error:
        raise invalid(str(error), Query.__struct_fields__, "", {}) from None
    except ValueError:
        raise refused("quantiles", "expected numbers between 0 and 1, as 0.1,0.5,0.9") from None
    return levels, found.charts, {name: getattr(found, name) for name in given if name in READING}


# What follows runs on the reader's thread, one table at a time.


def forecast_table(
    engine: ForecastEngine, pending: Reservation, body: bytes, scope: Scope
) -> bytes:
    """Reads a table as `fastlstm forecast`; returns the forecasts as CSV or as JSON.

    The request then holds a place for every series.
    """
    from fastlstm.forecast.forecast_table import Forecasts, read_future, read_past
    from fastlstm.forecast.table_schema import apply_schema

    Cache(environment.cache_dir(), "series")  # its errors are no fault of the client
    levels, num_charts, reading = parse_query(scope["query_string"])
    stored, notes = engine.model.stored, list[str]()
    if media_type(dict(scope["headers"])) == CSV:
        sent = TableBody(body)  # type: ignore[arg-type]
    else:
        fields = decode(body, _DECODER, TableBody.__struct_fields__)
        sent = TableBody(fields) if isinstance(fields, list) else fields
    try:
        stored = replace(stored, config=replace(stored.config, **reading))
        past = read_past(stored, _records("the table", sent.rows))
        ahead = read_future(stored, _records("the future table", sent.future), past)
        found = Forecasts(stored, past, apply_schema(past, stored), levels, ahead, notes.append)
        notes += past.repairs
        if levels and (text := stored.unsupported(levels)):
            notes.append(text)
        if (longest := max(len(str(name)) for name in past.series)) > _MAX_NAME:
            what = f"{longest:,} characters, expected at most {_MAX_NAME}; shorten it"
            raise ApiError(400, f"the name of a series has {what}")
        count = found.num_rows // engine.model.horizon
        engine.check_numbers(count, (len(levels) or 1) + (_OF_A_CHART if num_charts else 0))
        engine.scheduler.reserve(pending, count)
        return _csv(found) if wants_csv(scope) else _json(engine.name, found, notes, num_charts)
    except UsageError as error:
        raise ApiError(400, clipped(respelled(str(error), as_query), _MAX_MESSAGE)) from None


def as_query(settings: Sequence[tuple[str, Any]]) -> str:
    """Returns options of reading as parameters of the query: ``decimal=,&wide=true``; others, which
    are of training, as flags."""
    if any(name not in READING for name, _ in settings):
        return as_flags(settings)
    given = [(n, str(v).lower() if isinstance(v, bool) else v) for n, v in settings]
    return urlencode(given, quote_via=quote, safe=",;:/|'$")


def _records(title: str, rows: str | bytes | list[Row] | None) -> Any:
    """Returns rows, or the text of a CSV, as the reader takes them."""
    import pyarrow as pa

    from fastlstm.forecast.data.records import FrameRecords, MemoryFile, require_few

    if not isinstance(rows, list):
        data = rows.encode("utf-8") if isinstance(rows, str) else rows
        return None if data is None else MemoryFile(title, data, _MAX_COLUMNS)
    if not rows or not rows[0]:
        raise ApiError(400, f"{title} has no rows; send one object for each, with its columns")
    require_few(rows[0], title, _MAX_COLUMNS)
    for number, row in enumerate(rows):
        if other := row.keys() ^ rows[0].keys():
            column, has = clipped(min(other), MAX_SHOWN), "has" if min(other) in row else "lacks"
            message = f"row {number + 1} of {title} {has} '{column}', unlike the first"
            raise ApiError(
                400, f"{message}; send the same columns in all, null where a value lacks"
            )
    try:
        records = FrameRecords(pa.Table.from_pylist(rows))
    except (pa.ArrowException, OverflowError) as error:
        why = clipped(str(error), MAX_SHOWN)
        message = f"{title} mixes kinds of values in a column ({why}); send numbers or texts"
        raise ApiError(400, message) from None
    records.name = title
    return records


def _csv(found: Forecasts) -> bytes:
    import pyarrow as pa

    from fastlstm.forecast.forecast_table import write_rows

    sink = pa.BufferOutputStream()
    write_rows(sink, ".csv", found.csv_schema, found.blocks())
    return bytes(sink.getvalue())


def _json(name: str, found: Forecasts, notes: list[str], num_charts: int) -> bytes:
    import pyarrow as pa

    encode, parts = msgspec.json.encode, list[bytes]()
    schema = found.csv_schema
    for batch in found.table().cast(schema).to_batches(max_chunksize=_ROWS_AT_ONCE):
        texts = [c.cast(pa.string()) if pa.types.is_temporal(c.type) else c for c in batch]
        rows = pa.record_batch(texts, names=schema.names).to_pylist()
        parts.append(encode(rows)[1:-1])
    answer = {"model": name, "rows": msgspec.Raw(b"[" + b",".join(parts) + b"]")}
    charts = {"charts": found.events(None, num_charts)} if num_charts else {}
    notes = [respelled(note, as_query) for note in dict.fromkeys(notes)]
    return encode({**answer, **charts, "notes": notes})
