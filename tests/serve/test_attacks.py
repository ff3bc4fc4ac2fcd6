"""Expensive requests are bounded, and others are answered meanwhile."""

from __future__ import annotations

import gc
import json
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from fastlstm import Forecaster
from fastlstm.forecast.window_forecaster import load_window_forecaster
from fastlstm.serve.forecast import engine as forecast_engine
from fastlstm.serve.forecast import inference
from fastlstm.serve.forecast.engine import ForecastEngine
from fastlstm.serve.http import transfer
from fastlstm.serve.http.errors import ApiError
from fastlstm.serve.settings import Settings
from fastlstm.serve.text import completions, engine
from forecast_server import PAST, QUICK, L, body, h, output, refusal, save, tensor, waves
from running_server import Gate, raw_request, wait_until

JSON = {"content-type": "application/json"}
RNG = np.random.default_rng(3)


def windows(count):
    return RNG.normal(size=(count, L, 2)).astype(np.float32)


def many_keys(count):
    return ("{" + ",".join(f'"{k:x}":0' for k in (*range(count), count - 1)) + "}").encode()


# Reading


@pytest.mark.parametrize("count", [100, 90_000])
def test_many_keys_are_refused_at_the_first_one(forecasts, count):
    assert "unknown field '0'" in refusal(
        forecasts.client.post(PAST, content=many_keys(count), headers=JSON)
    )


@pytest.mark.parametrize("item", ["{}", "[]"])
def test_many_objects_and_lists_are_refused_at_the_first_one(forecasts, item):
    content = b'{"inputs":[' + f"{item},".encode() * 100_000 + b"{}]}"
    answer = forecasts.client.post(PAST, content=content, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("inputs[0]: ")


def test_waiting_bodies_hold_places(serve, plain_model, pool, monkeypatch):
    server = serve(model=plain_model, max_streams=2, max_queue=2, watchdog=0.3)
    gate = Gate(monkeypatch, forecast_engine, "parse_request")
    large = json.dumps(body(windows(1))).encode().ljust(1 << 17)
    asked = [pool.submit(server.client.post, PAST, content=large, headers=JSON) for _ in range(4)]
    wait_until(lambda: server.scheduler.num_held == 4)
    assert "at its capacity" in refusal(server.client.post(PAST, content=large, headers=JSON), 503)
    assert server.metric("queue_depth") == 4
    # A reader that does not come on is no health.
    wait_until(lambda: server.client.get("/health/live").status_code == 503)
    for path in ("/health/ready", "/v2/health/ready"):
        ready = server.client.get(path)
        assert ready.status_code == 503
        assert "make no progress" in ready.text
    gate.opens.set()
    assert [one.result().status_code for one in asked] == [200] * 4
    wait_until(lambda: server.client.get("/health/live").status_code == 200)
    assert server.client.get("/health/ready").status_code == 200
    wait_until(lambda: server.scheduler.num_held == 0)


def test_the_body_of_a_disconnected_client_is_not_parsed(serve, plain_model, pool, monkeypatch):
    server = serve(model=plain_model)
    num_read: list[int] = []
    gate = Gate(monkeypatch, forecast_engine, "parse_request")
    held = forecast_engine.parse_request
    monkeypatch.setattr(
        forecast_engine, "parse_request", lambda *a: (num_read.append(1), held(*a))[1]
    )
    large = json.dumps(body(windows(1))).encode().ljust(1 << 17)
    first = pool.submit(server.client.post, PAST, content=large, headers=JSON)
    assert gate.entered.wait(20)
    data = raw_request(PAST, large)
    for _ in range(5):
        with socket.create_connection(server.address, 10) as client:
            client.sendall(data)
            wait_until(lambda: server.scheduler.num_held == 2)
        wait_until(lambda: server.scheduler.num_held == 1)
    gate.opens.set()
    assert first.result().status_code == 200
    assert len(num_read) == 1
    assert server.metric('outcomes_total{outcome="disconnected"}') == 5


@pytest.mark.parametrize("is_text", [True, False])
def test_a_request_takes_a_place_before_its_body_arrives(serve, plain_model, is_text):
    limits = {"max_streams": 1, "max_queue": 1}
    server = serve(**limits) if is_text else serve(model=plain_model, **limits)
    path = "/v1/completions" if is_text else PAST
    clients = [socket.create_connection(server.address, 10) for _ in range(2)]
    for number, client in enumerate(clients):
        client.sendall(raw_request(path, b"{" * 1000)[:-999])
        wait_until(lambda number=number: server.scheduler.num_held == number + 1)  # type: ignore[misc]
    assert server.client.post(path, json={}).status_code == (429 if is_text else 503)
    for client in clients:
        client.close()
    wait_until(lambda: server.scheduler.num_held == 0)


@pytest.mark.parametrize(
    ("module", "function", "length", "echo"),
    [(engine, "parse_completion", 50_000, False), (completions, "choices_of", 1000, True)],
    ids=["reader", "writer"],
)
def test_a_long_prompt_is_read_and_repeated_outside_the_event_loop(
    serve, pool, monkeypatch, module, function, length, echo
):
    server = serve(watchdog=0.3)
    gate = Gate(monkeypatch, module, function)
    asked = pool.submit(server.post, prompt="a" * length, echo=echo, max_tokens=1)
    assert gate.entered.wait(20)
    assert server.metric("queue_depth") == 1
    wait_until(lambda: server.client.get("/health/live").status_code == 503)
    gate.opens.set()
    assert asked.result().status_code == 200
    wait_until(lambda: server.client.get("/health/live").status_code == 200)


@pytest.mark.parametrize("is_text", [True, False])
def test_nothing_is_kept_of_a_request_that_ended(serve, plain_model, is_text):
    server = serve() if is_text else serve(model=plain_model)
    path = "/v1/completions" if is_text else PAST
    good = {"prompt": "a", "max_tokens": 1} if is_text else body(windows(1))
    for request in (good, {}):
        server.client.post(path, json=request)
    wait_until(lambda: server.scheduler.num_held == 0)
    wait_until(
        lambda: gc.collect() and not any(type(x) is transfer.Sender for x in gc.get_objects())
    )


@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize("length", [100, 100_000])
def test_nothing_is_kept_of_a_request_that_was_refused(serve, plain_model, is_text, length):
    server = serve() if is_text else serve(model=plain_model)
    path = "/v1/completions" if is_text else PAST
    content = b'{"prompt":"' + b"x" * length
    gc.disable()  # so much is made before it looks that many bodies would wait for it
    try:
        assert server.client.post(path, content=content, headers=JSON).status_code == 400
        wait_until(lambda: server.scheduler.num_held == 0)
        wait_until(lambda: not any(type(x) is ApiError for x in gc.get_objects()))
    finally:
        gc.enable()


READS_FOR_EVER = """
import sys, time
from fastlstm.cli.main import main
from fastlstm.serve.forecast import engine as forecast_engine
def read(*given):
    print("reads", file=sys.stderr, flush=True)
    while True:
        time.sleep(0.01)
forecast_engine.parse_request = read
sys.exit(main(sys.argv[1:]))
"""


def test_a_signal_ends_a_server_with_a_blocked_reader(start):
    server = start("--grace", "0.5", code=READS_FOR_EVER)
    with ThreadPoolExecutor(1) as pool:
        large = json.dumps(body(windows(1))).encode().ljust(1 << 17)
        asked = pool.submit(httpx.post, server.url + PAST, content=large, headers=JSON, timeout=60)
        assert server.process.stderr.readline() == "reads\n"
        server.process.send_signal(signal.SIGTERM)
        answer = asked.result()
        assert answer.status_code == 503
        assert "shutting down" in answer.text
        assert server.end(0) == 0


# Answers of forecasts


def test_the_numbers_of_an_answer_are_bounded(serve, plain_model):
    server = serve(model=plain_model, max_numbers=2 * h * 3)
    two = body(windows(2), quantiles=[0.25, 0.5])
    assert server.client.post(PAST, json=two).status_code == 200
    answer = server.client.post(PAST, json=body(windows(3), quantiles=[0.25, 0.5]))
    assert answer.status_code == 400
    said = f"would have {3 * h * 3:,} numbers (3 windows x {h:,} steps x 1 target x 3 values each)"
    assert said in answer.json()["error"]
    assert f"at most {2 * h * 3};" in answer.json()["error"]
    only = {**body(windows(3), quantiles=[0.25, 0.5]), "outputs": [{"name": "quantiles"}]}
    assert server.client.post(PAST, json=only).status_code == 200  # what is not asked for is free
    wait_until(lambda: server.scheduler.num_held == 0)
    assert Settings().max_numbers == 1 << 20


def test_every_target_counts_among_the_numbers_of_an_answer(serve, tmp_path):
    path = save(Forecaster(**QUICK, target=["y", "temp"]).fit(waves()), tmp_path)
    server = serve(model=load_window_forecaster(path), max_numbers=2 * h * 2)
    assert server.client.post(PAST, json=body(windows(2))).status_code == 200
    assert f"{3 * h * 2:,} numbers (3 windows x {h:,} steps x 2 targets" in refusal(
        server.client.post(PAST, json=body(windows(3)))
    )


def test_a_large_answer_is_encoded_in_slices_with_the_same_values(forecasts, monkeypatch):
    levels = [round(0.2 + 0.003 * k, 3) for k in range(199)]
    values = windows(20)
    parts: list[int] = []
    body_of = transfer.Sender.body

    async def noted(self, *given, is_last=False):
        parts.append(sum(map(len, given)))
        await body_of(self, *given, is_last=is_last)

    monkeypatch.setattr(transfer.Sender, "body", noted)
    answer = forecasts.client.post(PAST, json=body(values, quantiles=levels))
    assert answer.headers["transfer-encoding"] == "chunked"
    assert sum(parts) == len(answer.content)
    assert len(parts) >= 20 * h * 200 // 4096
    assert max(parts) < 25 * 4096
    one = forecasts.client.post(PAST, json=body(values[3:4], quantiles=levels[:3]))
    assert "content-length" in one.headers
    for name in ("forecast", "quantiles"):
        own = output(one, name)[0]
        found = output(answer, name)[3]
        np.testing.assert_allclose(found[..., :3] if name == "quantiles" else found, own, rtol=1e-5)


def test_others_are_answered_while_a_large_answer_is_made(serve, plain_model, pool, monkeypatch):
    server = serve(model=plain_model, watchdog=0.3)
    gate = Gate(monkeypatch, ForecastEngine, "_outputs")
    asked = pool.submit(server.client.post, PAST, json=body(windows(200), quantiles=[0.5]))
    assert gate.entered.wait(20)
    assert server.client.get("/v2/models/waves").status_code == 200
    wait_until(lambda: server.client.get("/health/live").status_code == 503)  # the writer counts
    gate.opens.set()
    assert asked.result().status_code == 200


def test_an_unread_answer_is_not_encoded_to_its_end(serve, plain_model, monkeypatch):
    server = serve(model=plain_model, stall=1.0)
    monkeypatch.setattr(inference, "_SLICE", 64)
    made: list[int] = []
    parts_of = inference.answer_parts

    def noted(*given):
        for part in parts_of(*given):
            made.append(1)
            yield part

    monkeypatch.setattr(inference, "answer_parts", noted)
    monkeypatch.setattr(transfer, "_SLICE", 1 << 10)
    levels = [round(0.2 + 0.003 * k, 3) for k in range(199)]
    content = json.dumps(
        {"inputs": [tensor("past", windows(250))], "parameters": {"quantiles": levels}}
    )
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(server.address)
        client.sendall(raw_request(PAST, content.encode()))
        wait_until(lambda: len(made) > 10)
        wait_until(lambda: server.metric('outcomes_total{outcome="stalled"}') == 1)
    wait_until(lambda: server.scheduler.num_held == 0)
    assert len(made) < 250 * h * 200 // 64 * 0.9


# Echo and scores


def text_request(n, length, **more):
    prompt = ("the cat " * length)[:length]
    return {"prompt": prompt, "n": n, "echo": True, "seed": 5, "max_tokens": 3, **more}


@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("streams", [False, True])
def test_choices_share_a_prompt_and_each_repeats_it(server, logprobs, streams):
    alone = [
        server.post(**text_request(1, 700, logprobs=logprobs, seed=5 + k)).json()["choices"][0]
        for k in range(3)
    ]
    request = text_request(3, 700, logprobs=logprobs, stream=streams)
    if not streams:
        found = server.post(**request).json()["choices"]
    else:
        found = [{"text": "", "logprobs": None, "index": k} for k in range(3)]
        with server.client.stream("POST", "/v1/completions", json=request) as answer:
            for line in answer.iter_lines():
                if line and "[DONE]" not in line:
                    grow(found, json.loads(line.removeprefix("data: "))["choices"][0])
    for k, choice in enumerate(found):
        assert choice["text"] == alone[k]["text"]
        assert choice["logprobs"] == alone[k]["logprobs"]
    if logprobs is not None:
        assert len(found[2]["logprobs"]["tokens"]) == 703


def grow(found, chunk):
    whole = found[chunk["index"]]
    whole["text"] += chunk["text"]
    if chunk["logprobs"] is None or whole["logprobs"] is None:
        whole["logprobs"] = chunk["logprobs"]
        return
    for name, values in chunk["logprobs"].items():
        if values is not None:
            whole["logprobs"][name] += values


def test_a_prompt_is_scored_once_for_all_choices(server, monkeypatch):
    num_scored: list[int] = []
    add = completions.Logprobs.add

    def counted(self, scores, base):
        num_scored.append(len(scores))
        add(self, scores, base)

    monkeypatch.setattr(completions.Logprobs, "add", counted)
    assert server.post(**text_request(8, 2000, logprobs=1)).status_code == 200
    assert sum(num_scored) == 2000 + 8 * 3


def test_repeated_and_scored_tokens_are_bounded(serve, pool, monkeypatch):
    server = serve(max_scored=1000)
    assert server.post(**text_request(4, 250)).status_code == 200
    refused = server.post(**text_request(5, 250))
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert "would repeat or score 1,250 tokens" in error["message"]
    assert "at most 1,000;" in error["message"]
    assert error["param"] == "n"
    scored = {"prompt": "a", "max_tokens": 600, "logprobs": 0}
    assert server.post(**scored, n=2).status_code == 400
    assert server.post(**{**scored, "prompt": ["a", "b"]}).status_code == 400
    assert server.post(**scored, n=2, stream=True).status_code == 200  # nothing is held for it
    gate = Gate(monkeypatch, completions, "choices_of")
    monkeypatch.setattr(engine, "_FEW_TOKENS", -1)
    first = pool.submit(server.post, **scored)
    assert gate.entered.wait(20)
    assert server.post(**scored).status_code == 429  # together they are too many
    gate.opens.set()
    assert first.result().status_code == 200
    assert server.post(**scored).status_code == 200


def test_a_body_is_sent_in_slices(server, monkeypatch):
    monkeypatch.setattr(transfer, "_SLICE", 100)
    parts = [b"a" * 250, bytearray(b"b" * 30), b"", b"c" * 500]
    found = list(transfer._slices(parts))
    assert b"".join(data for data, _ in found) == b"".join(parts)
    assert [is_end for _, is_end in found] == [False] * (len(found) - 1) + [True]
    assert max(len(data) for data, _ in found) <= 200
    assert list(transfer._slices([])) == [(b"", True)]
    answer = server.post(**text_request(2, 500, logprobs=1))
    assert answer.json()["usage"]["completion_tokens"] == 6
    assert int(answer.headers["content-length"]) == len(answer.content)
