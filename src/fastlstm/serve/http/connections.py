"""Connections of uvicorn on h11, and the watch that closes slow and idle ones."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import struct
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from fastlstm.errors import ConfigError
from fastlstm.serve.http.errors import ApiError
from fastlstm.serve.metrics import Metrics
from fastlstm.serve.settings import Settings

_FREE_CHUNKS, _LEAST_CHUNK = 1024, 256
"""Number of chunks of a body that may be small; with more chunks, their least average size in
bytes."""
_READ_SIZE = 1 << 17
"""Bytes read from a connection per turn of the event loop. With 150 clients at once a turn takes 6
ms; with asyncio's 256 KiB it would take 40 ms."""
_NO_LINGER = struct.pack("ii", 1, 0)
_SPARE_FILES = 32
"""Files that the process may need besides its connections."""
_EXTRA = 8
"""Connections beyond the limit that are answered 503; further ones are closed at once."""
_EVERY_S = 0.1
_BODY_SPARE_S = 1.0
"""The application answers a slow body itself; the connection ends this much later anyway."""
_WAITED_S = 1.0
"""Idle seconds after which a connection may be closed to make room."""
_SAY_AGAIN_S = 60.0


class Parser(h11.Connection):
    """h11's parser; refuses bodies of many tiny chunks, each as slow as a large one."""

    _num_chunks = _num_bytes = 0

    def next_event(self) -> Any:
        """Returns h11's next event; raises h11.RemoteProtocolError for bad or refused HTTP."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
        elif isinstance(event, h11.Data):
            self._num_bytes += len(event.data)
            self._num_chunks += event.chunk_start
            if self._num_chunks > _FREE_CHUNKS + self._num_bytes // _LEAST_CHUNK:
                raise h11.RemoteProtocolError(
                    f"the body comes in {self._num_chunks} chunks of {self._num_bytes} bytes"
                    f" together, expected {_LEAST_CHUNK} bytes or more in each; send larger ones,"
                    " or Content-Length"
                )
        return event


class Connection(H11Protocol):
    """uvicorn's connection; `waits_for` says what it waits for, `since_s` (monotonic) since when.

    `has_stalled`: it was ended because its client did not read the answer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = Parser(h11.SERVER, self.config.h11_max_incomplete_event_size or 0)
        self.app_state = {**self.app_state, "connection": self}
        self.waits_for: tuple[Any, ...] = ("head", None)
        self.since_s, self.has_stalled = time.monotonic(), False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = _READ_SIZE  # type: ignore[attr-defined]
        if self.limit_concurrency and len(self.connections) > self.limit_concurrency + _EXTRA:
            self.abort()

    def send_400_response(self, msg: str) -> None:
        """Answers bad HTTP with the same error object as everything else."""
        error = sys.exception()
        status = getattr(error, "error_status_hint", 400)
        text = f"the request is not valid HTTP/1.1: {error}"
        if status == 431:
            text = "the request's headers are too long; send fewer"
        self.refuse(ApiError(status, text))

    def refuse(self, error: ApiError) -> None:
        """Answers and closes without h11, which sends nothing more after an error."""
        self.transport.write(error.response())
        self.transport.close()

    def abort(self) -> None:
        """Ends the connection; drops what was not read, even from the kernel's buffer."""
        connection = self.transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()

    @property
    def is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_sending(self) -> bool:
        """Whether an answer was started and not read to its end."""
        is_open = self.is_answering and self.cycle.response_started
        return is_open or self.transport.get_write_buffer_size() > 0

    @property
    def is_idle(self) -> bool:
        """Whether no answer is under way, and it is the client's turn to send."""
        return self.waits_for[0] in ("head", "request", "body") and not self.is_answering

    def look(self, now_s: float) -> None:
        """Updates `waits_for` and `since_s`; more bytes of one part do not restart the time."""
        size, state = self.transport.get_write_buffer_size(), self.conn.their_state
        waits_for: tuple[Any, ...] = ("answer",)
        if size:
            waits_for = ("reader", size)
        elif state is h11.IDLE:
            is_begun = self.cycle is None or self.conn.trailing_data[0]
            waits_for = ("head" if is_begun else "request", self.cycle)
        elif state is h11.SEND_BODY:
            waits_for = ("body", self.cycle)
        if waits_for != self.waits_for:
            self.waits_for, self.since_s = waits_for, now_s


class Watch:
    """Ends connections of slow clients, and idle ones if nearly `limit` connections are open.

    `say` receives a warning, at most once a minute.
    """

    def __init__(
        self, settings: Settings, limit: int, metrics: Metrics, say: Callable[[str], object]
    ) -> None:
        self._settings, self._limit, self._metrics, self._say = settings, limit, metrics, say
        self._limits = {
            "head": settings.header_timeout,
            "body": settings.body_timeout + _BODY_SPARE_S,
            "reader": settings.stall,
        }
        self._room = limit - max(1, min(64, limit // 8))
        self._next_s = 0.0

    async def run(self, connections: Collection[Connection]) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            self.look(list(connections), time.monotonic())

    def look(self, connections: Collection[Connection], now_s: float) -> None:
        """Ends connections that wait too long, and the longest idle ones if room is needed."""
        for one in connections:
            one.look(now_s)
            limit_s = self._limits.get(one.waits_for[0])
            if limit_s is not None and now_s - one.since_s >= limit_s:
                self._end(one)
        if len(connections) <= self._room:
            return
        if len(connections) >= self._limit:
            self.too_many()
        idle = [one for one in connections if one.is_idle and now_s - one.since_s >= _WAITED_S]
        idle.sort(key=lambda one: one.since_s)
        for one in idle[: len(connections) - self._room]:
            self._metrics.dismissed.inc()
            one.transport.close()

    def _end(self, one: Connection) -> None:
        if one.waits_for[0] == "head" and one.conn.trailing_data[0]:
            limit_s = self._settings.header_timeout
            one.refuse(ApiError(408, f"the headers did not come within {limit_s:g} s"))
        else:
            one.has_stalled = one.waits_for[0] == "reader"
            one.abort()

    def too_many(self) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _SAY_AGAIN_S
            self._say(
                f"fastlstm: WARNING: {self._limit} connections are open, as many as this server"
                " takes (ulimit -n, --max-streams, --max-queue); connections without a request are"
                " closed to make room, and if all have one, new requests are answered 503"
            )


def max_connections(limit: int) -> int:
    """Returns how many connections may be open: `limit`, or fewer if `ulimit -n` says so."""
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if max_files == resource.RLIM_INFINITY:
        return limit
    folder = Path("/proc/self/fd")
    num_open = len(list(folder.iterdir())) if folder.is_dir() else _SPARE_FILES
    left = max_files - num_open - _SPARE_FILES
    if left < 1:
        raise ConfigError(
            f"the process may open {max_files} files, of which {num_open + _SPARE_FILES} are needed"
            " before the first connection; allow more with ulimit -n"
        )
    return min(limit, left)
