"""`fastlstm serve` of a saved forecaster: start, signals, end, what cannot be served."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from fastlstm import Forecaster
from fastlstm.runs.run_directory import kind_of_run
from forecast_server import PAST, body, h, output, past_of, wait_until, waves
from served_process import Process, processes_of

HELD = """
import sys, time
from pathlib import Path
from fastlstm.cli.main import main
from fastlstm.forecast.window_forecaster import WindowForecaster
run, gate = WindowForecaster.run, Path(sys.argv.pop())
def held(*given):
    while not gate.exists():
        time.sleep(0.002)
    return run(*given)
WindowForecaster.run = held
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def start(plain_path: Path) -> Iterator[Any]:
    yield from processes_of(plain_path)


def window(series: int = 0) -> Any:
    return past_of(waves(), series, 120, ("y", "temp"))[None]


def test_a_saved_forecaster_is_served(start: Any, plain: Forecaster) -> None:
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


def test_a_signal_lets_requests_end_and_refuses_new_ones(
    start: Any, plain: Forecaster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    server = start("--grace", "60", str(gate), code=HELD)
    with ThreadPoolExecutor(8) as pool:
        asked = [
            pool.submit(httpx.post, f"{server.url}{PAST}", json=body(window(k)), timeout=60)
            for k in range(3)
        ]

        def held() -> float:
            text = httpx.get(f"{server.url}/metrics").text
            names = ("fastlstm_streams_active ", "fastlstm_queue_depth ")
            lines = [line.split() for line in text.splitlines() if line.startswith(names)]
            return sum(float(value) for _, value in lines)

        # A request that a batch takes may be counted in both for a moment, so twice.
        wait_until(lambda: held() == 3 and not time.sleep(0.1) and held() == 3)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{server.url}/v2/health/ready").status_code == 503)
        refused = httpx.post(f"{server.url}{PAST}", json=body(window()))
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert "shutting down" in refused.json()["error"]
        gate.touch()
        own = plain.predict()["y"].to_numpy().reshape(3, h)
        for k, answer in enumerate(asked):
            np.testing.assert_allclose(
                output(answer.result())[0, :, 0], own[k], rtol=1e-5, atol=1e-5
            )
    assert server.end(0) == 0


def test_a_forecaster_is_told_from_a_text(plain_path: Path, tmp_path: Path) -> None:
    assert kind_of_run(plain_path) == "forecaster"
    assert kind_of_run(tmp_path) != "forecaster"
    assert kind_of_run(tmp_path / "nothing") != "forecaster"
    for text in ("[1]", "{}", "{", '{"kind": "text"}'):
        (tmp_path / "config.json").write_text(text)
        assert kind_of_run(tmp_path) != "forecaster"


def test_what_is_damaged_is_one_line(plain: Forecaster, tmp_path: Path) -> None:
    plain.save(tmp_path / "waves")
    weights = tmp_path / "waves" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    server = Process(tmp_path / "waves")
    assert server.end(0) != 0
    assert len(server.lines) == 1
    assert "model.safetensors" in server.lines[0]
