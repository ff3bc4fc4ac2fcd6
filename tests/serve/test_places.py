"""Several keys: none takes all places, and none touches or learns what is another's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from fastlstm.infer.sampling import Sampling
from fastlstm.serve.places import Places
from fastlstm.serve.row import Job
from fastlstm.serve.scheduler import Scheduler
from forecast_server import PAST, HeldModel, L, body, output, wait_until, waves
from running_server import FaultyDecoder, Running

KEYS = ("ann-key", "bob-key")
LONG = "the cat sat on the mat and " * 40
ANN, BOB = ({"authorization": f"Bearer {key}"} for key in KEYS)


def rows(first: int, last: int) -> Any:
    """Rows of the first series, shape (1, n, 2)."""
    columns = [waves()[name].to_numpy()[first:last] for name in ("y", "temp")]
    return np.stack(columns, -1)[None]


def at(server: Running, last: int) -> Any:
    """The forecast from the whole window that ends before a row."""
    return output(server.client.post(PAST, json=body(rows(last - L, last))))


def filled(places: Places, tenant: bytes) -> int:
    """How many places a key gets, one at a time."""
    count = 0
    while places.has_room(tenant, 1):
        places.take(tenant, 1)
        count += 1
    return count


def test_one_tenant_takes_everything_that_several_share() -> None:
    assert filled(Places(12), b"") == 12
    places = Places(12, is_shared=True)
    assert [filled(places, tenant) for tenant in (b"a", b"b", b"c")] == [6, 3, 1]
    assert places.num_taken == 10
    places.give_back(b"a", 5)
    assert filled(places, b"c") == 3, "who held more than the others makes room"
    assert filled(Places(1, is_shared=True), b"a") == 1
    assert not places.is_full
    assert filled(Places(0, is_shared=True), b"a") == 0


def test_a_request_takes_at_most_half_of_what_is_shared() -> None:
    places = Places(8, is_shared=True)
    assert places.has_room(b"a", 4)
    assert not places.has_room(b"a", 5)


def sequence(
    server: Running, who: dict[str, str], values: Any, **parameters: Any
) -> httpx.Response:
    request = body(values, **{"sequence_id": "a", **parameters})
    return server.client.post(PAST, json=request, headers=who)


def test_a_sequence_is_its_keys(serve: Callable[..., Running], plain_model: Any) -> None:
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


def test_one_key_cannot_fill_the_sequences(serve: Callable[..., Running], plain_model: Any) -> None:
    server = serve(model=plain_model, keys=KEYS, max_sequences=8)
    begun = [
        sequence(server, ANN, rows(0, 24), sequence_id=k, sequence_start=True) for k in range(1, 7)
    ]
    assert [answer.status_code for answer in begun] == [200] * 4 + [503] * 2
    assert "this API key has 4 sequences, which is all it may now" in begun[-1].json()["error"]
    assert sequence(server, BOB, rows(0, 24), sequence_start=True).status_code == 200
    assert sequence(server, ANN, rows(24, 25), sequence_id=1, sequence_end=True).status_code == 200
    again = sequence(server, ANN, rows(0, 24), sequence_id=9, sequence_start=True)
    assert again.status_code == 503, "as many as it holds must stay free"


def test_windows_of_one_key_leave_room(serve: Callable[..., Running], held: HeldModel) -> None:
    server = serve(model=held, keys=KEYS, max_streams=4, max_queue=4)
    held.holds.set()
    answers: list[int] = []

    def send(who: dict[str, str]) -> None:
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


def test_a_prompt_is_known_to_its_key_only(serve: Callable[..., Running]) -> None:
    server = serve(keys=KEYS)

    def ask(who: dict[str, str]) -> float:
        """Tokens of the prompt that need not be read."""
        server.client.headers.update(who)
        before = server.metric("tokens_known_total")
        server.text(prompt=LONG, max_tokens=1)
        return server.metric("tokens_known_total") - before

    assert [ask(who) for who in (ANN, BOB, BOB, ANN)] == [0, 0, len(LONG), len(LONG)]


def test_texts_of_one_key_leave_slots_and_places(serve: Callable[..., Running]) -> None:
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
            assert server.scheduler.num_active == 2
            server.client.headers.update(BOB)
            assert len(server.text(prompt="b", max_tokens=50)) == 50
            assert server.post(prompt="a", n=3).status_code == 400
        finally:
            wait_until(lambda: len(streams) >= 2)
            for stream in streams:
                stream.close()
            server.end()


def test_waiting_texts_of_one_key_hold_up_no_other(writer: Any) -> None:
    pieces: list[Any] = []
    decoder = FaultyDecoder(writer.decoder)
    scheduler = Scheduler(
        decoder,  # type: ignore[arg-type]
        writer.tokenizer,
        max_streams=4,
        max_queue=12,
        threads=1,
        deliver=lambda tick: pieces.extend(tick.pieces),
        is_shared=True,
    )
    try:
        endless = Job(0, [1], [0], None, (Sampling(seed=1),), (), 10**9)
        tickets = [scheduler.reserve(1, object(), b"ann") for _ in range(6)]  # type: ignore[arg-type]
        for ticket in tickets:
            scheduler.submit(ticket, [endless])
        wait_until(lambda: scheduler.num_active == 2)
        bob: Any = object()
        scheduler.submit(scheduler.reserve(1, bob, b"bob"), [replace(endless, max_tokens=5)])
        wait_until(lambda: any(channel is bob and piece.is_last for channel, piece in pieces))
        assert scheduler.num_active == 2
        for ticket in tickets:
            scheduler.release(ticket)
        wait_until(lambda: scheduler.num_held == 0)
    finally:
        scheduler.stop()
