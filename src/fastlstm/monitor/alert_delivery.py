"""Alerts handed to a command and to a web address, by a thread: nothing waits for them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from urllib.parse import urlsplit

from fastlstm.errors import UsageError
from fastlstm.system.environment import with_variables

_TIMEOUT_S = 30.0
_POST_TIMEOUT_S = 10.0
_RETRIES_S = (1.0, 4.0, 16.0)
_MAX_WAITING = 1000


class AlertDelivery:
    """Runs a command and posts to a web address for each alert, in order.

    Args:
        command: for `sh -c`; the alert is JSON on standard input, and in FASTLSTM_ALERT_ variables.
        url: of http or https; gets the alert as JSON.
        say: called with what went wrong.

    Raises:
        UsageError: the address is no web address.
    """

    def __init__(self, command: str | None, url: str | None, say: Callable[[str], None]) -> None:
        self._command, self._url, self._say = command, url, say
        self._host = "" if url is None else _host_of(url)
        self._waiting: queue.Queue[dict[str, object] | None] = queue.Queue(_MAX_WAITING)
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def send(self, alert: dict[str, object]) -> None:
        """Hands an alert over; one of more than 1,000 that wait is dropped."""
        if self._command is None and self._url is None:
            return
        try:
            self._waiting.put_nowait(alert)
        except queue.Full:
            self._say("an alert was not delivered: 1,000 others wait")

    def close(self, timeout_s: float = 60.0) -> None:
        """Waits until all is delivered, at most so long; then a command that runs is ended."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._say("not all alerts were delivered")
            if self._process is not None:
                _kill(self._process)

    def _work(self) -> None:
        while (alert := self._waiting.get()) is not None:
            data = json.dumps(alert).encode("ascii")
            if self._command is not None:
                self._execute(self._command, alert, data)
            if self._url is not None:
                self._post(self._url, data)

    def _execute(self, command: str, alert: dict[str, object], data: bytes) -> None:
        values = {f"FASTLSTM_ALERT_{name.upper()}": _plain(part) for name, part in alert.items()}
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", command],
                env=with_variables(values),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # so that what it starts can be ended with it
            )
        except (OSError, ValueError) as error:
            self._say(f"--exec failed: {type(error).__name__}")
            return
        self._process = process
        try:
            process.communicate(data, timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            _kill(process)
            process.wait()
            self._say(f"--exec was ended: it took more than {_TIMEOUT_S:g} s")
            return
        finally:
            self._process = None
        if process.returncode:
            self._say(f"--exec ended with exit status {process.returncode}")

    def _post(self, url: str, data: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        error = ""
        for wait_s in (*_RETRIES_S, None):
            try:
                request = urllib.request.Request(url, data, headers, method="POST")
                with urllib.request.urlopen(request, timeout=_POST_TIMEOUT_S):
                    return
            except (OSError, ValueError, http.client.HTTPException) as failure:
                error = str(failure) or type(failure).__name__  # an error status is an OSError
            if wait_s is not None:
                time.sleep(wait_s)
        self._say(f"--webhook: {self._host} did not take an alert ({error})")


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


def _host_of(url: str) -> str:
    part = "host"
    with contextlib.suppress(ValueError):  # of a port or of an IPv6 address
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https"):
            part = "scheme"
        elif parts.hostname:
            part = "port"
            if parts.port != 0:
                return parts.hostname
    # The address itself may be a secret.
    raise UsageError(f"--webhook has no valid {part}, expected an address as https://host/path")


def _plain(value: object) -> str:
    return str(value).replace("\0", "")
