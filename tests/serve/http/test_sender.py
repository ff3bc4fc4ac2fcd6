"""Sending chunk by chunk: since when a client has taken nothing, and what is measured of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from fastlstm.serve.http import sender
from fastlstm.serve.http.access import Record
from fastlstm.serve.http.sender import Sender, Stalls
from fastlstm.serve.metrics import Metrics


def sender_of(send: Any, metrics: Metrics, cut: list[str], stalls: Stalls | None = None) -> Sender:
    service: Any = SimpleNamespace(metrics=metrics, stalls=stalls)
    scope = {"state": {"record": Record("one")}}
    return Sender(scope, None, send, lambda: cut.append("cut"), service)  # type: ignore[arg-type]


def test_every_slice_has_its_own_time_to_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(sender.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sender, "_SLICE", 10)
    waits: list[Any] = []

    async def send(message: Any) -> None:
        now[0] += 8.0  # slow, but each slice is taken
        if message["type"] == "http.response.body":
            waits.append((one.waits_since_s, now[0]))

    one = sender_of(send, Metrics(), [])

    async def main() -> None:
        await one.start(b"text/plain")
        await one.body(b"a" * 55, is_last=True)

    asyncio.run(main())
    assert len(waits) >= 3
    assert all(now_s - since_s == 8.0 for since_s, now_s in waits)
    assert one.waits_since_s is None


def test_who_takes_nothing_is_cut_once_the_time_has_passed() -> None:
    cut: list[str] = []

    async def main() -> None:
        never = asyncio.get_running_loop().create_future()

        async def send(message: Any) -> None:
            await never

        stalls = Stalls(0.05)
        one = sender_of(send, Metrics(), cut, stalls)
        with one:
            watching = asyncio.create_task(stalls.watch())
            sending = asyncio.create_task(one.body(b"a", is_last=True))
            while not cut:
                await asyncio.sleep(0.005)
            assert one._record.failure == "stalled"
            watching.cancel()
            sending.cancel()
        assert not stalls.senders

    asyncio.run(asyncio.wait_for(main(), 20))


def test_the_time_between_chunks_is_measured_between_chunks_only() -> None:
    metrics = Metrics()

    async def send(message: Any) -> None:
        pass

    async def main() -> None:
        for _ in range(2):  # two answers, of four chunks and of one
            one = sender_of(send, metrics, [])
            await one.start(b"text/plain")
            for _ in range(3):
                await one.body(b"a")
            await one.body(b"", is_last=True)

    asyncio.run(main())
    value = metrics.registry.get_sample_value
    assert value("fastlstm_first_token_seconds_count") == 2
    assert value("fastlstm_inter_chunk_seconds_count") == 2 * 3
    assert (value("fastlstm_inter_chunk_seconds_sum") or 0.0) < 60
