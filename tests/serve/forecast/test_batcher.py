"""Batches of windows: size, order, disconnects, failures, shutdown."""

from __future__ import annotations

import asyncio
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from forecast_server import PAST, L, body, h, output, refusal, submitted
from running_server import Running, raw_request, wait_until

RNG = np.random.default_rng(7)


def windows(count: int) -> Any:
    return RNG.normal(size=(count, L, 2)).astype(np.float32)


@pytest.fixture
def busy(serve, held):
    """Starts a server whose first pass is held up; returns it and the answer to come."""
    pool = ThreadPoolExecutor(40)

    def start(**settings: Any) -> tuple[Running, Any]:
        server: Running = serve(model=held, **settings)
        held.holds.set()
        first = pool.submit(server.client.post, PAST, json=body(windows(1)))
        wait_until(lambda: held.sizes == [1])
        return server, first

    def ask(server: Running, values: Any) -> Any:
        """Returns the answer to come to a request that has been read."""
        before = submitted(server)
        answer = pool.submit(server.client.post, PAST, json=body(values))
        wait_until(lambda: submitted(server) > before)
        return answer

    start.ask = ask  # type: ignore[attr-defined]
    yield start
    held.holds.clear()
    pool.shutdown()


def test_200_clients_share_a_pass_with_the_same_results_as_alone(busy, held, forecasts):
    server, first = busy()
    values = windows(200)

    async def ask(client: httpx.AsyncClient, one: Any) -> httpx.Response:
        return await client.post(PAST, json=body(one[None], quantiles=[0.1, 0.9]))

    async def all_at_once() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
            asking = [asyncio.create_task(ask(client, one)) for one in values]
            while submitted(server) < 201:
                await asyncio.sleep(0.01)
            held.holds.clear()
            return await asyncio.gather(*asking)

    answers = asyncio.run(all_at_once())
    assert held.sizes == [1, 200]
    assert first.result().status_code == 200
    for one, answer in zip(values, answers, strict=True):
        alone = forecasts.client.post(PAST, json=body(one[None], quantiles=[0.1, 0.9]))
        for name in ("forecast", "quantiles"):
            np.testing.assert_allclose(output(answer, name), output(alone, name), atol=1e-5)
    assert server.metric("windows_total") == 201


def test_passes_run_on_a_thread_of_their_own(busy, held):
    server, first = busy(watchdog=0.2)
    assert server.client.get("/health/ready").status_code == 200  # the event loop is free
    assert server.metric("streams_active") == 1
    wait_until(lambda: server.client.get("/health/live").status_code == 503)
    assert server.client.get("/v2/health/live").json() == {"live": False}
    held.holds.clear()
    assert first.result().status_code == 200
    wait_until(lambda: server.client.get("/v2/health/live").status_code == 200)
    assert held.threads == {"fastlstm-engine"}


def test_a_batch_is_bounded_and_keeps_the_order(busy, held):
    server, first = busy(max_streams=8, max_queue=100)
    counts = (3, 4, 2, 8, 1)
    asked = [busy.ask(server, windows(count)) for count in counts]
    held.holds.clear()
    assert [output(one.result()).shape for one in asked] == [(count, h, 1) for count in counts]
    assert held.sizes == [1, 7, 2, 8, 1]
    assert first.result().status_code == 200


def test_beyond_the_queue_is_503(busy, held):
    server, first = busy(max_streams=2, max_queue=2)
    second = busy.ask(server, windows(2))
    refused = [server.client.post(PAST, json=body(windows(2)))]
    third = busy.ask(server, windows(1))
    # Without a place left nothing is read: what is no request is refused just so.
    kind = {"content-type": "application/json"}
    refused.append(server.client.post(PAST, content=b"{", headers=kind))
    for answer in refused:
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert "at its capacity" in answer.json()["error"]
    assert server.metric('outcomes_total{outcome="rejected"}') == 2
    held.holds.clear()
    for one in (first, second, third):
        assert one.result().status_code == 200
    wait_until(lambda: server.scheduler.num_held == 0)


def test_windows_of_a_disconnected_client_are_not_computed(busy, held):
    server, first = busy()
    with socket.create_connection(server.address, 10) as client:
        client.sendall(raw_request(PAST, json.dumps(body(windows(5).tolist())).encode()))
        wait_until(lambda: submitted(server) == 6)
    wait_until(lambda: server.scheduler.num_held == 1)
    wait_until(lambda: submitted(server) == 1)  # its numbers go while the pass still runs
    held.holds.clear()
    assert first.result().status_code == 200
    assert output(server.client.post(PAST, json=body(windows(2)))).shape[0] == 2
    assert held.sizes == [1, 2]
    assert server.metric('outcomes_total{outcome="disconnected"}') == 1


def test_a_pass_that_fails_is_500_for_its_requests_only(busy, held):
    server, first = busy()
    held.fails.set()
    second = busy.ask(server, windows(2))
    held.holds.clear()
    assert first.result().status_code == 500
    assert "planted" not in first.result().text
    assert second.result().status_code == 200
    assert server.metric("failed_texts_total") == 1


def test_a_request_that_breaks_a_pass_fails_alone(busy, held, monkeypatch):
    server, _ = busy()
    run = held.run

    def failing(past: Any, *more: Any) -> Any:
        if (past == 77.0).all((1, 2)).any():
            raise RuntimeError("planted")
        return run(past, *more)

    values = (windows(1), np.full((1, L, 2), 77.0), windows(2))
    asked = [busy.ask(server, one) for one in values]
    monkeypatch.setattr(held, "run", failing)
    held.holds.clear()
    assert [one.result().status_code for one in asked] == [200, 500, 200]
    assert "planted" not in asked[1].result().text


def test_extreme_values_do_not_affect_others(busy, held, forecasts):
    server, _ = busy()
    good, bad = windows(1), np.full((1, L, 2), 3e38) * ((-1.0) ** np.arange(L))[:, None]
    asked = [busy.ask(server, one) for one in (bad, good, bad)]
    held.holds.clear()
    assert [one.result().status_code for one in asked] == [400, 200, 400]
    assert "not finite" in asked[0].result().json()["error"]
    assert held.sizes == [1, 3]
    alone = output(forecasts.client.post(PAST, json=body(good)))
    np.testing.assert_allclose(output(asked[1].result()), alone, atol=1e-5)


def test_at_shutdown_admitted_requests_are_answered_and_new_ones_refused(busy, held):
    server, first = busy(grace=30.0)
    second = busy.ask(server, windows(2))
    server.loop.call_soon_threadsafe(server.runner.end)
    wait_until(lambda: server.client.get("/v2/health/ready").status_code == 503)
    assert "shutting down" in refusal(server.client.post(PAST, json=body(windows(1))), 503)
    held.holds.clear()
    assert first.result().status_code == 200
    assert second.result().status_code == 200
    server.thread.join(20)
    assert not server.thread.is_alive()


def test_after_the_grace_waiting_requests_get_503(busy, held):
    server, first = busy(grace=0.0)
    second = busy.ask(server, windows(2))
    server.loop.call_soon_threadsafe(server.runner.end)
    wait_until(lambda: server.scheduler.is_stopping)
    held.holds.clear()
    assert second.result().status_code == 503
    assert first.result().status_code == 200
    server.thread.join(20)
    assert not server.thread.is_alive()
    assert held.sizes == [1]
