"""Which token comes next: temperature, top-k, top-p, repetition penalty; stop strings."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fastlstm.errors import NonFiniteError, PromptError

if TYPE_CHECKING:
    from numpy.typing import NDArray

PENALTY_WINDOW = 64
"""The repetition penalty looks at this many tokens back."""


@dataclass(frozen=True)
class Sampling:
    """How to choose the next token; checked when built.

    Attributes:
        temperature: divides the log probabilities; 0 takes the likeliest token always.
        top_k: choose among the k likeliest; 0 among all.
        top_p: choose among the likeliest whose joint probability just reaches this; 1 among all.
        repetition_penalty: multiplies the (negative) log probabilities of the last 64 tokens, so
            that above 1 makes them less likely; 1 is off.
        stop: end before this text, or any of these, would be written.
        seed: makes the choice repeatable; None draws a fresh one.

    Raises:
        PromptError: a value out of range; it is named.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    stop: str | tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        _require_number("temperature", self.temperature, 0.0, 1e6, "0 (greedy) or more")
        _require_number("top_p", self.top_p, 0.0, 1.0, "above 0 and at most 1", is_open=True)
        _require_number(
            "repetition_penalty", self.repetition_penalty, 0.0, 1e6, "above 0", is_open=True
        )
        _require_whole("top_k", self.top_k, "0 (all) or more")
        if self.seed is not None:
            _require_whole("seed", self.seed, "0 or more")
        for text in self.stops:
            if not isinstance(text, str) or not text:
                raise PromptError(f"stop is {text!r}, expected a text of at least one character")

    @property
    def stops(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def _require_number(
    name: str, value: object, low: float, high: float, expected: str, *, is_open: bool = False
) -> None:
    good = isinstance(value, int | float | np.floating | np.integer) and not isinstance(value, bool)
    if good:
        number = float(value)  # type: ignore[arg-type]
        good = math.isfinite(number) and low <= number <= high and not (is_open and number == low)
    if not good:
        raise PromptError(f"{name} is {value!r}, expected a number {expected}")


def _require_whole(name: str, value: object, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise PromptError(f"{name} is {value!r}, expected a whole number, {expected}")


class Sampler:
    """Chooses tokens from logits; one per stream of text.

    Args:
        settings: how to choose.
        vocab_size: V.
    """

    def __init__(self, settings: Sampling, vocab_size: int) -> None:
        self._settings = settings
        self._rng = np.random.Generator(np.random.Philox(settings.seed))
        self._recent: deque[int] = deque(maxlen=PENALTY_WINDOW)
        self._top_k = settings.top_k if 0 < settings.top_k < vocab_size else 0

    def saw(self, token: int) -> None:
        """Remembers a token, of the prompt or chosen, for the repetition penalty."""
        self._recent.append(token)

    def pick(self, logits: NDArray[np.float32]) -> int:
        """Returns the next token for `logits` `(V,)` and remembers it.

        Raises:
            NonFiniteError: the model's output is NaN or infinite.
        """
        settings = self._settings
        top = float(logits.max())
        if not math.isfinite(top):
            raise NonFiniteError("the model's output is not finite; its weights are damaged")
        scores = logits - top
        if settings.repetition_penalty != 1.0 and self._recent:
            scores = self._penalised(scores)
        token = int(scores.argmax()) if settings.temperature == 0 else self._draw(scores)
        self._recent.append(token)
        return token

    def _penalised(self, scores: NDArray[np.float32]) -> NDArray[np.float32]:
        log_p = scores - np.log(np.exp(scores).sum())
        recent = list(set(self._recent))
        log_p[recent] *= self._settings.repetition_penalty
        return np.asarray(log_p - log_p.max(), dtype=np.float32)

    def _draw(self, scores: NDArray[np.float32]) -> int:
        kept: NDArray[np.intp] | None = None
        if self._top_k:
            kept = np.argpartition(scores, -self._top_k)[-self._top_k :]
            scores = scores[kept]
        # float64: a temperature of 1e-6 must not overflow, and the sum must not drift
        weights = np.exp(scores.astype(np.float64) / self._settings.temperature)
        if self._settings.top_p < 1.0:
            order = np.argsort(-weights, kind="stable")
            mass = np.cumsum(weights[order])
            count = int(np.searchsorted(mass, self._settings.top_p * mass[-1])) + 1
            order = order[:count]
            kept = order if kept is None else kept[order]
            weights = weights[order]
        mass = weights.cumsum()
        index = int(mass.searchsorted(self._rng.random() * mass[-1], side="right"))
        index = min(index, len(mass) - 1)
        return index if kept is None else int(kept[index])


class StopText:
    """Lets text through until a stop string would be complete; holds back what may begin one.

    Args:
        stops: the strings; none lets everything through at once.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.is_done = False

    def push(self, text: str) -> str:
        """Returns what of the text so far may be written; sets `is_done` at a stop string."""
        if not self._stops:
            return text
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.is_done = True
            ready, self._held = self._held[: min(found)], ""
            return ready
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        ready, self._held = self._held[:cut], self._held[cut:]
        return ready

    def flush(self) -> str:
        """Returns the text held back, at the end."""
        ready, self._held = self._held, ""
        return ready


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
