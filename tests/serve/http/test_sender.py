"""Sending chunk by chunk: what is measured of it."""

from __future__ import annotations

import asyncio
from typing import Any

from fastlstm.serve.http.access import Record
from fastlstm.serve.http.transfer import Sender
from fastlstm.serve.metrics import Metrics


def sender_of(send: Any, metrics: Metrics) -> Sender:
    scope = {"state": {"record": Record("one")}}
    return Sender(scope, None, send, lambda: None, metrics)  # type: ignore[arg-type]


def test_the_time_between_chunks_is_measured_between_chunks_only() -> None:
    metrics = Metrics()

    async def send(message: Any) -> None:
        pass

    async def main() -> None:
        for _ in range(2):  # two answers, of four chunks and of one
            one = sender_of(send, metrics)
            await one.start(b"text/plain")
            for _ in range(3):
                await one.body(b"a")
            await one.body(b"", is_last=True)

    asyncio.run(main())
    value = metrics.registry.get_sample_value
    assert value("fastlstm_first_token_seconds_count") == 2
    assert value("fastlstm_inter_chunk_seconds_count") == 2 * 3
    assert (value("fastlstm_inter_chunk_seconds_sum") or 0.0) < 60
