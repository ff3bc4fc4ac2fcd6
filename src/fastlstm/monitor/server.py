"""The local server of `fastlstm monitor`: one page, read-only, for this machine alone."""

from __future__ import annotations

import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fastlstm.errors import ConfigError
from fastlstm.monitor.page import body, page
from fastlstm.monitor.run_summary import RunIndex

_HOST = "127.0.0.1"
_POLL_S = 0.75
"""Least interval between readings; the page asks once a second, so it shows an event within 2 s."""
_MAX_THREADS = 200
_REFRESH_S = 15.0
"""Most seconds between bodies, because a killed process changes its state without an event."""


class LivePage:
    """The newest body of the page; reads runs only on request."""

    def __init__(self, index: RunIndex, root: Path) -> None:
        self._index, self._root = index, root
        self._lock = threading.Lock()
        self._read_at = self._made_at = float("-inf")
        self._body = ""

    def body(self) -> str:
        with self._lock:
            now = time.monotonic()
            if now - self._read_at >= _POLL_S:
                self._read_at = now
                if self._index.update() or now - self._made_at >= _REFRESH_S:
                    self._body = body(list(self._index.runs.values()), self._root)
                    self._made_at = now
            return self._body


class MonitorServer(ThreadingHTTPServer):
    """Serves a live page at 127.0.0.1; `port` 0 takes a free one. Raises ConfigError: the port is
    taken."""

    daemon_threads = True

    def __init__(self, live: LivePage, port: int) -> None:
        self.live = live
        try:
            super().__init__((_HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"port {port} cannot be used ({reason}); choose another") from error

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Returns whether there is a thread for one more connection."""
        del request, client_address
        return threading.active_count() < _MAX_THREADS

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: MonitorServer
    timeout = 30.0

    def do_GET(self) -> None:
        """Answers with the page or its newest body, only for this host name."""
        port = self.server.server_port
        if self.headers.get("Host") not in (f"{_HOST}:{port}", f"localhost:{port}"):
            # A web page with a name that resolves to this machine.
            self.send_error(403, "another host")
        elif self.path == "/":
            self._send(page(self.server.live.body(), is_live=True))
        elif self.path == "/body":
            self._send(self.server.live.body().encode("utf-8", "replace"))
        else:
            self.send_error(404)

    def _send(self, data: bytes) -> None:
        self.send_response(200)
        headers = {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Length": str(len(data)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "X-Frame-Options": "DENY",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing: the terminal shows the address only."""
