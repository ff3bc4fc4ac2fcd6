"""The listening socket: it takes no more connections than the process may have open files."""

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
"""Files that the process may need beside its connections."""
_CLOSING = 8
"""Of these, the connections that were told to close: they do so when the event loop turns."""
A_TURN = 64
"""Connections that are taken or refused before the event loop turns: others are to be served."""
_BACKLOG = 2048
"""Connections that wait in the kernel to be taken."""
_WAITED_S = 1.0
"""A connection that has waited so long for a request may be closed to make room."""
_SAY_AGAIN_S = 60.0


def max_connections(most: int) -> int:
    """Returns how many connections may be open: `most`, or what the process's limit leaves.

    Raises:
        ConfigError: it leaves none.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return most
    folder = Path("/proc/self/fd")
    num_open = len(list(folder.iterdir())) if folder.is_dir() else _SPARE
    left = limit - num_open - _SPARE
    if left < 1:
        raise ConfigError(
            f"the process may open {limit} files, of which {num_open + _SPARE} are needed before"
            " the first connection; allow more with ulimit -n"
        )
    return min(most, left)


class Listener(socket.socket):
    """A listening socket that has a bounded number of connections.

    One too many is taken in place of one that waits for a request; where none does, it is answered
    503 and closed. asyncio accepts connections in a loop before any of them is looked at, and when
    files run out writes a traceback for each; so it is here that they are counted.

    Attributes:
        most: connections at a time.
        num_open: connections that are open.
        make_room: closes a connection and says whether there was one to close.
        on_refused: is called for each that is not taken.
    """

    most = sys.maxsize
    num_open = 0
    make_room: Callable[[], bool] = staticmethod(lambda: False)
    on_refused: Callable[[], object] = staticmethod(lambda: None)
    _spare: int | None = None

    def limit(
        self, most: int, make_room: Callable[[], bool], on_refused: Callable[[], object]
    ) -> None:
        """Sets how many connections may be open; before there is no limit."""
        self.most, self.make_room, self.on_refused = most, make_room, on_refused
        self._spare = os.open(os.devnull, os.O_RDONLY)

    def listen(self, backlog: int = 0) -> None:
        """Begins to listen; asyncio's `backlog` is what it accepts before the event loop turns."""
        super().listen(_BACKLOG)

    def accept(self) -> tuple[socket.socket, Any]:
        """Returns the next connection; those that are too many are refused on the way.

        Raises:
            BlockingIOError: there is none, or it is to be taken when the event loop has turned.
        """
        for _ in range(A_TURN):
            if self.num_open - self.most >= _CLOSING:
                break
            try:
                given, address = super().accept()
            except OSError as error:
                if error.errno != errno.EMFILE or self._spare is None:
                    raise
                self._refuse_without_files()
                continue
            if self.num_open >= self.most and not self.make_room():
                self._refuse(given)
                continue
            connection = _Connection(given.family, given.type, given.proto, given.detach())
            connection.listener = self
            self.num_open += 1
            return connection, address
        raise BlockingIOError

    def close(self) -> None:
        """Ends listening."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        super().close()

    def _refuse(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.setblocking(False)
            connection.sendall(_ANSWER)
            connection.shutdown(socket.SHUT_WR)
            # What the client has sent must be taken, or the end of the connection would overtake
            # the answer.
            connection.recv(1 << 16)
        self.on_refused()

    def _refuse_without_files(self) -> None:
        """Refuses one, by a file that is kept open to make room for it."""
        assert self._spare is not None
        os.close(self._spare)
        self._spare = None
        try:
            self._refuse(super().accept()[0])
        finally:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)


class _Connection(socket.socket):
    """A connection that is counted while it is open."""

    listener: Listener | None = None

    def close(self) -> None:
        if self.listener is not None:
            self.listener.num_open -= 1
            self.listener = None
        super().close()


class IdleConnections:
    """The connections that wait for a request, those first that have waited longest.

    So whoever holds all connections and sends nothing keeps nobody out.
    """

    def __init__(self) -> None:
        self._since_s: dict[Connection, float] = {}

    def begin(self, connection: Connection) -> None:
        """A connection waits for a request, from now on."""
        self._since_s.pop(connection, None)
        self._since_s[connection] = time.monotonic()

    def end(self, connection: Connection) -> None:
        """A whole request has come, or the connection has ended."""
        self._since_s.pop(connection, None)

    def make_room(self) -> bool:
        """Closes the connection that has waited longest; False where none has waited for long."""
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
    """Says that there are too many connections: at once, and not again within a minute.

    Args:
        say: is given the line.
        most: connections that may be open.
    """

    def __init__(self, say: Callable[[str], object], most: int) -> None:
        self._say, self._most = say, most
        self._next_s = 0.0

    def too_many(self) -> None:
        """Is to be called for each connection that is one too many."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _SAY_AGAIN_S
        self._say(
            f"WARNING: {self._most} connections are open, as many as this server takes (ulimit -n,"
            " --max-streams, --max-queue); to make room those that wait for a request are closed;"
            " where none does, more are answered 503"
        )


def _answer() -> bytes:
    error = ApiError(
        503, "the server has as many connections as it takes; try again later", None, "overloaded"
    )
    return (
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
        b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(error.body), error.body)
    )


_ANSWER = _answer()
