from __future__ import annotations

import pytest

from fastlstm.monitor.machine_use import MAX_BINS, MachineUse
from fastlstm.report.events import Event


def event(at: float, others: float = 0.0, own: float = 1.0) -> Event:
    shares = {"others_share": others, "steal_share": 0.0}
    return {"event": "machine", "elapsed_s": at, "cores": 2, "own_cores": own, **shares}


def test_a_long_run_has_few_bins_with_the_means() -> None:
    use = MachineUse()
    for at in range(0, 40_000, 10):
        use.add(event(at, others=0.5 if 20_000 <= at < 30_000 else 0.0))
    bins = use.bins()
    assert MAX_BINS / 2 <= len(bins) <= MAX_BINS
    assert sum(others > 0.25 for *_, others in bins) == pytest.approx(len(bins) / 4, abs=1)
    assert all(own == 0.5 for _, own, _ in bins)
    assert use.mean_others == pytest.approx(0.125)
    use.cut_after(15_000)
    assert use.mean_others == 0.0
    assert use.bins()[-1][0] == pytest.approx(15_000)


def test_values_that_cannot_be_are_left_out() -> None:
    use = MachineUse()
    for value in (None, "x", [], -1.0, 1e300, float("inf"), True):
        use.add(event(value))  # type: ignore[arg-type]
        use.add({"event": "machine", "elapsed_s": 5.0, "others_share": value, "cores": value})
    assert all(0.0 <= own <= 1.0 and 0.0 <= others <= 1.0 for _, own, others in use.bins())
    assert use.drawing()
    use.cut_after(0.0)
    assert use.bins() == []
    assert use.drawing() == ""
