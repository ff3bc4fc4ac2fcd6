"""The Open Inference Protocol: routes, forecasts equal to the Forecaster's, errors."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pyarrow.compute as pc
import pytest
import torch

from fastlstm import Forecaster
from fastlstm.forecast.window_forecaster import load_window_forecaster
from forecast_server import (
    PAST,
    QUICK,
    L,
    body,
    everything,
    h,
    output,
    past_of,
    refusal,
    save,
    tensor,
    waves,
)
from running_server import SETTINGS, Running

COLUMNS = ("y", "temp")


def infer(server: Running, request: Any) -> httpx.Response:
    return server.client.post(PAST, json=request)


def names(*series: str | None) -> Any:
    """The input that says of which series the windows are."""
    return tensor("series_names", [[name] for name in series or ("s0", "s1", "s2")], "BYTES")


def last_windows() -> Any:
    """The last window of every series, shape (3, L, 2)."""
    return np.stack([past_of(waves(), series, 120, COLUMNS) for series in range(3)])


def test_metadata(forecasts):
    get = forecasts.client.get
    server = get("/v2").json()
    assert server["name"] == "fastlstm"
    assert set(server["extensions"]) == {"parameters", "sequence", "sequence(string_id)"}
    assert get("/v2/health/live").json() == {"live": True}
    assert get("/v2/health/ready").json() == {"ready": True}
    for path in ("/v2/models/waves", "/v2/models/waves/versions/1"):
        assert get(f"{path}/ready").json() == {"name": "waves", "ready": True}
        found = get(path).json()
        assert found["name"] == "waves"
        assert found["versions"] == ["1"]
        assert found["parameters"] == {"input_size": L, "horizon": h, "frequency": "1 hour"}
        past, series = found["inputs"]
        assert (series["name"], series["datatype"]) == ("series_names", "BYTES")
        assert past["shape"] == [-1, -1, 2]
        assert past["parameters"]["columns"] == ["y", "temp"]
        assert [one["name"] for one in found["outputs"]] == ["forecast", "quantiles"]
        assert [one["shape"] for one in found["outputs"]] == [[-1, h, 1], [-1, h, 1, -1]]


def test_metadata_of_columns_of_every_role(whole_forecasts):
    found = whole_forecasts.client.get("/v2/models/waves").json()
    listed = {
        one["name"]: (one["datatype"], one["shape"], one["parameters"]["columns"])
        for one in found["inputs"]
    }
    assert listed == {
        "past": ("FP32", [-1, -1, 3], ["y", "temp", "price"]),
        "past_names": ("BYTES", [-1, -1, 2], ["sky", "kind"]),
        "future": ("FP32", [-1, h, 1], ["price"]),
        "future_names": ("BYTES", [-1, h, 1], ["kind"]),
        "static": ("FP32", [-1, 1], ["size"]),
        "static_names": ("BYTES", [-1, 1], ["place"]),
        "series_names": ("BYTES", [-1, 1], ["unique_id"]),
    }


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("path", [PAST, "/v2/models/waves/versions/1/infer"])
def test_forecasts_are_the_forecasters(forecasts, plain, path, nested):
    older = np.zeros((3, 5 * nested, 2))  # left out
    values = np.concatenate([older, last_windows()], 1)
    request = {"id": "abc", "inputs": [tensor("past", values, nested=nested), names()]}
    answer = forecasts.client.post(path, json=request)
    own = plain.predict()["y"].to_numpy().reshape(3, h, 1)
    np.testing.assert_allclose(output(answer), own, rtol=1e-5, atol=1e-5)
    found = answer.json()
    assert (found["model_name"], found["model_version"], found["id"]) == ("waves", "1", "abc")
    assert [one["name"] for one in found["outputs"]] == ["forecast"]


def test_levels_far_from_zero_are_float64(serve, tmp_path):
    table = waves().append_column("high", pc.add(pc.cast(waves()["y"], "float64"), 1e9))
    model = Forecaster(**QUICK, target="high", past=["y"]).fit(table)
    server = serve(model=load_window_forecaster(save(model, tmp_path)))
    described = server.client.get("/v2/models/waves").json()
    found = [one["datatype"] for one in described["inputs"] + described["outputs"]]
    assert found == ["FP64", "BYTES", "FP64", "FP64"]
    past = np.stack([past_of(table, series, 120, ("high", "y")) for series in range(3)])
    own = model.predict()["high"].to_numpy().reshape(3, h, 1)
    asked = {"name": "past", "shape": [3, L, 2], "datatype": "FP64"}
    request = {"inputs": [{**asked, "data": past.tolist()}, names()]}
    (found,) = infer(server, request).json()["outputs"]
    assert found["datatype"] == "FP64"
    np.testing.assert_allclose(np.reshape(found["data"], found["shape"]), own, rtol=0, atol=1e-4)
    assert "inputs[0].datatype: invalid enum value 'FP32'" in refusal(infer(server, body(past)))
    asked = {"name": "past", "shape": [1, L, 2], "datatype": "FP64", "data": [1e300] * 2 * L}
    assert "beyond the range of float32" in infer(server, {"inputs": [asked]}).json()["error"]


def test_a_static_number_far_from_zero_is_float64(tmp_path):
    table = waves()
    size = pc.add(
        pc.cast(table["unique_id"].combine_chunks().dictionary_encode().indices, "float64"), 1e9
    )
    model = Forecaster(**{**QUICK, "steps": 1}, static=["big"])
    model.fit(table.append_column("big", size))
    assert load_window_forecaster(save(model, tmp_path)).dtype == np.float64


def test_quantiles_are_the_forecasters(forecasts, plain):
    levels = [0.05, 0.5, 0.975]
    request = body(last_windows(), quantiles=levels)
    request["inputs"].append(names())
    answer = infer(forecasts, request)
    own = plain.predict_quantiles(quantiles=levels)
    own = np.stack([own[f"y-q{q:g}"].to_numpy().reshape(3, h, 1) for q in levels], -1)
    np.testing.assert_allclose(output(answer, "quantiles"), own, rtol=1e-5, atol=1e-5)
    assert output(answer).shape == (3, h, 1)
    chosen = {**body(last_windows(), quantiles=levels), "outputs": [{"name": "quantiles"}]}
    answer = infer(forecasts, chosen)
    assert [one["name"] for one in answer.json()["outputs"]] == ["quantiles"]
    np.testing.assert_array_equal(output(answer, "quantiles").shape, (3, h, 1, 3))


def test_a_quantile_beyond_the_validation_data_is_refused(forecasts):
    answer = infer(forecasts, body(last_windows(), quantiles=[0.5, 0.995]))
    assert answer.status_code == 400
    assert "quantiles 0.995 are infinite: validation has too few values" in answer.text
    unasked = {**body(last_windows(), quantiles=[0.5, 0.995]), "outputs": [{"name": "forecast"}]}
    assert infer(forecasts, unasked).status_code == 200


def everything_request(series: int, end: int) -> list[Any]:
    """Inputs for one window of `everything` that ends before row `end`."""
    table, ahead = everything(), end + h
    ahead_of = lambda name: past_of(table, series, ahead, (name,))[-h:]  # noqa: E731
    static = {name: table[name].to_pylist()[series * 120] for name in ("size", "place")}
    return [
        tensor("past", past_of(table, series, end, ("y", "temp", "price"))[None]),
        tensor("past_names", past_of(table, series, end, ("sky", "kind"))[None], "BYTES"),
        tensor("future", ahead_of("price")[None]),
        tensor("future_names", ahead_of("kind")[None], "BYTES"),
        tensor("static", [[static["size"]]]),
        tensor("static_names", [[static["place"]]], "BYTES"),
        names(f"s{series}"),
    ]


@pytest.mark.parametrize(("series", "end"), [(0, L), (1, 70), (2, 114)])
def test_columns_of_every_role(whole_forecasts, whole, series, end):
    inputs = everything_request(series, end)
    assert any(value is None for value in inputs[0]["data"])  # some are missing
    found = output(infer(whole_forecasts, {"inputs": inputs}))
    ((values, statics),) = whole._inputs.read(
        np.array([series * 120 + end - L]), whole.network_.config
    )
    with torch.no_grad():
        center = whole.network_.output.center(whole.network_(values, statics)).numpy()
    mean, std = (scale[:, :1] for scale in whole._inputs.scales(np.array([series])))
    own = center * std + mean
    np.testing.assert_allclose(found, own, rtol=1e-5, atol=1e-5)


def test_every_role_matters(whole_forecasts):
    """Changed one by one, every input changes the forecast: none is dropped on the way."""
    plain = output(infer(whole_forecasts, {"inputs": everything_request(0, 70)}))
    for place in range(6):
        inputs = everything_request(0, 70)
        data = inputs[place]["data"]
        other = {"sun": "fog", "work": "rest", "rest": "work", "n": "s"}
        data[-1] = other[data[-1]] if inputs[place]["datatype"] == "BYTES" else data[-1] + 3
        assert np.abs(output(infer(whole_forecasts, {"inputs": inputs})) - plain).max() > 1e-6


def test_binary_tensors_are_refused_in_words(forecasts):
    headers = {"inference-header-content-length": "10"}
    assert "send JSON (tritonclient: binary_data=False)" in refusal(
        forecasts.client.post(PAST, content=b"{}", headers=headers)
    )
    named = {"outputs": [{"name": "forecast", "parameters": {"binary_data": False}}]}
    assert infer(forecasts, {**past(), **named}).status_code == 200
    assert infer(forecasts, past(parameters={"binary_data_size": 3})).status_code == 400


def past(**changes: Any) -> dict[str, Any]:
    """A request with one good window, its tensor changed."""
    good = {"name": "past", "shape": [1, L, 2], "datatype": "FP32", "data": [0.5] * (2 * L)}
    return {"inputs": [{**good, **changes}]}


def with_value(place: int, value: Any) -> dict[str, Any]:
    data: list[Any] = [0.5] * (2 * L)
    data[place] = value
    return past(data=data)


def asked(**parameters: Any) -> dict[str, Any]:
    return {**past(), "parameters": parameters}


def to_answer(*outputs: Any) -> dict[str, Any]:
    return {**past(), "outputs": list(outputs)}


ROW = [0.5, 0.5]
TWO = past(shape=[2, L, 2], data=[0.5] * (4 * L))
BAD: list[tuple[Any, str]] = [
    ([1], "the request: expected `object`, got `array`"),
    ({}, "the request: object missing required field `inputs`"),
    ({"inputs": None}, "inputs: expected `array`, got `null`"),
    ({"inputs": []}, "the input 'past' is missing; this model takes past, series_names"),
    ({"inputs": [7]}, "inputs[0]: expected `object`, got `int`"),
    ({"inputs": past()["inputs"] * 2}, "'past' comes twice"),
    ({**past(), "input": []}, "unknown field 'input' (did you mean 'inputs'?)"),
    ({**past(), "parameters": {"shape": 1}}, "unknown field 'shape' of parameters; leave it out"),
    (past(name="pas"), "inputs[0].name: invalid value 'pas'; expected past FP32"),
    (past(name=None), "inputs[0].name: expected `str`"),
    (past(extra=1), "unknown field 'extra' of inputs[0]"),
    (past(datatype="FP64"), "inputs[0].datatype: invalid enum value 'FP64'"),
    (past(datatype=None), "inputs[0].datatype: expected `str`"),
    (past(shape=None), "inputs[0].shape: expected `array`"),
    (past(shape=[L, 2]), "inputs[0].shape: expected `array` of length 3"),
    (past(shape=[1, L, 3]), "shape[2]: invalid enum value 3; expected past FP32 [-1, -1, 2], "),
    (past(shape=[1, L, -2]), "inputs[0].shape[2]: invalid enum value -2"),
    (past(shape=[-1, L, 2]), "inputs[0].shape[0]: expected `int` >= 0"),
    (past(shape=[1, True, 2]), "inputs[0].shape[1]: expected `int`, got `bool`"),
    (past(shape=[1, 2.5, 2]), "inputs[0].shape[1]: expected `int`, got `float`"),
    (past(shape=[10**30, L, 2]), "inputs[0].shape[0]: expected `int` <= 2147483647"),
    (past(shape=[2**31 - 1, 2**31 - 1, 2]), "has 48 elements, its shape"),
    (past(shape=[2, L, 2]), "has 48 elements, its shape [2, 24, 2] says 96"),
    (past(shape=[0, L, 2], data=[]), "'past' has no windows"),
    (past(shape=[0, 2**31 - 1, 2], data=[]), "'past' has no windows"),
    (past(shape=[1, 3, 2], data=[[ROW] * 3]), "'past' has 3 rows, the model reads 24"),
    (past(data=[[ROW] * (L - 1) + [[0.5]]]), "with a list of 1 at axis 2"),
    (past(data=[[ROW] * (L - 1) + [0.5]]), "data[0][23]: expected `array`, got `float`"),
    (past(data=[ROW] * L), "data[0][0]: expected `array`, got `float`"),
    (past(data=[[[[0.5]] * 2] * L]), "data[0][0][0]: expected `float | null`, got `array`"),
    (past(data=None), "data: expected `array`, got `null`"),
    (past(data="AAAA"), "data: expected `array`, got `str`"),
    (with_value(5, "1"), "input 'past' data[5]: expected `float | null`, got `str`"),
    (with_value(5, True), "data[5]: expected `float | null`, got `bool`"),
    (with_value(5, None), "missing value (null) at [0, 2, 1]"),
    (with_value(5, 1e39), "beyond the range of float32 at [0, 2, 1]"),
    (with_value(5, 10**400), "data[5]: number out of range"),
    (past(parameters=[]), "inputs[0].parameters: expected `object | null`, got `array`"),
    ({**past(), "parameters": 3}, "parameters: expected `object | null`, got `int`"),
    (past(parameters={"shared_memory_region": "x"}), "'shared_memory_region' of inputs[0].param"),
    (to_answer({"name": "forecast", "parameters": {"binary_dat": True}}),
     "unknown field 'binary_dat' of outputs[0].parameters (did you mean 'binary_data'?)"),
    ({**past(), "id": 7}, "id: expected `str | null`, got `int`"),
    (asked(timeout=1), "unknown field 'timeout' of parameters"),
    (asked(binary_data_output=1), "expected `bool | null`, got `int`"),
    (asked(binary_data_output=True), "data_output: binary tensors are not supported; send JSON"),
    (asked(quantiles=[]), "parameters.quantiles: expected `array` of length >= 1"),
    (asked(quantiles=[0.5] * 200), "parameters.quantiles: expected `array` of length <= 199"),
    (asked(quantiles=[0.001]), "parameters.quantiles[0]: expected `float` >= 0.005"),
    (asked(quantiles=[True]), "parameters.quantiles[0]: expected `float`, got `bool`"),
    (asked(quantile=[0.5]), "unknown field 'quantile' of parameters (did you mean 'quantiles'?)"),
    (asked(sequence_id=1 << 64), "sequence_id: expected `int` <= 18446744073709551615"),
    (asked(sequence_id=True), "sequence_id: expected `int | str | null`, got `bool`"),
    (asked(sequence_id="x" * 257), "parameters.sequence_id: expected `str` of length <= 256"),
    (asked(sequence_start=True), "go with a sequence_id other than 0"),
    (asked(sequence_id=0, sequence_end=True), "go with a sequence_id other than 0"),
    (asked(sequence_id="", sequence_end=True), "go with a sequence_id other than 0"),
    ({**TWO, "parameters": {"sequence_id": "a"}}, "'past' has 2 windows, a sequence has one"),
    ({**past(), "outputs": "forecast"}, "outputs: expected `array | null`, got `str`"),
    (to_answer({"name": "mean"}), "outputs[0].name: invalid enum value 'mean'"),
    (to_answer({"name": "forecast", "parameters": {"binary_data": True}}),
     "binary_data: binary tensors are not supported; send JSON"),
    (to_answer({"name": "quantiles"}), "needs the parameter quantiles"),
    (to_answer(*[{"name": "forecast"}] * 2), "output 'forecast' appears twice; name it once"),
    (to_answer({"name": "forecast", "shape": []}), "unknown field 'shape' of outputs[0]"),
]  # fmt: skip


@pytest.mark.parametrize(("request_", "why"), BAD, ids=[why[:40] for _, why in BAD])
def test_wrong_fields_are_named(forecasts, request_, why):
    answer = infer(forecasts, request_)
    assert answer.status_code == 400, answer.text
    assert set(answer.json()) == {"error"}
    assert why in answer.json()["error"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"inputs": "\xff"}', "inputs: expected `array`, got `str`"),
        (b'{"id": "\xff"}', "can't decode byte 0xff"),
        (b"[" * 100_000, "expected `object`, got `array`"),
        (b'{"id": ' + b"[" * 100 + b"]" * 100 + b"}", "id: expected `str | null`, got `array`"),
        (
            json.dumps(past(data=[])).replace("[]", "[" * 100_000 + "]" * 100_000).encode(),
            "the JSON is nested too deep",
        ),
        (b'{"id": ' + b"9" * 5000 + b"}", "id: "),
        (json.dumps(with_value(5, float("nan"))).encode(), "not valid JSON: invalid character"),
        (json.dumps(with_value(5, float("inf"))).encode(), "not valid JSON: invalid character"),
        (json.dumps(past()).replace("0.5", "1e999").encode(), "number out of range"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value,
)
def test_invalid_json_is_refused(forecasts, text, why):
    kind = {"content-type": "application/json"}
    assert why in refusal(forecasts.client.post(PAST, content=text, headers=kind))


@pytest.mark.parametrize(
    ("place", "change", "why"),
    [
        (1, "xyz", "column 'sky' knows no 'xyz'; training has seen 3 names in it"),
        (1, "fogg", "knows no 'fogg' (did you mean 'fog'?)"),
        (1, 3, "input 'past_names' data[0]: expected `str | null`, got `int`"),
        (1, "\ud800", "not valid JSON"),
        (3, "Work", "column 'kind' knows no 'Work'"),
        (5, "", "column 'place' knows no ''"),
    ],
)
def test_names_that_are_unknown(whole_forecasts, place, change, why):
    inputs = everything_request(0, 70)
    inputs[place]["data"][0] = change
    kind = {"content-type": "application/json"}
    assert why in refusal(
        whole_forecasts.client.post(PAST, content=json.dumps({"inputs": inputs}), headers=kind)
    )


@pytest.mark.parametrize(
    ("without", "why"),
    [
        ({0}, "the input 'past' is missing, 'past' and 'past_names' go together"),
        ({1}, "the input 'past_names' is missing"),
        ({2, 3}, "the inputs 'future' and 'future_names' are missing: price, kind ahead"),
        ({4, 5}, "the inputs 'static' and 'static_names' are missing: size, place"),
        ({0, 1}, "the input 'past' is missing"),
    ],
)
def test_inputs_that_are_missing(whole_forecasts, without, why):
    inputs = [one for k, one in enumerate(everything_request(0, 70)) if k not in without]
    assert why in refusal(infer(whole_forecasts, {"inputs": inputs}))


def test_inputs_that_do_not_fit_each_other(whole_forecasts):
    inputs = everything_request(0, 70)
    inputs[0]["data"][::3] = [None] * L
    assert "window 0 of 'past' has no value of 'y'" in refusal(
        infer(whole_forecasts, {"inputs": inputs})
    )
    inputs = everything_request(0, 70)
    for place, why in ((0, "all axes but the last must agree"), (2, "all axes but the last")):
        changed = [dict(one) for one in inputs]
        changed[place]["shape"] = [2, *inputs[place]["shape"][1:]]
        changed[place]["data"] = inputs[place]["data"] * 2
        assert why in refusal(infer(whole_forecasts, {"inputs": changed}))
    for place in (2, 3):
        inputs[place]["shape"][0] = 2
        inputs[place]["data"] *= 2
    answer = infer(whole_forecasts, {"inputs": inputs})
    assert answer.json()["error"] == "'future' has 2 windows, 'past' has 1; send as many"


def test_errors_have_the_protocols_shape(serve, plain_model):
    server = serve(model=plain_model, keys=("k",), max_body=2000)
    client, good = server.client, json.dumps(past())
    kind = {"content-type": "application/json"}
    assert client.post(PAST, json=past()).status_code == 401
    assert client.get("/v2/health/ready").json() == {"ready": True}
    client.headers["authorization"] = "Bearer k"
    cases = [
        (404, client.get("/v2/nope")),
        (404, client.get("/v2/models/other")),
        (404, client.get("/v2/models/waves/versions/2")),
        (404, client.post("/v2/models/waves/versions/x/infer", json=past())),
        (405, client.get(PAST)),
        (413, client.post(PAST, content=good + " " * 2000, headers=kind)),
        (415, client.post(PAST, content=good)),
        (415, client.post(PAST, content=good, headers={**kind, "content-encoding": "gzip"})),
        (401, client.post(PAST, json=past(), headers={"authorization": "x"})),
    ]
    for status, answer in cases:
        assert answer.status_code == status, answer.text
        assert set(answer.json()) == {"error"}
        assert isinstance(answer.json()["error"], str)
        assert ".py" not in answer.text
    assert client.post(PAST, json=past()).status_code == 200


def test_each_protocol_answers_only_for_its_kind_of_model(forecasts, server):
    for path in ("/v1/models", "/v1/models/waves"):
        answer = forecasts.client.get(path)
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "not_a_text_model"
        assert "/v2/models/waves/infer" in answer.json()["error"]["message"]
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert forecasts.client.post(path, json={"prompt": "a"}).status_code == 404
    for path in ("/v2/models/tiny", "/v2/models/tiny/ready"):
        assert "/v1/completions" in refusal(server.client.get(path), 404)
    assert server.client.post("/v2/models/tiny/infer", json=past()).status_code == 404
    assert server.client.get("/v2/health/ready").json() == {"ready": True}
    assert server.client.get("/v2").status_code == 200


def test_more_windows_than_a_batch_takes(serve, plain_model):
    server = serve(model=plain_model, max_streams=2, max_queue=10)
    assert infer(server, body(np.zeros((2, L, 2)))).status_code == 200
    assert "3 windows, this server forecasts at" in refusal(
        infer(server, body(np.zeros((3, L, 2))))
    )
    assert server.scheduler.num_held == 0


def test_log_and_metrics(serve, plain_model, capfd):
    server = serve(model=plain_model, log=True)
    assert infer(server, body(last_windows())).status_code == 200
    assert infer(server, {}).status_code == 400
    assert server.metric("windows_total") == 3
    assert server.metric("batch_windows_count") == 1
    assert server.metric("batch_windows_sum") == 3
    assert server.metric("slots") == SETTINGS.max_streams
    assert server.metric("streams_active") == 0
    server.end()  # the line of a request is written when its answer is out
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [(line["status"], line["windows"]) for line in lines[:2]] == [(200, 3), (400, 0)]
