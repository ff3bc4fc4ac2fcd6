"""Reads /metrics of a running `fastlstm serve`, with the standard library."""

from __future__ import annotations

import http.client
import ipaddress
import re
import socket
import time
import urllib.error
import urllib.request
from collections import defaultdict
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from fastlstm.errors import CommandError, UsageError

_TIMEOUT_S = 5.0
_MAX_BYTES = 4 << 20
_MAX_COUNT = 1e18
"""No server has counted so far; a larger number is damaged."""
_TOTALS = ("requests", "tokens_written", "request_seconds", "send_wait_seconds")
_PHASES = {
    "engine_seconds": ("model", "output", "blocked", "idle"),
    "http_seconds": ("parse", "encode", "other", "idle"),
    "text_seconds": ("queue", "model", "output", "client"),
}
_ABOUT = ("name", "hash", "weights", "threads", "threads_used", "max_streams", "max_queue")
_LABELS = r'(?:\w+="(?:[^"\\\n]|\\.)*",?)*'
_SAMPLE = re.compile(rf"^fastlstm_(\w+?)(?:\{{({_LABELS})\}})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\\n]|\\.)*)"')
_ESCAPED = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}


@dataclass(frozen=True)
class Reading:
    """The counters of a server at one moment.

    Attributes:
        time_s: when it was read, `time.perf_counter`.
        totals: sums over labels, by name without "fastlstm_" and "_total".
        phases: seconds by phase, by name of the counter.
        model: labels of the model's info.
    """

    time_s: float
    totals: dict[str, float]
    phases: dict[str, dict[str, float]]
    model: dict[str, str]


class ServerClient:
    """Reads the metrics of a server.

    Args:
        url: such as http://127.0.0.1:8000.
        key: API key; empty for none.

    Attributes:
        url: without a path.
        host, port: of it.

    Raises:
        UsageError: not a URL of a server.
    """

    def __init__(self, url: str, key: str = "") -> None:
        expected = "expected one such as http://127.0.0.1:8000"
        try:
            parts = urlsplit(url)
            port, host = parts.port, parts.hostname
        except ValueError as error:
            raise UsageError(f"{url} is no address of a server ({error}), {expected}") from None
        has_more = parts.path.strip("/") or parts.query or parts.fragment or parts.username
        if parts.scheme not in ("http", "https") or not host or has_more:
            raise UsageError(f"{url} is no address of a server, {expected}")
        if not key.isascii() or not key.isprintable():
            raise UsageError("the API key has characters that no header can have")
        self.url, self.host = f"{parts.scheme}://{parts.netloc}", host
        self.port = port or (443 if parts.scheme == "https" else 80)
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        # A proxy of the environment would be asked for this machine's own servers, too.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)

    def loopback_address(self) -> str:
        """Returns the address of a server of this machine.

        Raises:
            UsageError: it is another machine's, or no address at all.
        """
        try:
            found = [str(one[4][0]) for one in socket.getaddrinfo(self.host, self.port)]
        except OSError as error:
            raise UsageError(f"there is no host {self.host} ({error.strerror or error})") from None
        if not all(ipaddress.ip_address(one.split("%")[0]).is_loopback for one in found):
            raise UsageError(
                f"--load drives servers of this machine only, {self.host} is another; leave it out"
                " and have clients send requests meanwhile"
            )
        return found[0]

    def read(self) -> Reading:
        """Returns the counters now.

        Raises:
            UsageError: nothing there, not a server of fastlstm, not of a text model, or the API key
                is missing or wrong.
        """
        request = urllib.request.Request(f"{self.url}/metrics", headers=self.headers)
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                data = _read_all(answer)
        except urllib.error.HTTPError as error:
            error.close()
            raise self._refused(error.code) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            why = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
            raise UsageError(
                f"no answer at {self.url} ({why}); start one with: fastlstm serve RUN"
            ) from None
        now_s = time.perf_counter()
        text = data.decode("utf-8", "replace") if len(data) <= _MAX_BYTES else ""
        return self._parsed(text, now_s)

    def _refused(self, status: int) -> UsageError:
        if status == 401:
            what = "wrong" if self.headers else "missing"
            return UsageError(
                f"{self.url}/metrics needs an API key and it is {what}: give --api-key-file, or set"
                " FASTLSTM_API_KEY"
            )
        return UsageError(
            f"{self.url}/metrics answered {status}, expected a server started with fastlstm serve"
        )

    def _parsed(self, text: str, now_s: float) -> Reading:
        totals, model = defaultdict[str, float](float), dict[str, str]()
        phases = defaultdict[str, dict[str, float]](dict)
        for name, labels, value in _SAMPLE.findall(text):
            name = name.removesuffix("_total")
            found = {key: _plain(label) for key, label in _LABEL.findall(labels)}
            try:
                number = float(value)
            except ValueError:
                continue
            if not 0.0 <= number <= _MAX_COUNT:  # NaN too
                continue
            if name == "model_info":
                model = found
            elif "phase" in found:
                phases[name][found["phase"]] = number
            totals[name] += number
        if "requests" not in totals and "slots" not in totals:
            raise UsageError(
                f"{self.url}/metrics is of another program, expected a server started with fastlstm"
                " serve"
            )
        if "engine_seconds" not in phases or "text_seconds" not in phases:
            raise UsageError(
                f"the server at {self.url} counts no seconds by phase: it is of an older fastlstm;"
                " start it with this one"
            )
        if not model:
            raise UsageError(
                f"the server at {self.url} serves no text model, or has not loaded it yet; profile"
                " measures servers of text models"
            )
        totals.setdefault("requests", 0.0)  # it has no label before the first one
        is_whole = all(name in totals for name in _TOTALS) and all(
            part in phases[name] for name, parts in _PHASES.items() for part in parts
        )
        if not is_whole or not _is_known(model):
            raise UsageError(
                f"{self.url}/metrics is damaged or of another version of fastlstm; start the server"
                " with this one"
            )
        return Reading(now_s, dict(totals), dict(phases), model)


def change(first: Reading, last: Reading) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Returns totals and phases of the time between two readings.

    Raises:
        CommandError: the server was started anew in between.
    """
    totals = {name: value - first.totals.get(name, 0.0) for name, value in last.totals.items()}
    phases = {
        name: {phase: value - first.phases[name].get(phase, 0.0) for phase, value in new.items()}
        for name, new in last.phases.items()
        if name in first.phases
    }
    parts = [value for new in phases.values() for value in new.values()]
    if first.model != last.model or totals["tokens_written"] < 0 or min(parts) < -1.0:
        raise CommandError("the server was started anew while it was measured; measure again")
    return totals, phases


def _read_all(answer: http.client.HTTPResponse) -> bytes:
    """Returns a body, one byte more than allowed of a longer one; raises OSError if it lasts."""
    parts, end_s = list[bytes](), time.monotonic() + _TIMEOUT_S
    while (part := answer.read1(_MAX_BYTES + 1)) and sum(map(len, parts)) <= _MAX_BYTES:
        parts.append(part)
        if time.monotonic() > end_s:
            raise TimeoutError("timed out")
    return b"".join(parts)


def _is_known(model: dict[str, str]) -> bool:
    """Whether the labels of a model's info have what they should."""
    if not all(name in model and "\0" not in model[name] for name in _ABOUT):
        return False
    counts = [model["max_streams"], *(t for t in [model["threads_used"]] if t != "auto")]
    return all(re.fullmatch(r"[0-9]{1,9}", count) for count in counts)


def _plain(label: str) -> str:
    return re.sub(r"\\[n\"\\]", lambda match: _ESCAPED[match[0]], label)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The API key must not go to another server."""

    def redirect_request(self, *args: Any, **more: Any) -> None:
        del args, more
