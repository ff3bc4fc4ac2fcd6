"""Refusing requests before they are parsed, while every place is taken.

At ten times the load that fits, nine of ten requests are refused; through the parser and the routes
that would take as long as writing the texts.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fastlstm.serve.http.access import (
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    Record,
    count,
    key_digits,
    new_id,
    write_line,
)
from fastlstm.serve.http.errors import Overloaded
from fastlstm.serve.http.keys import NOBODY

if TYPE_CHECKING:
    from fastlstm.serve.service import Service

PATH = "/v1/completions"
_FIRST_LINE = b"POST /v1/completions HTTP/1.1\r\n"
_NO_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+", re.ASCII)
_NEEDED = frozenset({b"host", b"content-length"})
_NOT_HERE = frozenset({b"transfer-encoding", b"expect", b"upgrade"})
"""Only the parser handles these."""


class Refusals:
    """Refuses complete, plain requests with a valid key; any other is refused after the parser."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def answer(self, data: bytes, client: str) -> bytes | None:
        """Returns the response to `data`, one whole request, or None."""
        service = self._service
        if not service.is_full or not data.startswith(_FIRST_LINE):
            return None
        head, end, body = data.partition(b"\r\n\r\n")
        headers = _headers(head[len(_FIRST_LINE) :])
        if headers is None or not end or not _is_whole(headers, body):
            return None
        tenant = service.keys.tenant(headers) if service.keys else NOBODY
        if tenant is None:
            return None
        record = Record(new_id(headers), key=key_digits(tenant), status=429)
        count(service.metrics, record)
        if service.settings.log:
            write_line(service.log, record, client, "POST", PATH)
        return _RESPONSE.replace(b"ID", record.id.encode("ascii"), 1)


_RESPONSE = Overloaded().response("x-content-type-options: nosniff", "x-request-id: ID")


def _headers(lines: bytes) -> list[tuple[bytes, bytes]] | None:
    """Returns names in lower case, and values; None if anything is unusual."""
    if len(lines) > MAX_HEADER_BYTES or lines.count(b"\r\n") >= MAX_HEADERS:
        return None
    headers = []
    for line in lines.split(b"\r\n"):
        name, colon, value = line.partition(b":")
        name = name.lower()
        if not colon or not _NAME.fullmatch(name) or _NO_VALUE.search(value):
            return None
        headers.append((name, value.strip(b" \t")))
    return headers


def _is_whole(headers: list[tuple[bytes, bytes]], body: bytes) -> bool:
    names = [name for name, _ in headers]
    if any(names.count(name) != 1 for name in _NEEDED) or _NOT_HERE.intersection(names):
        return False
    if any(name == b"connection" and value != b"keep-alive" for name, value in headers):
        return False
    length = dict(headers)[b"content-length"]
    return length.isdigit() and len(length) < 10 and int(length) == len(body)
