"""Receives bodies, bounded in size and time; sends answers to clients that may be slow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from starlette.types import Receive, Scope, Send

from fastlstm.serve.http.errors import ApiError, Disconnected
from fastlstm.serve.metrics import Metrics

_SLICE = 1 << 16
"""Bytes of a body that are read without waiting, and bytes given to a connection at a time."""
_PARTS_PER_TURN = 4
JSON = {b"application/json": 1}


def media_type(headers: Mapping[bytes, bytes]) -> bytes:
    """Returns the type of a body, without its parameters."""
    return headers.get(b"content-type", b"").split(b";")[0].strip().lower()


class Bodies:
    """Receives bodies; takes a few parts of a long body per turn of the event loop (`turns`)."""

    def __init__(self, max_bytes: int, timeout_s: float) -> None:
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self.turns = asyncio.Semaphore(_PARTS_PER_TURN)

    async def read(
        self, scope: Scope, receive: Receive, kinds: Mapping[bytes, int] = JSON
    ) -> bytes:
        """Returns the body of a request of one of the types in `kinds`, each with how many times
        the most bytes its body may have.

        Raises ApiError: another type (415), too long (413), too slow (408); Disconnected: the
        client has left.
        """
        headers = dict(scope["headers"])
        kind = media_type(headers)
        # Any web page may send a form to this machine; none may send these types.
        if kind not in kinds:
            came = f"the content type is '{kind[:100].decode('latin-1')}', expected"
            known = [name.decode("ascii") for name in kinds]
            adds = " or ".join(f"-H 'Content-Type: {name}'" for name in known)
            what = f"{' or '.join(known)}; with curl add {adds}"
            raise ApiError(415, f"{came} {what}")
        if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise ApiError(415, "the body is compressed; send it without Content-Encoding")
        limit, length = kinds[kind] * self._max_bytes, headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > limit:
            raise _too_long(limit)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._received(receive, limit)
        except TimeoutError:
            message = f"the body did not come within {self._timeout_s:g} s; send it faster"
            raise ApiError(408, message, closes=True) from None

    async def _received(self, receive: Receive, limit: int) -> bytes:
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise _too_long(limit)
            if not message.get("more_body", False):
                return b"".join(parts)
            if size > _SLICE:
                async with self.turns:
                    await asyncio.sleep(0)


def _too_long(limit: int) -> ApiError:
    what = "send less, or start the server with a larger --max-body"
    return ApiError(413, f"the body has more than {limit} bytes; {what}", closes=True)


class Sender(AbstractContextManager["Sender"]):
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

    def __exit__(self, *exception: object) -> None:
        if self._watch is not None:
            self._watch.cancel()

    def watch_client(self) -> None:
        """Watches for the client to leave; call it when the body was read."""
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
