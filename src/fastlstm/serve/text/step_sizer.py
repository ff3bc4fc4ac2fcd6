"""How many tokens each text advances in one call of the engine."""

from __future__ import annotations

SHORTEST_S, PER_ROW_S, LONGEST_S = 0.005, 0.0002, 0.03
"""A call for one client is short, so that its text comes at once. With many clients the work around
a call counts, which is the same for one token as for a hundred: so calls become longer."""
_MAX_STEPS = 4096
_SHARE = 0.3


class StepSizer:
    """Finds the number of steps with which a call takes the time it should."""

    def __init__(self) -> None:
        self._step_s = 1e-4
        self._num_rows = 1

    def steps(self, num_rows: int) -> int:
        """Returns the steps for a call with so many rows."""
        aim_s = min(LONGEST_S, SHORTEST_S + PER_ROW_S * num_rows)
        # Rows share a step's reading of the weights: its time grows more slowly than their number.
        step_s = self._step_s * max(1.0, num_rows / self._num_rows)
        return max(1, min(_MAX_STEPS, int(aim_s / step_s)))

    def saw(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Learns from a call in which so many rows advanced by so many tokens altogether."""
        if num_tokens <= 0:
            return
        step_s = seconds * num_rows / num_tokens
        if num_rows != self._num_rows:
            self._num_rows, self._step_s = num_rows, step_s
        else:
            self._step_s += _SHARE * (step_s - self._step_s)
