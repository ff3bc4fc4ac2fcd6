"""The outermost ASGI layer: request ids, log lines, counters, answers to errors."""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastlstm.errors import counted
from fastlstm.report.terminal import clock
from fastlstm.serve.http.errors import ENDING, ApiError, Disconnected, Unavailable
from fastlstm.serve.http.keys import NOBODY
from fastlstm.serve.log import Log
from fastlstm.serve.metrics import Metrics

MAX_HEADERS, MAX_HEADER_BYTES = 100, 32768
_ONCE = (b"content-type", b"content-encoding")
"""Headers that may come only once: two could contradict each other."""
_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}", re.ASCII)
_KEY_DIGITS = 4
GONE = 499
"""The status of a request whose client left before the answer had a status."""
_PLAIN = "/:@!$&'()*+,;="
"""Characters of a path besides letters and digits; all others are written as %XX."""
_LOG = logging.getLogger("fastlstm.serve")


@dataclass
class Record:
    """A request, for the log and the counters; its headers were complete at `start_s`.

    Attributes:
        key: the first four digits of the SHA-256 of its API key; empty without one.
        status: of the response; 0 before there is one.
        failure: why the answer was not completed: the client left ("disconnected") or did not read
            ("stalled"), the server ended ("cancelled") or failed ("failed").
        param: the field for which the request was refused.
    """

    id: str
    start_s: float = field(default_factory=time.monotonic)
    key: str = ""
    status: int = 0
    failure: str = ""
    param: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    windows: int = 0
    first_chunk_s: float | None = None

    @property
    def outcome(self) -> str:
        """The failure, or "ok", "rejected", "failed", "client_error"."""
        if self.failure or self.status in (429, 503):
            return self.failure or "rejected"
        if self.status >= 500:
            return "failed"
        return "client_error" if self.status >= 400 else "ok"


class Access:
    """Answers errors, counts requests, and logs them unless `log` is None.

    `check` raises ApiError for requests to refuse before they reach `app`, the router.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        *,
        log: Log | None,
        check: Callable[[Scope], object] = lambda scope: None,
    ) -> None:
        self._app, self._metrics, self._log, self._check = app, metrics, log, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ids = [value for name, value in scope["headers"] if name == b"x-request-id"]
        is_valid = len(ids) == 1 and _ID.fullmatch(ids[0])
        record = Record(ids[0].decode("ascii") if is_valid else uuid.uuid4().hex)
        scope.setdefault("state", {})["record"] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", record.id.encode("ascii")),
                    (b"x-content-type-options", b"nosniff"),
                ]
            await send(message)

        try:
            await self._answer(scope, receive, send_with_id, record)
        finally:
            record.key = scope["state"].get("tenant", NOBODY).hex()[:_KEY_DIGITS]
            self._metrics.requests.labels(str(record.status or GONE)).inc()
            self._metrics.outcomes.labels(record.outcome).inc()
            if self._log is not None:
                client = scope.get("client") or ("", 0)
                method, path = scope["method"][:16], scope["path"][:200]
                line = terminal_line if self._log.is_terminal else json_line
                self._log.write(line(record, client[0], method, path))

    async def _answer(self, scope: Scope, receive: Receive, send: Send, record: Record) -> None:
        try:
            _check_headers(scope)
            self._check(scope)
            scope["app"] = self  # else the router answers by itself, as plain text
            await self._app(scope, receive, send)
        except Disconnected:
            has_stalled = getattr(scope["state"].get("connection"), "has_stalled", False)
            record.failure = record.failure or ("stalled" if has_stalled else "disconnected")
        except asyncio.CancelledError:  # the server ends
            record.failure = record.failure or "cancelled"
            await _end(scope, send, record, Unavailable(ENDING))
        except HTTPException as error:
            path, method = scope["path"][:200], scope["method"][:16]
            message = f"there is no path {path}; /openapi.json lists all paths"
            if error.status_code == 405:
                message = f"{path} does not take {method}"
            own = ApiError(error.status_code, message, headers=dict(error.headers or {}))
            await _end(scope, send, record, own)
        except ApiError as error:
            record.param = error.param
            if record.status:
                kind = "cancelled" if isinstance(error, Unavailable) else "failed"
                record.failure = record.failure or kind
            await _end(scope, send, record, error)
        except Exception:
            _LOG.exception("request %s failed", record.id)
            record.failure = "failed"
            failure = ApiError(500, "the server failed to answer; see its log")
            await _end(scope, send, record, failure)


async def _end(scope: Scope, send: Send, record: Record, error: ApiError) -> None:
    """Answers an error, or closes the connection if half of an answer was sent."""
    if record.status:
        if (connection := scope["state"].get("connection")) is not None:
            connection.abort()
            await asyncio.sleep(0)  # it is closed when the event loop turns
        return
    body = error.body_at(scope["path"])
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _check_headers(scope: Scope) -> None:
    headers = scope["headers"]
    size = sum(len(name) + len(value) for name, value in headers)
    if len(headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
        came = f"{counted(len(headers), 'header')} of {counted(size, 'byte')}"
        expected = f"at most {MAX_HEADERS} of {MAX_HEADER_BYTES}"
        raise ApiError(431, f"the request has {came}, expected {expected}", closes=True)
    names = [name for name, _ in headers]
    if b"transfer-encoding" in names:  # a proxy may read it differently (request smuggling)
        if b"content-length" in names:
            message = "the request has Content-Length and Transfer-Encoding, expected one of them"
            raise ApiError(400, message, closes=True)
        if scope["http_version"] < "1.1":
            message = "Transfer-Encoding goes with HTTP/1.1 only; send Content-Length"
            raise ApiError(400, message, closes=True)
    for name in _ONCE:
        if (times := names.count(name)) > 1:
            raise ApiError(400, f"the header '{name.decode()}' comes {times} times; send it once")


def json_line(record: Record, client: str, method: str, path: str) -> str:
    """Returns a request that has ended as JSON."""
    line = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        "id": record.id,
        "client": client,
        "key": record.key or None,
        "method": method,
        "path": path,
        "status": record.status or GONE,
        "outcome": record.outcome,
        "param": record.param,
        "seconds": round(time.monotonic() - record.start_s, 4),
        "first_chunk_s": record.first_chunk_s and round(record.first_chunk_s, 4),
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "windows": record.windows,
    }
    # ASCII JSON: line ends and escape codes in a path come out as \\n and \\u001b.
    return json.dumps(line)


def terminal_line(record: Record, client: str, method: str, path: str) -> str:
    """Returns a request that has ended as plain text.

    ``12:03:07  POST /v1/completions  200  34 tokens  12 ms  key a1b2``; also why the answer was not
    completed, and after a server error the request's id, as in the traceback.
    """
    parts = [
        f"{datetime.datetime.now():%H:%M:%S}",
        f"{quote(method, _PLAIN)} {quote(path, _PLAIN, errors='replace')}",
        str(record.status or GONE),
        quote(record.param or "", _PLAIN, errors="replace"),
        counted(record.completion_tokens, "token") if record.completion_tokens else "",
        counted(record.windows, "window") if record.windows else "",
        _duration(time.monotonic() - record.start_s),
        record.failure,
        f"key {record.key}" if record.key else "",
        f"id {record.id}" if record.outcome == "failed" else "",
    ]
    return "  ".join(part for part in parts if part)


def _duration(seconds: float) -> str:
    if seconds < 0.0005:
        return "<1 ms"
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 60 else clock(seconds)
