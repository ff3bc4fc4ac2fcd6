from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from fastlstm.forecast.data.timeline import BUSINESS_DAYS, DAYS, ROWS, Frequency, find_frequency


def times(*texts: str) -> NDArray[np.int64]:
    return np.array(texts, dtype="datetime64[us]").astype(np.int64)


@pytest.mark.parametrize("february", ["28", "29"])
def test_months_go_by_a_day_that_short_ones_lack(february: str) -> None:
    found = times("2024-01-30", f"2024-02-{february}", "2024-03-30", "2024-04-30", "2024-05-30")
    same = np.ones(4, dtype=np.bool_)
    monthly = find_frequency(found, same, "t")
    assert monthly == Frequency(1, "months", month_day=30)
    assert monthly.fits(found, same)
    assert Frequency.from_json(monthly.to_json()) == monthly
    after = monthly.after(int(times("2025-01-30")[0]), 4)
    assert (after == times("2025-01-30", "2025-02-28", "2025-03-30", "2025-04-30")).all()


@pytest.mark.parametrize("frequency", [ROWS, DAYS, BUSINESS_DAYS, Frequency(3, "months", True)])
def test_a_frequency_is_read_back_from_json(frequency: Frequency) -> None:
    assert Frequency.from_json(frequency.to_json()) == frequency
