"""The log line of a request: JSON for programs, plain text for a terminal."""

from __future__ import annotations

import datetime
import json
import time
from typing import TYPE_CHECKING
from urllib.parse import quote

from fastlstm.errors import counted
from fastlstm.report.terminal import clock

if TYPE_CHECKING:
    from fastlstm.serve.http.access import Record

GONE = 499
"""The status of a request whose client left before there was one."""
_PLAIN = "/:@!$&'()*+,;="
"""Characters of a path besides letters and digits; all others are written as %XX."""


def json_line(record: Record, client: str, method: str, path: str) -> str:
    """Returns a request that has ended as JSON."""
    now = datetime.datetime.now(datetime.UTC)
    line = {
        "time": now.isoformat(timespec="milliseconds"),
        "id": record.id,
        "client": client,
        "key": record.key or None,
        "method": method,
        "path": path,
        "status": record.status or GONE,
        "outcome": record.outcome,
        "seconds": round(time.monotonic() - record.start_s, 4),
        "first_chunk_s": record.first_chunk_s and round(record.first_chunk_s, 4),
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "windows": record.windows,
    }
    # ASCII JSON: line ends and escape codes in a path come out as \\n and \\u001b.
    return json.dumps(line)


def terminal_line(record: Record, client: str, method: str, path: str) -> str:
    """Returns a request that has ended as plain text.

    ``12:03:07  POST /v1/completions  200  34 tokens  12 ms  key a1b2``; also why the answer was not
    completed, and after a server error the request's id, as in the traceback.
    """
    parts = [
        f"{datetime.datetime.now():%H:%M:%S}",
        f"{quote(method, _PLAIN)} {quote(path, _PLAIN, errors='replace')}",
        str(record.status or GONE),
        counted(record.completion_tokens, "token") if record.completion_tokens else "",
        counted(record.windows, "window") if record.windows else "",
        _duration(time.monotonic() - record.start_s),
        record.failure,
        f"key {record.key}" if record.key else "",
        f"id {record.id}" if record.outcome == "failed" else "",
    ]
    return "  ".join(part for part in parts if part)


def _duration(seconds: float) -> str:
    if seconds < 0.0005:
        return "<1 ms"
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 60 else clock(seconds)
