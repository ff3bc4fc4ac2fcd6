"""Who may use a server: API keys, names of hosts, and the gate in front of every route."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from typing import TYPE_CHECKING

from fastlstm.serve.http.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS = frozenset({"/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"})
"""For whoever watches the server; these answer without a key."""
NOBODY = b""
"""The tenant of all requests to a server without keys."""
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

    @property
    def are_several(self) -> bool:
        """Whether clients are told apart, and share what there is."""
        return len(set(self._digests)) > 1

    def tenant(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
        """Returns whose request it is, the digest of the key; None without a good key.

        There must be exactly one Authorization header. The time it takes says nothing about the
        keys.
        """
        given = [value for name, value in headers if name == b"authorization"]
        if len(given) != 1:
            return None
        scheme, _, key = given[0].partition(b" ")
        digest = _digest(key)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return digest if scheme.lower() == b"bearer" and any(matches) else None


class KeyGate:
    """Lets nothing but the open paths through without a key, whatever routes there are.

    Args:
        app: the application behind it.
        keys: what it asks for.
        own_name: where the server listens on this machine only, and without keys: it answers to
            addresses, localhost and this name. Empty: to any.
    """

    def __init__(self, app: ASGIApp, keys: Keys, own_name: str) -> None:
        self._app, self._keys = app, keys
        self._own_name = "" if keys else own_name.lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError 401 or 421, or goes on with the tenant in the scope's state."""
        path = scope["path"]
        if self._own_name and path not in OPEN_PATHS:
            _check_host(scope["headers"], self._own_name)
        is_page = path == PAGE_PATH and scope["method"] in ("GET", "HEAD")
        is_open = not self._keys or path in OPEN_PATHS or is_page
        tenant = NOBODY if is_open else self._keys.tenant(scope["headers"])
        if tenant is None:
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                None,
                "invalid_api_key",
                {"www-authenticate": "Bearer"},
            )
        scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)


def _check_host(headers: Iterable[tuple[bytes, bytes]], own: str) -> None:
    """Refuses names that anyone could have given this address.

    A web page may have its own name resolve to this machine, and would then be let in by the
    browser as if the server were its own (DNS rebinding). An address has no such owner.
    """
    given = b",".join(value for name, value in headers if name == b"host").decode("latin-1")
    if not given:
        return  # no browser
    name = re.sub(r":[0-9]*$", "", given).removeprefix("[").removesuffix("]").lower()
    if name != own and not name.endswith(".localhost") and not _is_address(name):
        raise ApiError(
            421,
            f"the Host header is '{given[:200]}'; without API keys this server answers to addresses"
            " and to localhost only: use one of these, or start it with --api-key-file",
            None,
            "unknown_host",
        )


def is_local(address: str) -> bool:
    """Whether an address that a socket is bound to can be reached from this machine only."""
    found = ipaddress.ip_address(address.split("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost"
    return True


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
