"""The parser and the connection on their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import h11
import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from fastlstm.serve.http.access import MAX_HEADER_BYTES
from fastlstm.serve.http.protocol import Connection, Parser

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
BODY = b"a" * 3000


def read(data: bytes) -> bytes:
    """The body of a request that comes byte after byte."""
    parser, body = Parser(h11.SERVER, MAX_HEADER_BYTES), b""
    for byte in data:
        parser.receive_data(bytes([byte]))
        while (event := parser.next_event()) is not h11.NEED_DATA:
            if isinstance(event, h11.EndOfMessage):
                return body
            if isinstance(event, h11.Data):
                body += event.data
    raise AssertionError("it never ended")


def test_a_body_that_comes_byte_by_byte_is_read() -> None:
    assert read(HEAD + b"content-length: 3000\r\n\r\n" + BODY) == BODY
    chunked = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    assert read(chunked + b"bb8\r\n" + BODY + b"\r\n0\r\n\r\n") == BODY


def test_a_connection_is_read_in_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(H11Protocol, "connection_made", lambda self, transport: None)
    monkeypatch.setattr(Connection, "_await_request", lambda self: None)
    connection: Any = Connection.__new__(Connection)
    connection.idle_connections = SimpleNamespace(begin=lambda connection: None)
    transport: Any = SimpleNamespace(max_size=1 << 18)  # asyncio's
    connection.connection_made(transport)
    assert transport.max_size == 1 << 17
