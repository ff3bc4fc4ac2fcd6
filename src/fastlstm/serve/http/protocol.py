"""HTTP connections with time limits on slow requests and stalled answers."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from typing import TYPE_CHECKING, Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from fastlstm.serve.http.access import MAX_HEADER_BYTES
from fastlstm.serve.http.errors import ApiError
from fastlstm.serve.http.refusals import Refusals

if TYPE_CHECKING:
    import asyncio

    from fastlstm.serve.http.listener import IdleConnections
    from fastlstm.serve.service import Service
    from fastlstm.serve.settings import Settings

_BODY_SPARE_S = 1.0
"""The application answers a slow body itself; the connection ends this much later anyway."""
_STALL_SPARE_S = 2.0
"""The application cuts off a stalled answer; the connection ends this much later anyway."""
_FREE_CHUNKS, _LEAST_CHUNK = 1024, 256
"""Chunks of a body that may be small; beyond these, the least average size in bytes."""
_READ_SIZE = 1 << 17
"""Bytes read from a connection per turn of the event loop; with asyncio's 256 KiB 150 clients at
once make a turn of 40 ms, with these of 6 ms."""
_NO_LINGER = struct.pack("ii", 1, 0)


def protocol_class(service: Service) -> type[H11Protocol]:
    """Returns the protocol with a server's limits."""
    settings = service.settings

    class Protocol(Connection):
        limits = settings
        refusals = Refusals(service)
        idle_connections = service.idle

    return Protocol


class Refused(h11.RemoteProtocolError):
    """HTTP that h11 accepts but a server should not; the message is for the client."""


class Parser(h11.Connection):
    """h11's parser, strict about what a proxy may read differently (request smuggling).

    Also refuses bodies of many tiny chunks: each takes as long as a large one.
    """

    def next_event(self) -> Any:
        """Returns h11's next event; raises h11.RemoteProtocolError for bad or refused HTTP."""
        if self.their_state is h11.IDLE:
            head = self.trailing_data[0].partition(b"\r\n\r\n")[0]
            if head.count(b"\n") != head.count(b"\r\n"):
                raise Refused("a line of the headers ends with LF only, expected CR LF")
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
            _check_framing(event)
        elif isinstance(event, h11.Data):
            self._num_bytes += len(event.data)
            self._num_chunks += event.chunk_start
            if self._num_chunks > _FREE_CHUNKS + self._num_bytes // _LEAST_CHUNK:
                raise Refused(
                    f"the body comes in {self._num_chunks} chunks of {self._num_bytes} bytes"
                    f" together, expected {_LEAST_CHUNK} bytes or more in each; send larger ones,"
                    " or Content-Length"
                )
        return event


def _check_framing(request: h11.Request) -> None:
    names = [name for name, _ in request.headers]
    if b"transfer-encoding" not in names:
        return
    if b"content-length" in names:
        raise Refused("the request has Content-Length and Transfer-Encoding, expected one of them")
    if request.http_version < b"1.1":
        raise Refused("Transfer-Encoding goes with HTTP/1.1 only; send Content-Length")


class Connection(H11Protocol):
    """uvicorn's protocol on h11, with deadlines that a trickle of bytes does not extend."""

    limits: Settings
    refusals: Refusals
    idle_connections: IdleConnections

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = Parser(h11.SERVER, MAX_HEADER_BYTES)
        self.app_state = {**self.app_state, "connection": self}
        self._deadline: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._awaits: Any = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = _READ_SIZE  # type: ignore[attr-defined]
        self._await_request()
        self.idle_connections.begin(self)

    def data_received(self, data: bytes) -> None:
        """Reads; extends the deadline only when a part of the request is complete."""
        if self._may_refuse():
            answer = self.refusals.answer(data, self.client[0] if self.client else "")
            if answer is not None:
                self.transport.write(answer)
                self._idle()
                return
        super().data_received(data)
        self._await_request()
        if self._is_answering:
            self.idle_connections.end(self)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _may_refuse(self) -> bool:
        """Whether the next byte starts a request, and nothing is being answered."""
        return (
            self.conn.their_state is h11.IDLE
            and not self.conn.trailing_data[0]
            and not self._is_answering
            and not self.transport.is_closing()
            and self.transport.get_write_buffer_size() == 0  # reads its answers
        )

    @property
    def is_sending(self) -> bool:
        """Whether an answer was started and not read to its end."""
        is_open = self._is_answering and self.cycle.response_started
        return is_open or self.transport.get_write_buffer_size() > 0

    def _idle(self) -> None:
        """Waits for the next request with uvicorn's keep-alive timeout."""
        self._set_deadline(None)
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )
        self.idle_connections.begin(self)
        self._watch_leaving()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unwatch_reading()

    def _watch_reading(self) -> None:
        seconds = self.limits.stall + _STALL_SPARE_S
        size = self.transport.get_write_buffer_size()
        self._reading = self.loop.call_later(seconds, self._check_reading, size)

    def _check_reading(self, before: int) -> None:
        if self.transport.get_write_buffer_size() == before:
            self.abort()
        else:
            self._watch_reading()

    def _unwatch_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_deadline(None)
        self._unwatch_reading()
        self.idle_connections.end(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_answering:  # the next request is here already
            self.idle_connections.begin(self)
        self._watch_leaving()

    def dismiss(self) -> bool:
        """Closes the connection between two requests; False if an answer is not sent yet."""
        if self.transport.get_write_buffer_size():
            return False
        self.transport.close()
        return True

    def send_400_response(self, msg: str) -> None:
        """Answers bad HTTP with the same error object as everything else."""
        error = sys.exception()
        status = getattr(error, "error_status_hint", 400)
        if isinstance(error, Refused):
            text = str(error)
        elif status == 431:
            text = "the request's headers are too long"
        else:
            status, text = 400, "the request is not valid HTTP/1.1"
        self._answer_raw(ApiError(status, text))

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_leaving()

    def abort(self) -> None:
        """Ends the connection; drops what was not read, even from the kernel's buffer."""
        connection = self.transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()

    def _await_request(self) -> None:
        state, limits = self.conn.their_state, self.limits
        seconds = {
            h11.IDLE: limits.header_timeout,
            h11.SEND_BODY: limits.body_timeout + _BODY_SPARE_S,
        }
        if state in seconds and not self.transport.is_closing():
            self._set_deadline(state, seconds[state])
        else:
            self._set_deadline(None)

    def _set_deadline(self, awaits: Any, seconds: float = 0.0) -> None:
        if awaits is self._awaits:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._awaits = awaits
        self._deadline = None if awaits is None else self.loop.call_later(seconds, self._cut)

    def _cut(self) -> None:
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            text = f"the headers did not come within {self.limits.header_timeout:g} s"
            self._answer_raw(ApiError(408, text))
            self._watch_leaving()
        else:
            self.abort()

    def _answer_raw(self, error: ApiError) -> None:
        """Answers and closes without h11, which accepts nothing more after an error."""
        self.transport.write(error.response("connection: close"))
        self.transport.close()

    def _watch_leaving(self, before: int | None = None) -> None:
        """After an answer, ends the connection if the client does not read what is left of it."""
        size = self.transport.get_write_buffer_size()
        if size == before and not self._is_answering:
            self.abort()
        elif size > 0 and not self._is_answering:
            self.loop.call_later(self.limits.stall, self._watch_leaving, size)
