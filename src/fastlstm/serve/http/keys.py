"""API keys and host names: which requests are accepted."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable

from starlette.types import Scope

from fastlstm.serve.http.errors import ApiError

_HEALTH = frozenset({"/health/live", "/health/ready"})
OPEN_PATHS = _HEALTH | {f"/v2{path}" for path in _HEALTH} | {"/health"}
"""Paths for monitoring, which need no key."""
NOBODY = b""
"""The tenant of all requests to a server without keys."""
PAGE_PATH = "/"
"""The page needs no key, but the requests that it sends do."""


class Keys:
    """The accepted keys; without any, everyone is accepted."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode("utf-8")).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    @property
    def are_several(self) -> bool:
        """Whether there are several tenants, which share the server."""
        return len(set(self._digests)) > 1

    def tenant(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
        """Returns the digest of a request's key, in constant time; None without a valid key.

        There must be exactly one Authorization header.
        """
        values = [value for name, value in headers if name == b"authorization"]
        if len(values) != 1:
            return None
        scheme, _, key = values[0].partition(b" ")
        digest = hashlib.sha256(key).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return digest if scheme.lower() == b"bearer" and any(matches) else None


def check_access(scope: Scope, keys: Keys, own_name: str) -> None:
    """Raises ApiError 401 or 421, or puts the tenant into the scope's state.

    Without a key only open paths are reached. Without `keys` a server on this machine answers only
    to `own_name`, localhost and addresses; with an empty `own_name` it answers to any name.
    """
    path = scope["path"]
    if own_name and not keys and path not in OPEN_PATHS:
        _check_host(scope["headers"], own_name.lower())
    is_page = path == PAGE_PATH and scope["method"] in ("GET", "HEAD")
    is_open = not keys or path in OPEN_PATHS or is_page
    tenant = NOBODY if is_open else keys.tenant(scope["headers"])
    if tenant is None:
        message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
        raise ApiError(401, message, None, "invalid_api_key", {"www-authenticate": "Bearer"})
    scope["state"]["tenant"] = tenant


def _check_host(headers: Iterable[tuple[bytes, bytes]], own: str) -> None:
    """Refuses names that anyone could have given this address (DNS rebinding).

    A web page may have its own name resolve to this machine; the browser would then let it in.
    """
    host = b",".join(value for name, value in headers if name == b"host").decode("latin-1")
    if not host:
        return  # not a browser
    name = re.sub(r":[0-9]*$", "", host).removeprefix("[").removesuffix("]").lower()
    if name != own and not name.endswith(".localhost") and not _is_address(name):
        message = (
            f"the Host header is '{host[:200]}'; without API keys this server answers to addresses"
            " and to localhost only: use one of these, or start it with --api-key-file"
        )
        raise ApiError(421, message, None, "unknown_host")


def is_local(address: str) -> bool:
    """Whether an address that a socket is bound to can be reached from this machine only."""
    parsed = ipaddress.ip_address(address.split("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def _is_address(name: str) -> bool:
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return name == "localhost"
