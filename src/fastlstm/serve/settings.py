"""What can be set about a server; the command line draws its options from here."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from fastlstm.errors import ConfigError

_UNLIMITED = 1 << 40
_BOUNDS = {
    "port": (0, 65535),
    "threads": (0, 1024),
    "max_streams": (1, 65536),
    "max_queue": (0, 1 << 20),
    "prefix_cache": (0, 65536),
    "max_sequences": (0, 1 << 24),
    "sequence_idle": (0.05, _UNLIMITED),
    "max_tokens": (1, _UNLIMITED),
    "max_prompt_tokens": (1, _UNLIMITED),
    "max_scored": (0, _UNLIMITED),
    "max_numbers": (1, _UNLIMITED),
    "max_body": (1024, 1 << 30),
    "header_timeout": (0.05, 3600),
    "body_timeout": (0.05, 3600),
    "stall": (0.05, 86400),
    "watchdog": (0.1, 86400),
    "grace": (0, 86400),
}


@dataclass(frozen=True)
class Settings:
    """A server's address and limits; checked when built.

    Attributes:
        host: address to listen on; anything but this machine's own should have a key.
        port: port to listen on; 0 takes a free one.
        weights: format of the weights in memory.
        threads: threads of the engine; 0 is one on two cores, on more what proves fastest.
        max_streams: texts written at the same time, each of a request's n counts; windows forecast
            in one pass.
        max_queue: texts, or windows, admitted beyond these, which wait; what comes then is answered
            429, with windows 503.
        prefix_cache: prompts whose states are kept, of each API key: one that begins with one of
            them is read from there on; 0 keeps none.
        max_sequences: sequences whose newest rows are kept.
        sequence_idle: seconds after which a sequence that nobody asks for is forgotten.
        max_tokens: most tokens that one text may ask for.
        max_prompt_tokens: longest prompt.
        max_scored: tokens that answers under way may hold together: n x prompt with echo, n x
            max_tokens with logprobs that are not streamed.
        max_numbers: most numbers in an answer of forecasts: windows x steps x targets, once for the
            forecast and once for each quantile.
        max_body: largest request body, in bytes.
        header_timeout: seconds in which a request's headers must have come.
        body_timeout: seconds in which its body must have come.
        stall: seconds after which a client that takes nothing of its text is cut off.
        watchdog: seconds without progress after which /health/live answers 503.
        grace: seconds that texts under way have after SIGTERM.
        log: a line per request on standard error: JSON, or plain text on a terminal.

    Raises:
        ConfigError: a value out of range; it is named.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    weights: Literal["fp32", "bf16", "int8"] = "int8"
    threads: int = 0
    max_streams: int = 256
    max_queue: int = 256
    prefix_cache: int = 64
    max_sequences: int = 1024
    sequence_idle: float = 3600.0
    max_tokens: int = 100_000
    max_prompt_tokens: int = 200_000
    max_scored: int = 1 << 20
    max_numbers: int = 1 << 20
    max_body: int = 1 << 20
    header_timeout: float = 10.0
    body_timeout: float = 30.0
    stall: float = 30.0
    watchdog: float = 10.0
    grace: float = 30.0
    log: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name not in _BOUNDS:
                continue
            low, high = _BOUNDS[field.name]
            value = getattr(self, field.name)
            if not math.isfinite(value) or not low <= value <= high:
                flag = "--" + field.name.replace("_", "-")
                raise ConfigError(f"{flag} is {value}, expected {low} to {high}")


GROUPS: dict[str, tuple[str, ...]] = {
    "address": ("host", "port"),
    "engine": ("weights", "threads", "max_streams", "max_queue", "prefix_cache"),
    "sequences": ("max_sequences", "sequence_idle"),
    "limits": (
        "max_tokens",
        "max_prompt_tokens",
        "max_scored",
        "max_numbers",
        "max_body",
        "header_timeout",
        "body_timeout",
        "stall",
        "watchdog",
        "grace",
    ),
    "output": ("log",),
}
"""Headings of the help text."""
