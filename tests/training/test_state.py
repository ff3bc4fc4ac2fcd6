"""What a run counts."""

from __future__ import annotations

import pytest

from fastlstm.errors import Stopped
from fastlstm.training import state
from fastlstm.training.state import Progress


def test_a_part_that_is_stopped_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(state.time, "perf_counter", lambda: now_s[0])
    progress = Progress()
    with progress.counted("judging"):
        now_s[0] += 2.0

    @progress.counted("judging")
    def stopped() -> None:
        now_s[0] += 3.0
        raise Stopped("stopped while judging")

    with pytest.raises(Stopped):
        stopped()
    assert progress.spent == {"judging": 5.0}
