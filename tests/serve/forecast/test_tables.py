"""`POST /forecast`: the forecasts of `fastlstm forecast`, its errors, and its bounds."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyarrow import csv

from fastlstm import Forecaster
from fastlstm.cli.main import main
from fastlstm.errors import respelled
from fastlstm.forecast.config import READING
from fastlstm.forecast.window_forecaster import load_window_forecaster
from fastlstm.serve.forecast import tables
from fastlstm.serve.forecast.tables import as_query
from fastlstm.system import environment
from forecast_server import QUICK, L, everything, h, refusal, save, waves
from running_server import wait_until

CSV = {"content-type": "text/csv"}


def as_csv(table):
    sink = io.BytesIO()
    place = table.column_names.index("ds")
    seconds = table["ds"].cast(pa.timestamp("s"))
    csv.write_csv(table.set_column(place, "ds", seconds), sink)
    return sink.getvalue()


def as_rows(table):
    """The rows as JSON has them: NaN is null, a time is a text."""
    rows: list[dict[str, Any]] = table.to_pylist()
    for row in rows:
        for name, value in row.items():
            row[name] = None if value != value else value
            if hasattr(value, "isoformat"):
                row[name] = value.isoformat()
    return rows


def post(server, body, query="", accept="*/*"):
    """Sends bytes as CSV, anything else as JSON."""
    path, headers = f"/forecast{query}", {"accept": accept}
    if isinstance(body, bytes):
        return server.client.post(path, content=body, headers={**CSV, **headers})
    return server.client.post(path, json=body, headers=headers)


def by_command(path, data, folder, *more):
    """What `fastlstm forecast` writes."""
    table, out = folder / "table.csv", folder / "out.csv"
    table.write_bytes(data)
    assert main(["forecast", str(path), str(table), "--out", str(out), *more]) == 0
    return out.read_bytes()


def cached():
    """What the cache of tables holds."""
    root = environment.cache_dir() / "series"
    return [*root.glob("work-*"), *root.glob("entries/*")]


@pytest.mark.parametrize("levels", ["", "0.1,0.5,0.9"])
def test_a_csv_is_answered_as_by_the_command(forecasts, plain_path, tmp_path, levels):
    before, data = cached(), as_csv(waves())
    more, query = (["--quantiles", levels], f"?quantiles={levels}") if levels else ([], "")
    answer = post(forecasts, data, query, "text/csv")
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert cached() == before, "nothing is left"
    assert answer.content == by_command(plain_path, data, tmp_path, *more)
    found = post(forecasts, data, query).json()
    assert (found["model"], found["notes"]) == ("waves", [])
    read = csv.read_csv(io.BytesIO(answer.content)).to_pylist()
    for row, full in zip(read, found["rows"], strict=True):
        exact = {k: np.float32(v) if isinstance(v, float) else v for k, v in row.items()}
        assert {**exact, "ds": str(row["ds"])} == full
    wait_until(lambda: forecasts.scheduler.num_held == 0)


def test_rows_as_json_are_the_same_table(forecasts, plain):
    rows = as_rows(waves())
    own = plain.predict()["y"].to_numpy()
    for body in (rows, {"rows": rows}, {"rows": as_csv(waves()).decode(), "future": None}):
        answer = post(forecasts, body)
        assert answer.status_code == 200, answer.text
        found = answer.json()["rows"]
        assert [row["unique_id"] for row in found] == [f"s{k}" for k in range(3) for _ in range(h)]
        np.testing.assert_allclose([row["y"] for row in found], own, rtol=1e-6)


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("application/json, text/csv", "application/json"),
        ("text/html,Text/CSV;q=0.9", "text/csv; charset=utf-8"),
        ("text/html", "application/json"),
        ("", "application/json"),
    ],
)
def test_accept_chooses_the_form(forecasts, accept, kind):
    answer = post(forecasts, as_csv(waves()), accept=accept)
    assert answer.headers["content-type"] == kind


def test_charts_have_the_past_and_intervals(forecasts):
    answer = post(forecasts, as_csv(waves()), "?charts=2").json()
    assert [chart["series"] for chart in answer["charts"]] == ["s0", "s2"], "evenly spread"
    chart = answer["charts"][0]
    assert len(chart["times"]) == L + h
    assert chart["past"] == pytest.approx(waves()["y"].to_pylist()[120 - L : 120])
    assert chart["center"] == pytest.approx([row["y"] for row in answer["rows"][:h]])
    assert [band["level"] for band in chart["bands"]] == [95, 50]
    assert all(low <= high for low, high in zip(chart["low"], chart["high"], strict=True))
    assert "charts" not in post(forecasts, as_csv(waves())).json()


def rows_ahead():
    """What is known of the steps after `everything`."""
    longer = everything(120 + h)
    last = pa.scalar(pc.max(everything()["ds"]).as_py())
    names = ["unique_id", "ds", "price", "kind"]
    return longer.filter(pc.greater(longer["ds"], last)).select(names)


def test_columns_of_every_role(whole_forecasts, whole, tmp_path):
    table, ahead = everything(), rows_ahead()
    own = whole.predict(table, future=ahead)["y"].to_numpy()
    future = as_csv(ahead).decode()
    for body in (
        {"rows": as_rows(table), "future": as_rows(ahead)},
        {"rows": as_csv(table).decode(), "future": future},
    ):
        found = post(whole_forecasts, body).json()["rows"]
        np.testing.assert_allclose([row["y"] for row in found], own, rtol=1e-6)
    without = refusal(post(whole_forecasts, as_csv(table)))
    assert "needs price, kind of every step; give a table of them as `future`" in without
    bare = as_csv(ahead.select(["unique_id", "ds"])).decode()
    told = refusal(post(whole_forecasts, {"rows": as_csv(table).decode(), "future": bare}))
    assert "the future table has no column 'price' (given as future)" in told
    short = {"rows": as_csv(table).decode(), "future": future[: len(future) // 2]}
    assert "the future table" in refusal(post(whole_forecasts, short))


def test_the_server_computes_the_calendar(serve, tmp_path):
    table = waves(240, 1).drop_columns(["unique_id"])
    model = Forecaster(**{**QUICK, "calendar": ["hour"], "target": "y", "past": []}).fit(table)
    path = save(model, tmp_path)
    server = serve(model=load_window_forecaster(path))
    assert len(server.client.get("/v2/models/waves").json()["inputs"]) == 2, "columns of windows"
    answer = post(server, as_csv(table), accept="text/csv")
    assert answer.content == by_command(path, as_csv(table), tmp_path)


def test_the_options_of_reading_are_parameters(forecasts):
    comma = as_csv(waves()).replace(b",", b";").replace(b".", b",")
    told = refusal(post(forecasts, comma))
    assert told.startswith("the table looks like numbers with a decimal comma")
    assert "`decimal=,`" in told
    found = post(forecasts, comma, "?decimal=,").json()["rows"]
    assert found == post(forecasts, as_csv(waves())).json()["rows"]
    empty = post(forecasts, as_csv(waves()), "?escape=&delimiter=&thousands=").json()["rows"]
    assert empty == found, "an empty mark is none"
    latin = as_csv(waves()).replace(b"s0", "sé".encode("cp1252"))
    assert "add `encoding=cp125" in refusal(post(forecasts, latin))
    assert post(forecasts, latin, "?encoding=cp1252").json()["rows"][0]["unique_id"] == "sé"
    twice = as_csv(waves()) + as_csv(waves()).splitlines(keepends=True)[-1]
    assert "duplicates" in refusal(post(forecasts, twice))
    noted = post(forecasts, twice, "?duplicates=last&header=true&skip_rows=0").json()
    assert any("duplicate" in note for note in noted["notes"])


def test_options_of_reading_are_spelled_as_parameters():
    text = "add `delimiter='\t'`, `wide=True`; or train with `gaps='fill'`, `horizon=3`"
    assert respelled(text, as_query) == (
        "add `delimiter=%09&wide=true`; or train with `--gaps fill --horizon 3`"
    )


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("?quantile=0.1", "unknown field 'quantile' (did you mean 'quantiles'?)"),
        ("?cache_dir=/tmp", "unknown field 'cache_dir'"),
        ("?quantiles=a", "quantiles: expected numbers"),
        ("?quantiles=", "quantiles: expected numbers"),
        ("?quantiles=nan", "quantile"),
        ("?quantiles=0.1,7", "outside 0.005 to 0.995"),
        ("?charts=-1", "charts: expected `int` >= 0"),
        ("?charts=100000", "charts: expected `int` <= 10000"),
        ("?skip_rows=x", "skip_rows: expected `int`"),
        ("?skip_rows=9999999999", "skip_rows: expected `int` <= 1000000"),
        ("?header=maybe", "header: expected `bool`"),
        ("?decimal=abc", "`decimal` is 'abc', expected one character"),
        ("?decimal=", "`decimal` is '', expected one character"),
        ("?gaps=no", "`gaps` is 'no', expected one of split, fill"),
        ("?encoding=zip", "`encoding` is 'zip'"),
        ("?encoding=punycode", "`encoding` is 'punycode'"),
        (
            "?encoding=utf-16",
            "`encoding=utf-16`: the text does not start with a byte order mark; give one with the"
            " order, such as `encoding=utf-16-le`",
        ),
        ("?delimiter=%C3%A9", "`delimiter` is 'é', expected a character of ASCII"),
        ("?escape=%00", "`escape` is '\\x00', expected a character of ASCII"),
        ("?escape=%22", "`escape` is '\"', expected a character of ASCII that is no quote"),
        ("?delimiter=%0A", "`delimiter` is '\\n', expected a character of ASCII"),
        ("?decimal=%D9%AB", "`decimal` is '٫', expected a character of ASCII"),
        ("?delimiter=;&escape=;", "are ';', '.', ';', expected different characters"),
        ("?encoding=a%00b", "`encoding` is"),
        ("?tz=../../etc/passwd", "is a time zone that this system does not know"),
        ("?time_format=%25Q", "time_format"),
    ],
)
def test_wrong_parameters_are_named(forecasts, query, why):
    assert why in refusal(post(forecasts, as_csv(waves()), query))


HEAD = b"unique_id,ds,y,temp\n"


def rows_of(count, value="1.5"):
    lines = (f"a,2024-01-{1 + k // 24:02} {k % 24:02}:00,{value},2\n" for k in range(count))
    return HEAD + "".join(lines).encode()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "the table is empty; expected a line of column names"),
        (b"\n\n", "the table is empty"),
        (HEAD, "the table has column names but no rows"),
        (b"\x00" * 5000, "the table"),
        (b"\xff\xfe\x00\xd8" * 500, "the table"),
        (b"PK\x03\x04" + b"x" * 100, "is a workbook or a zip"),
        (b"no table at all", "the table"),
        (rows_of(L - 1), f"ends in {L - 1} rows without gaps"),
        (rows_of(60, "nan"), "has no values"),
        (rows_of(60, ""), "has no values"),
        (rows_of(60, "inf"), "y"),
        (rows_of(60, "1e400"), "y"),
        (rows_of(60, "x"), "column 'y'"),
        (rows_of(60).replace(b"temp", b"tomp"), "temp"),
        (rows_of(60).replace(b",y,", b",y,y,"), "the table"),
        (b"a," * 4096 + b"a\n1", "the table has 4,097 columns, the limit is 4,096"),
        ([dict.fromkeys(map(str, range(4097)), 1)], "has 4,097 columns, the limit is 4,096"),
        (rows_of(60).replace(b"2024", b"x024"), "ds"),
        (rows_of(60) + b'a,"2024-02-01', "the table"),
        (rows_of(60).replace(b"a,", b"b" * 300 + b","), "has 300 characters, expected at most 256"),
        ([], "the table has no rows"),
        ([{}], "the table has no rows"),
        ([{"y": 1.0}, {}], "row 2 of the table lacks 'y'"),
        ([{"y": 1.0}, {"y": 2.0, "x": 1}], "row 2 of the table has 'x'"),
        ([{"y": 1.0}, {"y": "a"}], "mixes kinds of values in a column (Could not convert 'a'"),
        ([{"y": 1 << 63}, {"y": 1}], "y"),
        ([{"y": True}], "[0][...]: expected"),
        ([1, 2], "[0]: expected"),
        ({"row": []}, "unknown field 'row' (did you mean 'rows'?)"),
        ({}, "required field"),
        ({"rows": 3}, "rows: expected"),
        ({"rows": ""}, "the table is empty"),
        ({"rows": rows_of(60).decode(), "future": ""}, "fitted without future columns"),
        ("text", "expected"),
    ],
    ids=lambda value: None if isinstance(value, str) else repr(value)[:30],
)
def test_forged_bodies_get_one_clear_error(forecasts, body, why):
    before = cached()
    told = refusal(post(forecasts, body))
    assert why in told
    assert str(environment.cache_dir()) not in told
    assert cached() == before
    wait_until(lambda: forecasts.scheduler.num_held == 0)


def test_numbers_that_json_lacks_are_refused(forecasts):
    headers = {"content-type": "application/json"}
    for body in (b'[{"y": NaN}]', b'[{"y": 1', b"", b'[{"y": "\xff"}]'):
        answer = forecasts.client.post("/forecast", content=body, headers=headers)
        assert "not valid JSON" in refusal(answer)
    answer = forecasts.client.post("/forecast", content=b"[" * 5000, headers=headers)
    assert refusal(answer) == "[0]: expected `object`, got `array`"


@pytest.mark.parametrize("kind", ["", "text/plain", "multipart/form-data; boundary=x"])
def test_other_types_are_refused(forecasts, kind):
    answer = forecasts.client.post("/forecast", content=b"y\n1\n", headers={"content-type": kind})
    assert "expected application/json or text/csv" in (text := refusal(answer, 415))
    assert "-H 'Content-Type: application/json' or -H 'Content-Type: text/csv'" in text
    packed = {**CSV, "content-encoding": "gzip"}
    answer = forecasts.client.post("/forecast", content=b"y\n1\n", headers=packed)
    assert "compressed" in refusal(answer, 415)
    assert forecasts.client.get("/forecast").status_code == 405


def test_a_csv_may_have_eight_times_max_body(serve, plain_model):
    data, rows = as_csv(waves()), as_rows(waves())
    assert 2100 < len(data) <= 8 * 2100 < len(json.dumps(rows))
    server = serve(model=plain_model, max_body=2100)
    assert post(server, data).status_code == 200
    assert "more than 2100 bytes" in refusal(post(server, rows), 413)
    assert "more than 16800 bytes" in refusal(post(server, data * 3), 413)


def test_too_many_series_and_numbers_are_refused(serve, plain_model):
    data = as_csv(waves())
    server = serve(model=plain_model, max_streams=2)
    told = refusal(post(server, data))
    assert "3 windows, this server forecasts at most 2" in told
    assert told.endswith("or fewer series of a table")
    server = serve(model=plain_model, max_numbers=3 * h)
    assert post(server, data).status_code == 200
    for query in ("?quantiles=0.1,0.9", "?charts=1"):
        assert "send fewer windows or quantiles" in refusal(post(server, data, query))


def test_a_hundred_thousand_rows(forecasts, plain):
    rows = 33_334
    table = waves(rows)
    data = as_csv(table)
    found = post(forecasts, data).json()["rows"]
    np.testing.assert_allclose(
        [row["y"] for row in found], plain.predict(table)["y"].to_numpy(), rtol=1e-6
    )
    assert refusal(post(forecasts, as_rows(table)), 413)


def test_a_series_that_is_too_short_is_left_out_and_noted(forecasts):
    answer = post(forecasts, as_csv(waves().slice(0, 120 + L - 1))).json()
    assert {row["unique_id"] for row in answer["rows"]} == {"s0"}
    (note,) = answer["notes"]
    assert note.startswith(f"not forecast: series 's1' ends in {L - 1} rows without gaps, a")


def test_a_series_without_values_is_null_and_noted(whole_forecasts):
    table = everything()
    empty = pc.if_else(pc.equal(table["unique_id"], "s1"), None, table["y"])
    table = table.set_column(2, "y", empty)
    body = {"rows": as_rows(table), "future": as_rows(rows_ahead())}
    answer = post(whole_forecasts, body, "?charts=9").json()
    assert [row["y"] is None for row in answer["rows"]] == [False] * h + [True] * h + [False] * h
    assert answer["notes"] == ["series 's1' has no value of 'y': such forecasts are NaN"]
    assert answer["charts"][1]["center"] == [None] * h


def test_keys_and_kinds_of_models(serve, plain_model):
    server = serve(model=plain_model, keys=("secret-key", "other-key"))
    data = as_csv(waves())
    assert post(server, data).status_code == 401
    server.client.headers["authorization"] = "Bearer secret-key"
    assert post(server, data).status_code == 200
    text = serve()
    assert "is a language model, not a forecaster" in refusal(post(text, data), 404)


def test_a_failure_of_the_reader_is_no_fault_of_the_client(forecasts, monkeypatch):
    def fail(*args):
        raise RuntimeError("planted")

    monkeypatch.setattr(tables, "parse_query", fail)
    assert "see its log" in refusal(post(forecasts, as_csv(waves())), 500)
    wait_until(lambda: forecasts.scheduler.num_held == 0)
    monkeypatch.undo()
    assert post(forecasts, as_csv(waves())).status_code == 200


def test_a_cache_that_cannot_be_written_is_no_fault_of_the_client(forecasts, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FASTLSTM_CACHE", str(tmp_path / "file"))
    told = refusal(post(forecasts, as_csv(waves())), 500)
    assert "see its log" in told
    assert str(tmp_path) not in told


def test_every_parameter_is_in_the_document(forecasts):
    document = forecasts.client.get("/openapi.json").json()
    listed = document["paths"]["/forecast"]["post"]["parameters"]
    assert {one["name"] for one in listed} == {"quantiles", "charts", *READING}
