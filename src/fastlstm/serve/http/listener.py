"""The listening socket: no more connections than the process may have open files."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlstm.errors import ConfigError
from fastlstm.serve.http.errors import ApiError

if TYPE_CHECKING:
    from fastlstm.serve.http.protocol import Connection

_SPARE = 32
"""Files that the process may need besides its connections."""
_CLOSING = 8
"""Of these, connections told to close, which they do when the event loop turns."""
A_TURN = 64
"""Connections accepted or refused per turn of the event loop."""
_BACKLOG = 2048
"""Connections that wait in the kernel to be accepted."""
_WAITED_S = 1.0
"""Idle seconds after which a connection may be closed to make room."""
_SAY_AGAIN_S = 60.0


def max_connections(limit: int) -> int:
    """Returns how many connections may be open: `limit`, or fewer if `ulimit -n` says so."""
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if max_files == resource.RLIM_INFINITY:
        return limit
    folder = Path("/proc/self/fd")
    num_open = len(list(folder.iterdir())) if folder.is_dir() else _SPARE
    left = max_files - num_open - _SPARE
    if left < 1:
        raise ConfigError(
            f"the process may open {max_files} files, of which {num_open + _SPARE} are needed"
            " before the first connection; allow more with ulimit -n"
        )
    return min(limit, left)


class Listener(socket.socket):
    """A listening socket with a limited number of connections, of which `num_open` are open.

    Beyond the limit a new connection takes the place of an idle one; if none is idle, it is
    answered 503 and closed. asyncio accepts connections in a loop before it looks at any, and
    writes a traceback for each when files run out; so they are counted here.
    """

    num_open = 0
    _limit = sys.maxsize
    _make_room: Callable[[], bool] = staticmethod(lambda: False)
    _on_refused: Callable[[], object] = staticmethod(lambda: None)
    _spare: int | None = None

    def limit(
        self, limit: int, make_room: Callable[[], bool], on_refused: Callable[[], object]
    ) -> None:
        """Limits the connections; `make_room` returns whether it closed an idle one."""
        self._limit, self._make_room, self._on_refused = limit, make_room, on_refused
        self._spare = os.open(os.devnull, os.O_RDONLY)

    def listen(self, backlog: int = 0) -> None:
        # asyncio's `backlog` is the number it accepts per turn of the event loop.
        super().listen(_BACKLOG)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accepts a connection; BlockingIOError: there is none before the loop's next turn."""
        for _ in range(A_TURN):
            if self.num_open - self._limit >= _CLOSING:
                break
            try:
                accepted, address = super().accept()
            except OSError as error:
                if error.errno != errno.EMFILE or self._spare is None:
                    raise
                self._refuse_without_files()
                continue
            if self.num_open >= self._limit and not self._make_room():
                self._refuse(accepted)
                continue
            kind = (accepted.family, accepted.type, accepted.proto)
            connection = _Connection(*kind, accepted.detach())
            connection.listener = self
            self.num_open += 1
            return connection, address
        raise BlockingIOError

    def close(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        super().close()

    def _refuse(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.setblocking(False)
            connection.sendall(_ANSWER)
            connection.shutdown(socket.SHUT_WR)
            # Unread data would make the kernel reset the connection before the answer is read.
            connection.recv(1 << 16)
        self._on_refused()

    def _refuse_without_files(self) -> None:
        """Refuses one connection, in place of a file that is kept open for this."""
        assert self._spare is not None
        os.close(self._spare)
        self._spare = None
        try:
            self._refuse(super().accept()[0])
        finally:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)


class _Connection(socket.socket):
    """A connection, counted while it is open."""

    listener: Listener | None = None

    def close(self) -> None:
        if self.listener is not None:
            self.listener.num_open -= 1
            self.listener = None
        super().close()


class IdleConnections:
    """The connections that wait for a request, longest first.

    A client that holds all connections and sends nothing locks nobody out.
    """

    def __init__(self) -> None:
        self._since_s: dict[Connection, float] = {}

    def begin(self, connection: Connection) -> None:
        """A connection starts to wait for a request."""
        self._since_s.pop(connection, None)
        self._since_s[connection] = time.monotonic()

    def end(self, connection: Connection) -> None:
        """A whole request has arrived, or the connection has ended."""
        self._since_s.pop(connection, None)

    def make_room(self) -> bool:
        """Closes the connection that has waited longest; False if none has waited for long."""
        before_s = time.monotonic() - _WAITED_S
        while self._since_s:
            connection, since_s = next(iter(self._since_s.items()))
            if since_s > before_s:
                return False
            del self._since_s[connection]
            if connection.dismiss():
                return True
        return False


class Notice:
    """Warns that `limit` connections are open, at most once a minute."""

    def __init__(self, say: Callable[[str], object], limit: int) -> None:
        self._say, self._limit = say, limit
        self._next_s = 0.0

    def too_many(self) -> None:
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _SAY_AGAIN_S
        self._say(
            f"WARNING: {self._limit} connections are open, as many as this server takes (ulimit -n,"
            " --max-streams, --max-queue); to make room those that wait for a request are closed;"
            " where none does, more are answered 503"
        )


_FULL = "the server has as many connections as it takes; try again later"
_ANSWER = ApiError(503, _FULL, None, "overloaded", {"retry-after": "1"}, closes=True).response()
