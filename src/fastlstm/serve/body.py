"""Receiving a request's body: the right type, bounded in size and time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fastlstm.serve.channel import Disconnected
from fastlstm.serve.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.types import Receive, Scope

HEADER_LENGTH = b"inference-header-content-length"
"""Bytes of JSON before the binary data. No form can send it, so a type need not be asked for."""


async def read_json_bytes(
    scope: Scope, receive: Receive, max_bytes: int, timeout_s: float
) -> bytes:
    """Returns the body of a request that says it is JSON.

    Raises:
        ApiError: another type (415), too long (413), too slow (408).
        Disconnected: the client has left.
    """
    headers = dict(scope["headers"])
    _check_type(headers)
    return await _read(headers, receive, max_bytes, timeout_s)


async def read_tensor_bytes(
    scope: Scope, receive: Receive, max_bytes: int, timeout_s: float
) -> tuple[bytes, int | None]:
    """Returns the body of an inference request, and how much of it is JSON where not all is.

    Raises:
        What `read_json_bytes` does; ApiError 400: Inference-Header-Content-Length is no length.
    """
    headers = dict(scope["headers"])
    given = headers.get(HEADER_LENGTH)
    if given is None:
        _check_type(headers)
    elif not given.isdigit() or len(given) > 18:
        raise ApiError(
            400,
            f"Inference-Header-Content-Length is '{given[:100].decode('latin-1')}', expected the"
            " number of bytes of JSON that the body begins with",
        )
    body = await _read(headers, receive, max_bytes, timeout_s)
    return body, None if given is None else int(given)


async def until_left(receive: Receive, on_left: Callable[[], object]) -> None:
    """Waits until the client of a request that was read has left, and says so."""
    while (await receive())["type"] != "http.disconnect":
        pass
    on_left()


def _check_type(headers: Mapping[bytes, bytes]) -> None:
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    # A form's type is refused also because any web page may send one to this machine.
    if kind != b"application/json":
        raise ApiError(
            415,
            f"the content type is '{kind[:100].decode('latin-1')}', expected application/json;"
            " with curl add -H 'Content-Type: application/json'",
        )


async def _read(
    headers: Mapping[bytes, bytes], receive: Receive, max_bytes: int, timeout_s: float
) -> bytes:
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
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > max_bytes:
            raise _too_long(max_bytes)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_long(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the body has more than {max_bytes} bytes; send less, or start the server with a larger"
        " --max-body",
        closes=True,
    )
