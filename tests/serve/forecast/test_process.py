"""`fastlstm serve` of a saved forecaster as a process."""

import json

import httpx
import numpy as np

from fastlstm.runs.run_directory import kind_of_run
from forecast_server import PAST, body, h, output, past_of, waves
from served_process import Process


def window(series=0):
    return past_of(waves(), series, 120, ("y", "temp"))[None]


def test_a_saved_forecaster_is_served(start, plain):
    server = start("--api-key", "k")
    assert "Open Inference Protocol; reads 24 rows of 2 columns" in server.lines[-1]
    assert httpx.post(f"{server.url}{PAST}", json=body(window())).status_code == 401
    with httpx.Client(base_url=server.url, headers={"authorization": "Bearer k"}) as client:
        found = output(client.post(PAST, json=body(window())))
        assert client.get("/v2/models/waves").status_code == 200
        assert client.get("/openapi.json").status_code == 200
        assert "fastlstm_windows_total 1.0" in client.get("/metrics").text
    np.testing.assert_allclose(
        found[0, :, 0], plain.predict()["y"].to_numpy()[:h], rtol=1e-5, atol=1e-5
    )
    assert server.end() == 0
    lines = [json.loads(line) for line in server.lines if line.startswith("{")]
    assert [(line["status"], line["windows"]) for line in lines[:2]] == [(401, 0), (200, 1)]


def test_the_kind_of_a_run_is_read_from_its_config(plain_path, tmp_path):
    assert kind_of_run(plain_path) == "forecaster"
    assert kind_of_run(tmp_path) != "forecaster"
    assert kind_of_run(tmp_path / "nothing") != "forecaster"
    for text in ("[1]", "{}", "{", '{"kind": "text"}'):
        (tmp_path / "config.json").write_text(text)
        assert kind_of_run(tmp_path) != "forecaster"


def test_the_error_of_a_damaged_forecaster_is_one_line(plain, tmp_path):
    plain.save(tmp_path / "waves")
    weights = tmp_path / "waves" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    server = Process(tmp_path / "waves")
    assert server.end(0) != 0
    assert len(server.lines) == 1
    assert "model.safetensors" in server.lines[0]
