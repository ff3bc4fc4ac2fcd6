"""Sending to a client that may be slow, or leave."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from starlette.types import Receive, Scope, Send

    from fastlstm.serve.metrics import Metrics

_SLICE = 1 << 16
"""Bytes handed to the connection at a time."""


class Sender:
    """Sends the answer to one request, and watches its client while it is open (`with`).

    Calls `on_left` when the client has left, or is cut off.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        on_left: Callable[[], object],
        metrics: Metrics,
    ) -> None:
        self._record = scope["state"]["record"]
        self._receive, self._send, self._on_left = receive, send, on_left
        self._metrics = metrics
        self._watch: asyncio.Task[None] | None = None
        self._last_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._watch is not None:
            self._watch.cancel()

    def watch_client(self) -> None:
        """Watches for the client to leave; to be called once the body was read."""
        self._watch = asyncio.create_task(self._until_left())

    async def _until_left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._on_left()

    async def start(self, kind: bytes, length: int | None = None) -> None:
        headers = [(b"content-type", kind), (b"cache-control", b"no-store")]
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        else:
            headers.append((b"x-accel-buffering", b"no"))  # nginx would buffer the chunks
        self._record.first_chunk_s = time.monotonic() - self._record.start_s
        self._metrics.first_token.observe(self._record.first_chunk_s)
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def body(self, *parts: bytes | bytearray, is_last: bool = False) -> None:
        """Sends parts, slice by slice; returns when the connection has room for more.

        Other requests are served between slices, and the connection's buffer stays small.
        """
        now_s = time.monotonic()
        if self._last_s:
            self._metrics.between.observe(now_s - self._last_s)
        self._last_s = now_s
        for data, is_end in _slices(parts):
            message = {"type": "http.response.body", "body": data}
            await self._send({**message, "more_body": not (is_last and is_end)})
            if not is_end:
                await asyncio.sleep(0)


def _slices(parts: Sequence[bytes | bytearray]) -> Iterator[tuple[bytes, bool]]:
    """Yields the joined parts slice by slice, each with whether it is the last."""
    if sum(map(len, parts)) <= _SLICE:
        yield b"".join(parts), True
        return
    data = bytearray()
    for part in parts:
        view = memoryview(part)
        for first in range(0, len(view), _SLICE):
            if len(data) >= _SLICE:
                yield bytes(data), False
                data.clear()
            data += view[first : first + _SLICE]
    yield bytes(data), True
