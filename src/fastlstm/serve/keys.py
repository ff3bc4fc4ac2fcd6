"""API keys: who may use a server, and the gate in front of every route."""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

from fastlstm.serve.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS = frozenset({"/health/live", "/health/ready"})
"""For whoever watches the server; these answer without a key."""
PAGE_PATH = "/"
"""The page may be fetched without a key; everything that it calls needs one."""


class Keys:
    """The keys that are accepted; none accepts everyone.

    Args:
        keys: exact texts.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode("utf-8")) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accepts(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether there is exactly one Authorization header and it carries a key.

        The time it takes says nothing about the keys.
        """
        given = [value for name, value in headers if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        digest = _digest(key)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


class KeyGate:
    """Lets nothing but the open paths through without a key, whatever routes there are.

    Args:
        app: the application behind it.
        keys: what it asks for.
    """

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError 401, or goes on."""
        path = scope["path"]
        is_page = path == PAGE_PATH and scope["method"] in ("GET", "HEAD")
        is_open = not self._keys or path in OPEN_PATHS or is_page
        if not is_open and not self._keys.accepts(scope["headers"]):
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                None,
                "invalid_api_key",
                {"www-authenticate": "Bearer"},
            )
        await self._app(scope, receive, send)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
