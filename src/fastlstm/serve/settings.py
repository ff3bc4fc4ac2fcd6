"""The options of `fastlstm serve`, on the command line and in Python."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from fastlstm.errors import ConfigError
from fastlstm.system.fields import Device

_UNLIMITED = 1 << 40


def _limited(default: float, low: float, high: float) -> Any:
    return field(default=default, metadata={"bounds": (low, high)})


@dataclass(frozen=True)
class Settings:
    r"""A server's address and limits; checked when built.

    Attributes:
        host: address to listen on; if other machines reach it, use API keys.
        port: port to listen on; 0 takes a free one.
        device: for texts, auto uses a GPU from 64 max_streams on, or the device that generate has
            measured as faster; forecasts use a GPU with cuda only.
        weights: format of the weights in memory; default is the format of a compressed run, else
            int8; a GPU takes fp32, bf16 or fp16 (its default).
        threads: threads of the engine; 0 chooses: one on two cores, the fastest number on more.
        max_streams: texts generated at the same time, where a request counts as its n texts; or
            windows forecast in one pass.
        max_queue: texts or windows that may wait; further requests are answered 429, and 503 for
            forecasts.
        prefix_cache: states of prompts kept per API key; a prompt with the same beginning continues
            from there; 0 keeps none.
        chat_template: a message of a chat in the prompt, `\n` for a line end. An answer ends at the
            text after {content} or, if that is one line end, at a line that begins with a label.
        chat_user: the {role} of the user's messages without a name.
        chat_assistant: the {role} of the answers.
        max_sequences: sequences kept on the server, each with its newest rows.
        sequence_idle: seconds without a request after which a sequence is forgotten.
        max_tokens: largest max_tokens of a request.
        max_prompt_tokens: longest prompt.
        max_scored: tokens that all pending answers may repeat or score: n x prompt with echo, n x
            max_tokens with logprobs that are not streamed.
        max_numbers: numbers in an answer of forecasts: windows x steps x targets, once for the
            forecast and once for each quantile.
        max_body: largest request body, in bytes; a CSV may have 8 times as many.
        header_timeout: seconds in which a request's headers must arrive.
        body_timeout: seconds in which a request's body must arrive.
        stall: seconds after which a client that reads nothing of its answer is disconnected.
        watchdog: seconds without progress after which /health/live answers 503.
        grace: seconds that pending answers have after SIGTERM.
        log: a line per request on standard error: JSON, or plain text on a terminal.

    Raises:
        ConfigError: a value out of range; it is named.
    """

    host: str = "127.0.0.1"
    port: int = _limited(8000, 0, 65535)
    device: Device = "auto"
    weights: Literal["fp32", "bf16", "int8", "int4"] | None = None
    threads: int = _limited(0, 0, 1024)
    max_streams: int = _limited(256, 1, 65536)
    max_queue: int = _limited(256, 0, 1 << 20)
    prefix_cache: int = _limited(64, 0, 65536)
    chat_template: str = "{role}: {content}\\n"
    chat_user: str = "user"
    chat_assistant: str = "assistant"
    max_sequences: int = _limited(1024, 0, 1 << 24)
    sequence_idle: float = _limited(3600.0, 0.05, _UNLIMITED)
    max_tokens: int = _limited(100_000, 1, _UNLIMITED)
    max_prompt_tokens: int = _limited(200_000, 1, _UNLIMITED)
    max_scored: int = _limited(1 << 20, 0, _UNLIMITED)
    max_numbers: int = _limited(1 << 20, 1, _UNLIMITED)
    max_body: int = _limited(1 << 20, 1024, 1 << 30)
    header_timeout: float = _limited(10.0, 0.05, 3600)
    body_timeout: float = _limited(30.0, 0.05, 3600)
    stall: float = _limited(30.0, 0.05, 86400)
    watchdog: float = _limited(10.0, 0.1, 86400)
    grace: float = _limited(30.0, 0, 86400)
    log: bool = True

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            bounds = option.metadata.get("bounds")
            if bounds is not None and not bounds[0] <= value <= bounds[1]:  # nor is NaN
                low, high = bounds
                flag = "--" + option.name.replace("_", "-")
                raise ConfigError(f"{flag} is {value}, expected {low} to {high}")
        for name in ("user", "assistant"):
            if not getattr(self, f"chat_{name}").strip():
                raise ConfigError(f"--chat-{name} is empty, expected a label such as '{name}'")
        head, end = self.chat_parts
        if "{role}" not in head or not end or self.chat_template.count("{content}") != 1:
            expected = "expected {role}, then {content} and an end, as in '{role}: {content}\\n'"
            raise ConfigError(f"--chat-template is '{self.chat_template}', {expected}")

    @property
    def chat_parts(self) -> tuple[str, str]:
        """`chat_template` before and after {content}."""
        head, _, end = self.chat_template.replace("\\n", "\n").partition("{content}")
        return head, end


GROUPS = {
    "address": "host port",
    "engine": "device weights threads max_streams max_queue prefix_cache",
    "chat": "chat_template chat_user chat_assistant",
    "sequences": "max_sequences sequence_idle",
    "limits": "max_tokens max_prompt_tokens max_scored max_numbers max_body header_timeout"
    " body_timeout stall watchdog grace",
    "output": "log",
}
