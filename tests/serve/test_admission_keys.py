"""Several API keys share places and cannot touch each other's sequences and prompts."""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from fastlstm.serve.admission import Reservation
from fastlstm.serve.forecast import engine as forecast_engine
from fastlstm.serve.text import completions, engine
from fastlstm.serve.text.generation import GenerationRequest
from fastlstm.serve.text.scheduler import Scheduler
from fastlstm.text.sampling import Sampling
from forecast_server import PAST, at, body, output, rows
from running_server import SETTINGS, FaultyDecoder, Gate, raw_request, wait_until

KEYS = ("ann-key", "bob-key")
LONG = "the cat sat on the mat and " * 40
ANN, BOB = ({"authorization": f"Bearer {key}"} for key in KEYS)


@pytest.mark.parametrize("is_text", [True, False])
def test_a_request_with_a_late_body_keeps_its_place(serve, plain_model, is_text):
    limits: dict[str, Any] = {"keys": KEYS, "max_streams": 4, "max_queue": 4}
    server = serve(**limits) if is_text else serve(model=plain_model, **limits)
    path = "/v1/completions" if is_text else PAST
    request = {"prompt": "a", "max_tokens": 1} if is_text else body(rows(0, 24))
    content = json.dumps(request).encode()
    clients = []
    for number, key in enumerate((*[KEYS[0]] * 4, *[KEYS[1]] * 2), 1):
        client = socket.create_connection(server.address, 10)
        client.sendall(raw_request(path, content, key).removesuffix(content))
        clients.append(client)
        wait_until(lambda number=number: server.scheduler.num_held == number)  # type: ignore[misc]
    for client in clients:
        client.sendall(content)
    assert [client.recv(12) for client in clients] == [b"HTTP/1.1 200"] * 6
    for client in clients:
        client.close()


def sequence(server, who, values, **parameters):
    request = body(values, **{"sequence_id": "a", **parameters})
    return server.client.post(PAST, json=request, headers=who)


def test_a_sequence_belongs_to_its_api_key(serve, plain_model):
    server = serve(model=plain_model, keys=KEYS)
    server.client.headers.update(ANN)
    assert sequence(server, ANN, rows(0, 40), sequence_start=True).status_code == 200
    for parameters in ({}, {"sequence_end": True}):
        refused = sequence(server, BOB, rows(0, 24), **parameters)
        assert refused.status_code == 404
    # One of the same name is another one, and its end ends nothing else.
    theirs = sequence(server, BOB, rows(50, 90), sequence_start=True, sequence_end=True)
    assert output(theirs) == pytest.approx(at(server, 90), rel=1e-4)
    found = output(sequence(server, ANN, rows(40, 41)))
    assert found == pytest.approx(at(server, 41), rel=1e-4)


def test_one_key_cannot_fill_the_sequences(serve, plain_model):
    server = serve(model=plain_model, keys=KEYS, max_sequences=8)
    started = [
        sequence(server, ANN, rows(0, 24), sequence_id=k, sequence_start=True) for k in range(1, 7)
    ]
    assert [answer.status_code for answer in started] == [200] * 4 + [503] * 2
    assert "this API key has 4 sequences, the limit now" in started[-1].json()["error"]
    assert sequence(server, BOB, rows(0, 24), sequence_start=True).status_code == 200
    assert sequence(server, ANN, rows(24, 25), sequence_id=1, sequence_end=True).status_code == 200
    again = sequence(server, ANN, rows(0, 24), sequence_id=9, sequence_start=True)
    assert again.status_code == 503, "as many as it holds must stay free"


def test_windows_of_one_key_leave_room(serve, held):
    server = serve(model=held, keys=KEYS, max_streams=4, max_queue=4)
    held.holds.set()
    answers: list[int] = []

    def send(who):
        with httpx.Client(base_url=server.url, timeout=20, headers=who) as client:
            answers.append(client.post(PAST, json=body(rows(0, 24))).status_code)

    senders = [threading.Thread(target=send, args=(ANN,)) for _ in range(8)]
    for sender in senders:
        sender.start()
    wait_until(lambda: len(answers) == 4)  # those above half are refused while no pass ends
    assert answers == [503] * 4
    bob = threading.Thread(target=send, args=(BOB,))
    bob.start()
    wait_until(lambda: server.scheduler.num_held == 5)
    held.holds.clear()
    for sender in (*senders, bob):
        sender.join(20)
    assert sorted(answers) == [200] * 5 + [503] * 4


def test_a_cached_prompt_is_known_only_to_its_key(serve):
    server = serve(keys=KEYS)

    def ask(who):
        """Tokens of the prompt that need not be read."""
        server.client.headers.update(who)
        before = server.metric("tokens_known_total")
        server.text(prompt=LONG, max_tokens=1)
        return server.metric("tokens_known_total") - before

    assert [ask(who) for who in (ANN, BOB, BOB, ANN)] == [0, 0, len(LONG), len(LONG)]


def test_texts_of_one_key_leave_slots_and_places(serve):
    server = serve(keys=KEYS, max_streams=4, max_queue=4, max_tokens=10**9)
    with httpx.Client(base_url=server.url, timeout=20, headers=ANN) as ann:
        streams = []
        try:
            for _ in range(4):
                asked = {"prompt": "a", "max_tokens": 10**9, "stream": True}
                request = ann.build_request("POST", "/v1/completions", json=asked)
                sender = threading.Thread(
                    target=lambda r=request: streams.append(ann.send(r, stream=True))
                )
                sender.start()
            wait_until(lambda: server.scheduler.num_held == 4)
            refused = ann.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 429
            assert "this API key has all the places it may have now" in refused.text
            many = ann.post("/v1/completions", json={"prompt": "a", "n": 3})
            assert many.status_code == 429
            wait_until(lambda: server.scheduler.num_active == 2)
            server.client.headers.update(BOB)
            assert len(server.text(prompt="b", max_tokens=50)) == 50
            assert server.post(prompt="a", n=3).status_code == 400
        finally:
            wait_until(lambda: len(streams) >= 2)
            for stream in streams:
                stream.close()
            server.end()


@pytest.fixture
def shared(lm):
    """Four slots and twelve more places that keys share, and the chunks so far."""
    chunks: list[Any] = []
    settings = replace(SETTINGS, max_streams=4, max_queue=12)
    model = replace(lm, decoder=FaultyDecoder(lm.decoder))
    scheduler = Scheduler(
        model, settings, 1, lambda step: chunks.extend(step.chunks), is_shared=True
    )
    yield scheduler, chunks
    scheduler.stop()


ENDLESS = GenerationRequest(Reservation(), 0, [1], [0], None, (Sampling(seed=1),), (), 10**9)  # type: ignore[arg-type]


def ask(scheduler, tenant, request=ENDLESS):
    """Submits a generation; returns what stands for its channel."""
    channel: Any = Reservation(tenant)
    scheduler.reserve(channel, len(request.samplings))
    scheduler.submit(replace(request, channel=channel))
    return channel


def test_waiting_texts_of_one_key_hold_up_no_other(shared):
    scheduler, chunks = shared
    channels = [ask(scheduler, b"ann") for _ in range(6)]
    wait_until(lambda: scheduler.num_active == 2)
    bob = ask(scheduler, b"bob", replace(ENDLESS, max_tokens=5))
    wait_until(lambda: any(one is bob and chunk.is_last for one, chunk in chunks))
    assert scheduler.num_active == 2
    for channel in channels:
        scheduler.release(channel)
    wait_until(lambda: scheduler.num_held == 0)


def test_a_waiting_request_of_a_key_with_its_full_share_blocks_no_other_key(shared):
    scheduler, chunks = shared
    many = replace(ENDLESS, samplings=(Sampling(seed=1), Sampling(seed=2)))
    ask(scheduler, b"ann", many)
    ask(scheduler, b"bob")
    ask(scheduler, b"ann", many)  # one slot is free: it fits in neither that nor ann's share
    wait_until(lambda: scheduler.num_active == 3)
    cat = ask(scheduler, b"cat", replace(ENDLESS, max_tokens=5))
    wait_until(lambda: any(channel is cat and chunk.is_last for channel, chunk in chunks))
    assert scheduler.num_active == 3


def test_a_small_request_does_not_overtake_a_large_one_of_its_key(shared):
    scheduler, chunks = shared

    def has_ended(channel):
        return any(one is channel and chunk.is_last for one, chunk in list(chunks))

    first = ask(scheduler, b"ann")
    wait_until(lambda: scheduler.num_active == 1)
    samplings = (Sampling(seed=1), Sampling(seed=2))
    large = ask(scheduler, b"ann", replace(ENDLESS, max_tokens=5, samplings=samplings))
    small = ask(scheduler, b"ann", replace(ENDLESS, max_tokens=5))
    other = ask(scheduler, b"cat", replace(ENDLESS, max_tokens=5))
    wait_until(lambda: has_ended(other))  # it came last, and what could begin has started
    assert not any(channel in (large, small) for channel, _ in list(chunks))
    scheduler.release(first)
    wait_until(lambda: has_ended(large) and has_ended(small))


def test_one_key_leaves_room_for_scores(serve, pool, monkeypatch):
    server = serve(keys=KEYS, max_scored=1000)
    gate = Gate(monkeypatch, completions, "choices_of")
    monkeypatch.setattr(engine, "_FEW_TOKENS", -1)  # not held up on the event loop

    def scored(count, who):
        asked = {"prompt": "a", "max_tokens": count, "logprobs": 0}
        return httpx.post(f"{server.url}/v1/completions", json=asked, headers=who, timeout=60)

    refused = scored(501, ANN)
    assert refused.status_code == 400
    assert "a request may have at most 500" in refused.text
    answers = [pool.submit(scored, 400, ANN)]
    assert gate.entered.wait(20)
    refused = scored(200, ANN)
    assert refused.status_code == 429
    assert "this API key has all the places" in refused.text
    answers.append(pool.submit(scored, 400, BOB))
    wait_until(lambda: server.scheduler.num_held == 2)
    gate.opens.set()
    assert [answer.result().status_code for answer in answers] == [200, 200]
    assert scored(500, ANN).status_code == 200


def test_parsing_for_one_key_blocks_no_other_key(serve, pool, monkeypatch, plain_model):
    go, parse = threading.Event(), forecast_engine.parse_request

    def slow(data, *more):
        assert len(data) <= 1 << 16 or go.wait(20)
        return parse(data, *more)

    monkeypatch.setattr(forecast_engine, "parse_request", slow)
    server = serve(model=plain_model, keys=KEYS)
    reading = server.runner.service.forecast_engine._num_reading
    request = body(np.tile(rows(0, 120), (1, 40, 1)))
    long = pool.submit(httpx.post, f"{server.url}{PAST}", json=request, headers=ANN, timeout=60)
    wait_until(lambda: reading.total() == 1)
    server.client.headers.update(BOB)
    assert output(server.client.post(PAST, json=body(rows(0, 24)))) is not None
    assert reading.total() == 1
    go.set()
    assert long.result().status_code == 200
