"""Receiving a request's body: the right type, bounded in size and time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fastlstm.serve.channel import Disconnected
from fastlstm.serve.errors import ApiError

if TYPE_CHECKING:
    from starlette.types import Receive, Scope


async def read_json_bytes(
    scope: Scope, receive: Receive, max_bytes: int, timeout_s: float
) -> bytes:
    """Returns the body of a request that says it is JSON.

    Raises:
        ApiError: another type (415), too long (413), too slow (408).
        Disconnected: the client has left.
    """
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    # A form's type is refused also because any web page may send one to this machine.
    if kind != b"application/json":
        raise ApiError(
            415,
            f"the content type is '{kind[:100].decode('latin-1')}', expected application/json;"
            " with curl add -H 'Content-Type: application/json'",
        )
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        raise ApiError(415, "the body is compressed; send it as it is, without Content-Encoding")
    length = headers.get(b"content-length", b"0")
    if not length.isdigit() or len(length) > 18 or int(length) > max_bytes:
        raise _too_long(max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            return await _received(receive, max_bytes)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not come within {timeout_s:g} s; send it faster", closes=True
        ) from None


async def _received(receive: Receive, max_bytes: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_long(max_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def _too_long(max_bytes: int) -> ApiError:
    return ApiError(
        413, f"the body has more than {max_bytes} bytes; send a shorter prompt", closes=True
    )
