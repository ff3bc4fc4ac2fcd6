"""How fast a run goes: rates since the last progress line, and the time it still needs."""

from __future__ import annotations

import math
import time
from typing import Any, Protocol


class _Plan(Protocol):
    @property
    def flop_per_token(self) -> float: ...
    @property
    def ceiling_gflops(self) -> float: ...


class ThroughputMeter:
    """Collects steps between two progress lines.

    Args:
        plan: for the operations per token and the ceiling.
        tokens_per_char: tokens per character of the text.

    Attributes:
        evaluation_s: seconds of the newest evaluation, 0 before the first.
        save_s: seconds of the newest checkpoint.
        seconds_per_token: of a training step, a moving mean; 0 before the first.
    """

    _LOG_INTERVAL_S = 1.0

    def __init__(self, plan: _Plan, tokens_per_char: float) -> None:
        self._plan = plan
        self._tokens_per_char = tokens_per_char
        self.evaluation_s = 0.0
        self.save_s = 0.5
        self._wait_s = 0.0
        self.seconds_per_token = 0.0
        self._clear()

    def _clear(self) -> None:
        self._loss = self._norm = self._seconds = 0.0
        self._tokens = self._steps = 0
        self._since = time.perf_counter()

    def add_step(self, loss: float, norm: float, tokens: int, seconds: float) -> None:
        """Records one optimizer step: mean nats per token, gradient norm, tokens and seconds."""
        self._loss += loss * tokens
        self._norm += norm
        self._tokens += tokens
        self._steps += 1
        self._seconds += seconds
        rate = seconds / tokens
        self.seconds_per_token = (
            rate if not self.seconds_per_token else 0.9 * self.seconds_per_token + 0.1 * rate
        )

    def forget_wait(self) -> None:
        """Tells that the loader, and with it its count of waiting, is new."""
        self._wait_s = 0.0

    def log_due(self, every: int | None, step: int) -> bool:
        """True when a progress line is due: every so many steps, or about once a second."""
        if every is not None:
            return step % every == 0
        return time.perf_counter() - self._since >= self._LOG_INTERVAL_S

    def reserve_s(self, valid_tokens: int) -> float:
        """Seconds to keep for the last evaluation and checkpoint of a budgeted run."""
        # Scoring in float32 takes about half of a bf16 step; the first evaluation tells.
        forward_only = 0.5 * self.seconds_per_token * valid_tokens
        return (self.evaluation_s or forward_only) + self.save_s + 0.5

    def remaining_s(self, steps: int, tokens_per_step: int) -> float:
        return max(steps, 0) * tokens_per_step * self.seconds_per_token

    def take(self, wait_s: float) -> dict[str, Any]:
        """Returns the rates since the last call and starts anew.

        Args:
            wait_s: seconds the loader has kept the loop waiting since it was opened.
        """
        tokens, seconds = max(self._tokens, 1), max(self._seconds, 1e-9)
        waited = max(wait_s - self._wait_s, 0.0)
        loss = self._loss / tokens
        gflops = tokens / seconds * self._plan.flop_per_token / 1e9
        ceiling = self._plan.ceiling_gflops
        values = {
            "loss": loss,
            "bits_per_char": loss / math.log(2) * self._tokens_per_char,
            "grad_norm": self._norm / max(self._steps, 1),
            "tokens_per_s": tokens / seconds,
            "gflops": gflops,
            "ceiling_share": gflops / ceiling if ceiling else None,
            "input_wait_share": waited / seconds,
        }
        self._wait_s = wait_s
        self._clear()
        return values
