"""`Sampling`: how to choose the next token; `StopText`: stop strings."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from fastlstm.errors import FormatError, PromptError, kind_of_value, nearest_hint
from fastlstm.system import hardware
from fastlstm.system.fields import is_number, is_whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PENALTY_WINDOW = 64
"""The repetition penalty looks at this many tokens back; no stop sequence is longer."""
MAX_SEED = (1 << 64) - 1
_MOST_TOKENS = (1 << 63) - 1
SMALLEST = 1e-30
"""The kernels treat smaller values as zero."""
_RANGES = {
    "temperature": (0.0, 1e6, "from 0 (greedy) to 1e6"),
    "top_p": (SMALLEST, 1.0, "above 0 and at most 1"),
    "repetition_penalty": (SMALLEST, 1e6, "above 0 and at most 1e6"),
    "min_p": (0.0, 1.0, "from 0 (none left out) to 1"),
    "frequency_penalty": (-1e6, 1e6, "from -1e6 to 1e6"),
    "presence_penalty": (-1e6, 1e6, "from -1e6 to 1e6"),
}
"""Least and largest value that the kernels take, and the words for them in messages."""


@dataclass(frozen=True)
class Sampling:
    """How to choose the next token; checked when built.

    Attributes:
        temperature: divides the log probabilities; 0 always takes the likeliest token.
        top_k: samples from the k likeliest tokens; 0 samples from all tokens.
        top_p: samples from the smallest set of likeliest tokens whose total probability reaches
            this value; 1 samples from all tokens.
        min_p: leaves out tokens less likely than this share of the likeliest token's probability; 0
            leaves out no token.
        repetition_penalty: multiplies the (negative) log probabilities of the last 64 tokens, so
            that values above 1 make these tokens less likely; 1 is off.
        frequency_penalty: subtracted from a token's logit for each time the token was written since
            the last prompt. Prompts and earlier text do not count.
        presence_penalty: subtracted from a token's logit if the token was written since the last
            prompt.
        logit_bias: added to the logits of these tokens.
        stop: end before this text, or one of these texts, is written.
        seed: makes the choice repeatable; None draws a new seed.

    Raises:
        PromptError: a value is out of range; the message names it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    stop: str | tuple[str, ...] = ()
    seed: int | None = None
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        for name, (low, high, expected) in _RANGES.items():
            _require_number(f"`{name}`", getattr(self, name), low, high, expected)
        _require_whole("`top_k`", self.top_k, "0 (all) or more")
        if self.seed is not None:
            _require_whole("`seed`", self.seed, f"from 0 to {MAX_SEED}", MAX_SEED)
        for name, kind, expected in (
            ("logit_bias", Mapping | None, "a dict of token: number"),
            ("stop", str | list | tuple, "a text, or a list of texts"),
        ):
            if not isinstance(value := getattr(self, name), kind):
                raise PromptError(f"`{name}` is {kind_of_value(value)}, expected {expected}")
        for token, bias in (self.logit_bias or {}).items():
            _require_whole("a token of `logit_bias`", token, "0 or more")
            _require_number(f"`logit_bias` of token {token}", bias, -1e6, 1e6, "from -1e6 to 1e6")
        for text in self.stops:
            if not isinstance(text, str) or not text:
                raise PromptError(f"`stop` is {text!r}, expected a non-empty text")

    @property
    def stops(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def native(self, vocab_size: int, stops: Iterable[Sequence[int]] = ()) -> Any:
        """Returns the settings as the kernels take them; draws a seed if it is None.

        `vocab_size` is V; `stops` are sequences of 1 to `PENALTY_WINDOW` tokens that end the text.

        Raises:
            PromptError: `logit_bias` names a token of V or more.
        """
        settings = hardware.native().DecodeSettings()
        for name in _RANGES:
            setattr(settings, name, float(getattr(self, name)))
        settings.top_k = min(int(self.top_k), vocab_size)
        settings.seed = secrets.randbits(64) if self.seed is None else int(self.seed)
        bias = {} if self.logit_bias is None else dict(self.logit_bias)
        for token in bias:
            if token >= vocab_size:
                raise PromptError(
                    f"logit_bias names token {token}, the vocabulary has 0 to {vocab_size - 1}"
                )
        settings.bias_tokens = [int(token) for token in bias]
        settings.biases = [float(value) for value in bias.values()]
        settings.stops = [[int(token) for token in stop] for stop in stops]
        return settings


def known_settings(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a run's generation_config.json; an unknown key is no error."""
    known = {*_RANGES, "top_k"}
    settings = {name: value for name, value in generation.items() if name in known}
    try:
        Sampling(**settings)
    except PromptError as error:
        raise FormatError(f"generation_config.json: {error!s:.200}") from None
    return settings


def sampling_of(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> Sampling:
    """Returns a run's settings, replaced by given ones; None counts as not given."""
    known = {field.name for field in fields(Sampling)}
    for name in given:
        if name not in known:
            raise PromptError(f"unknown setting '{name}'{nearest_hint(name, known)}")
    return Sampling(**{**defaults, **{k: v for k, v in given.items() if v is not None}})


def _require_number(name: object, value: object, low: float, high: float, expected: str) -> None:
    if not is_number(value) or not low <= value <= high:  # type: ignore[operator]
        raise PromptError(f"{name} is {value!r:.60}, expected a number {expected}")


def check_max_tokens(value: object, name: str = "max_tokens") -> None:
    """Raises PromptError unless this is a whole number that the kernels take."""
    _require_whole(name, value, f"from 0 to {_MOST_TOKENS}", _MOST_TOKENS)


def _require_whole(name: object, value: object, expected: str, most: float = math.inf) -> None:
    if not is_whole(value) or not 0 <= value <= most:  # type: ignore[operator]
        raise PromptError(f"{name} is {value!r:.60}, expected a whole number, {expected}")


class StopText:
    """Passes text until a stop string would be complete; holds back text that may start one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.is_done = False

    def push(self, text: str) -> str:
        """Returns the text that may be written now; sets `is_done` at a stop string."""
        if not self._stops:
            return text
        self._held += text
        found = [(at + len(s), at) for s in self._stops if (at := self._held.find(s)) >= 0]
        if found:  # the first that is complete, however the text was cut into pieces
            self.is_done = True
            ready, self._held = self._held[: min(found)[1]], ""
            return ready
        first = max(0, len(self._held) + 1 - max(map(len, self._stops)))
        starts = range(first, len(self._held) + 1)  # places where a stop string may have begun
        cut = next(at for at in starts if any(s.startswith(self._held[at:]) for s in self._stops))
        ready, self._held = self._held[:cut], self._held[cut:]
        return ready

    def flush(self) -> str:
        """Returns the text held back, at the end."""
        ready, self._held = self._held, ""
        return ready
