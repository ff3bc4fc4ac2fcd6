from __future__ import annotations

import pytest

from fastlstm.monitor.machine_strip import MAX_BINS, MachineStrip
from fastlstm.report.events import Event


def event(at: float, others: float = 0.0, own: float = 1.0) -> Event:
    shares = {"others_share": others, "steal_share": 0.0}
    return {"event": "machine", "elapsed_s": at, "cores": 2, "own_cores": own, **shares}


def test_a_long_strip_has_few_bins_with_the_means() -> None:
    strip = MachineStrip()
    for at in range(0, 40_000, 10):
        strip.add(event(at, others=0.5 if 20_000 <= at < 30_000 else 0.0))
    assert MAX_BINS / 2 <= len(strip.bins) <= MAX_BINS
    busy = [part for part in strip.bins if part.others > 0.25]
    assert sum(part.width_s for part in busy) == pytest.approx(10_000, rel=0.1)
    assert all(part.own == 0.5 for part in strip.bins)
    assert MachineStrip.restored(strip.stored()).bins == strip.bins


def test_values_that_cannot_be_are_left_out() -> None:
    strip = MachineStrip()
    for value in (None, "x", [], -1.0, 1e300, float("inf"), True):
        strip.add(event(value))  # type: ignore[arg-type]
        strip.add({"event": "machine", "elapsed_s": 5.0, "others_share": value, "cores": value})
    assert all(0.0 <= part.own <= 1.0 and 0.0 <= part.others <= 1.0 for part in strip.bins)
    strip.cut_after(0.0)
    assert strip.bins == []
    for damaged in (b"", b"12345", b"\xff" * 32):
        with pytest.raises(ValueError, match=r"not a|multiple"):
            MachineStrip.restored(damaged)
