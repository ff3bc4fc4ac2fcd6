"""Sequences: clients send new rows only."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from fastlstm.serve.admission import Places
from fastlstm.serve.forecast import engine as forecast_engine
from fastlstm.serve.forecast.engine import SequenceStore
from fastlstm.serve.forecast.request import SequenceStep
from fastlstm.serve.http.errors import ApiError
from forecast_server import PAST, L, at, body, output, past_of, refusal, rows, submitted, tensor
from running_server import Running, wait_until


def send(server: Running, values: Any, name: Any = "a", **parameters: Any) -> httpx.Response:
    request = body(values, sequence_id=name, **parameters)
    return server.client.post(PAST, json=request)


def assert_at(answer: httpx.Response, server: Running, last: int) -> None:
    """The forecast is that of the window that ends before row `last`."""
    np.testing.assert_allclose(output(answer), at(server, last), rtol=1e-5, atol=1e-5)


def test_one_row_after_the_other(forecasts):
    name = "one-row"
    assert_at(send(forecasts, rows(0, 40), name, sequence_start=True), forecasts, 40)
    for last in range(41, 50):
        assert_at(send(forecasts, rows(last - 1, last), name), forecasts, last)
    assert_at(send(forecasts, rows(49, 80), name), forecasts, 80)
    assert_at(send(forecasts, rows(0, 0), name), forecasts, 80)
    assert_at(send(forecasts, rows(80, 81), name, sequence_end=True), forecasts, 81)
    assert f"there is no sequence '{name}'" in refusal(send(forecasts, rows(81, 82), name), 404)


def test_rows_are_kept_until_there_are_enough(forecasts):
    first = send(forecasts, rows(0, 10), 7, sequence_start=True)
    assert first.status_code == 409
    assert first.json()["error"] == (
        "sequence 7 has 10 rows so far, a forecast needs 24; they are kept, send 14 more"
    )
    assert send(forecasts, rows(10, 23), 7).status_code == 409
    assert_at(send(forecasts, rows(23, 24), 7, sequence_end=True), forecasts, 24)
    assert "it has ended" in refusal(
        send(forecasts, rows(0, 3), 7, sequence_start=True, sequence_end=True), 409
    )
    assert send(forecasts, rows(3, 30), 7).status_code == 404


def test_sequences_do_not_mix(forecasts):
    output(send(forecasts, rows(0, 24), "5", sequence_start=True))
    output(send(forecasts, rows(30, 54), 5, sequence_start=True))
    assert_at(send(forecasts, rows(24, 25), "5"), forecasts, 25)
    assert_at(send(forecasts, rows(54, 55), 5), forecasts, 55)
    assert send(forecasts, rows(60, 70), 5, sequence_start=True).status_code == 409
    assert_at(send(forecasts, rows(70, 84), 5), forecasts, 84)
    for name in ("5", 5):
        output(send(forecasts, rows(0, 30), name, sequence_end=True))


def test_a_refused_request_leaves_its_sequence_unchanged(forecasts):
    output(send(forecasts, rows(0, 30), sequence_start=True))
    bad = rows(30, 31).copy()
    bad[0, 0, 0] = np.nan
    assert send(forecasts, bad).status_code == 400
    assert send(forecasts, rows(30, 31), quantiles=[2]).status_code == 400
    assert send(forecasts, np.zeros((2, 24, 2))).status_code == 400
    assert_at(send(forecasts, rows(30, 31), sequence_end=True), forecasts, 31)


def test_waiting_requests_keep_their_own_rows(serve, held):
    """Requests of one sequence that wait together: each is forecast from where it stood."""
    server: Running = serve(model=held)
    held.holds.set()
    with ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(send, server, rows(0, 24), sequence_start=True)]
        wait_until(lambda: held.sizes == [1])
        for last in range(25, 41):
            before = submitted(server)
            asked.append(pool.submit(send, server, rows(last - 1, last)))
            wait_until(lambda before=before: submitted(server) > before)  # type: ignore[misc]
        held.holds.clear()
        found = [output(one.result()) for one in asked]
    assert held.sizes == [1, 16]
    for last, one in zip(range(24, 41), found, strict=True):
        np.testing.assert_allclose(one, at(server, last), rtol=1e-5, atol=1e-5)


def test_a_long_request_is_not_overtaken(serve, plain_model, monkeypatch):
    """Long bodies are read on another thread; what comes after one waits for its turn."""
    go, parse = threading.Event(), forecast_engine.parse_request

    def slow(data: bytes, *more: Any) -> Any:
        if len(data) > 1 << 16:
            assert go.wait(20)
        return parse(data, *more)

    monkeypatch.setattr(forecast_engine, "parse_request", slow)
    server: Running = serve(model=plain_model)
    engine: Any = server.runner.service.forecast_engine
    many = np.concatenate([np.tile(rows(0, 120), (1, 40, 1)), rows(0, 30)], 1)
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(send, server, many, sequence_start=True)
        wait_until(lambda: engine._num_reading.total() == 1)
        second = pool.submit(send, server, rows(30, 31))
        wait_until(lambda: engine._num_reading.total() == 2)
        assert server.client.get("/health/ready").status_code == 200
        go.set()
        assert_at(first.result(), server, 30)
        assert_at(second.result(), server, 31)


def test_the_error_of_a_refused_quantile_says_that_the_rows_were_added(forecasts):
    output(send(forecasts, rows(0, 24), "unknown", sequence_start=True))
    refused = send(forecasts, rows(24, 25), "unknown", quantiles=[0.995])
    assert refused.status_code == 400
    assert "validation has too few values" in refused.json()["error"]
    assert refused.json()["error"].endswith("; its rows were added to the sequence")
    assert_at(send(forecasts, rows(0, 0), "unknown", sequence_end=True), forecasts, 25)


def test_without_a_free_place_no_rows_are_added(serve, held):
    server: Running = serve(model=held, max_streams=1, max_queue=0)
    output(send(server, rows(0, 24), sequence_start=True))
    held.holds.set()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(server.client.post, PAST, json=body(rows(0, 24)))
        wait_until(lambda: submitted(server) == 1)
        assert send(server, rows(24, 25)).status_code == 503
        held.holds.clear()
        assert other.result().status_code == 200
    wait_until(lambda: server.scheduler.num_held == 0)
    assert_at(send(server, rows(0, 0)), server, 24)


def test_the_number_of_sequences_is_bounded_and_idle_ones_are_forgotten(serve, plain_model):
    server: Running = serve(model=plain_model, max_sequences=2, sequence_idle=60.0)
    now = [0.0]
    server.runner.service.forecast_engine._sequences._clock = lambda: now[0]
    for name in ("a", "b"):
        output(send(server, rows(0, 24), name, sequence_start=True))
    assert server.metric("sequences") == 2
    refused = send(server, rows(0, 24), "c", sequence_start=True)
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert "keeps 2 sequences" in refused.json()["error"]
    now[0] = 61.0
    assert server.metric("sequences") == 0
    assert "idle for 60 s" in refusal(send(server, rows(24, 25), "a"), 404)
    output(send(server, rows(0, 24), "c", sequence_start=True))


def test_static_values_of_a_sequence_are_kept(whole_forecasts):
    from forecast_server import everything, h

    table = everything()

    def request(first: int, last: int, *more: Any, **parameters: Any) -> Any:
        def part(names: tuple[str, ...], end: int, count: int) -> Any:
            return past_of(table, 1, max(end, L), names)[L - count :][None]

        count = last - first
        inputs = [
            tensor("past", part(("y", "temp", "price"), last, count)),
            tensor("past_names", part(("sky", "kind"), last, count), "BYTES"),
            tensor("future", past_of(table, 1, last + h, ("price",))[-h:][None]),
            tensor("future_names", past_of(table, 1, last + h, ("kind",))[-h:][None], "BYTES"),
            *more,
        ]
        return whole_forecasts.client.post(PAST, json={"inputs": inputs, "parameters": parameters})

    def static(size: float, place: str) -> list[Any]:
        return [tensor("static", [[size]]), tensor("static_names", [[place]], "BYTES")]

    sequence = {"sequence_id": "static"}
    assert "the inputs 'static' and 'static_names' are missing" in refusal(
        request(20, 44, **sequence, sequence_start=True)
    )
    output(request(20, 44, *static(5, "s"), **sequence, sequence_start=True))
    found = output(request(44, 45, **sequence))
    np.testing.assert_allclose(
        found, output(request(21, 45, *static(5, "s"))), rtol=1e-5, atol=1e-5
    )
    found = output(request(45, 46, *static(9, "n"), **sequence, sequence_end=True))
    np.testing.assert_allclose(
        found, output(request(22, 46, *static(9, "n"))), rtol=1e-5, atol=1e-5
    )


# Without a server -------------------------------------------------------------------------------


def test_the_longest_idle_sequence_is_forgotten_first():
    now = [0.0]
    kept = SequenceStore(2, Places(10), 5.0, clock=lambda: now[0])
    one = np.zeros((2, 1), dtype=np.float32)
    kept.add(SequenceStep("a", starts=True), one, None)
    now[0] = 3.0
    kept.add(SequenceStep("b", starts=True), one, None)
    now[0] = 4.0
    kept.add(SequenceStep("a"), one, None)
    now[0] = 8.5
    assert len(kept) == 1
    kept.add(SequenceStep("a"), one, None)
    with pytest.raises(ApiError, match="there is no sequence 'b'"):
        kept.add(SequenceStep("b"), one, None)


def test_a_returned_window_does_not_change():
    kept = SequenceStore(3, Places(1), 5.0)
    values = np.arange(8, dtype=np.float32)[:, None]
    first, _ = kept.add(SequenceStep(1, starts=True), values[:3], None)
    second, _ = kept.add(SequenceStep(1), values[3:4], None)
    third, _ = kept.add(
        SequenceStep(1, starts=True), values[4:], None
    )  # the same name needs no place
    assert first.ravel().tolist() == [0, 1, 2]
    assert second.ravel().tolist() == [1, 2, 3]
    assert third.ravel().tolist() == [5, 6, 7]
    with pytest.raises(ApiError, match="keeps 1 sequence,"):
        kept.add(SequenceStep(2, starts=True), values, None)
