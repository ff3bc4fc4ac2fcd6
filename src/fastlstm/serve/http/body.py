"""Receiving a request's body: the right type, bounded in size and time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fastlstm.serve.http.errors import ApiError, Disconnected

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import Receive, Scope

_SHORT = 1 << 16
"""Bytes of a body that are read as they arrive."""
_PARTS_PER_TURN = 4


class Bodies:
    """Receives bodies, of long ones only a few parts per turn of the event loop (`turns`)."""

    def __init__(self, max_bytes: int, timeout_s: float) -> None:
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self.turns = asyncio.Semaphore(_PARTS_PER_TURN)

    async def read_json(self, scope: Scope, receive: Receive) -> bytes:
        """Returns the body of a request whose content type is JSON.

        Raises:
            ApiError: another type (415), too long (413), too slow (408).
            Disconnected: the client has left.
        """
        headers = dict(scope["headers"])
        _check_type(headers)
        if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise ApiError(415, "the body is compressed; send it without Content-Encoding")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > self._max_bytes:
            raise self._too_long()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._received(receive)
        except TimeoutError:
            message = f"the body did not come within {self._timeout_s:g} s; send it faster"
            raise ApiError(408, message, closes=True) from None

    async def _received(self, receive: Receive) -> bytes:
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_bytes:
                raise self._too_long()
            if not message.get("more_body", False):
                return b"".join(parts)
            if size > _SHORT:
                async with self.turns:
                    await asyncio.sleep(0)

    def _too_long(self) -> ApiError:
        what = "send less, or start the server with a larger --max-body"
        message = f"the body has more than {self._max_bytes} bytes; {what}"
        return ApiError(413, message, closes=True)


def _check_type(headers: Mapping[bytes, bytes]) -> None:
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    # Any web page may send a form to this machine; none may send this type.
    if kind != b"application/json":
        came, what = (
            kind[:100].decode("latin-1"),
            "with curl add -H 'Content-Type: application/json'",
        )
        raise ApiError(415, f"the content type is '{came}', expected application/json; {what}")
