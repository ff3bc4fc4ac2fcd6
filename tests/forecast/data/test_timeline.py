from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fastlstm.forecast.data.timeline import (
    BUSINESS_DAYS,
    DAYS,
    ROWS,
    Frequency,
    are_business_days,
    find_frequency,
    show_time,
)


def times(*texts: str) -> NDArray[np.int64]:
    return np.array(texts, dtype="datetime64[us]").astype(np.int64)


def days(first: str, last: str, unit: str = "D") -> NDArray[np.int64]:
    steps = np.arange(first, last, dtype=f"datetime64[{unit}]")
    return steps.astype("datetime64[us]").astype(np.int64)


def frequency_of(found: NDArray[np.int64], has_clock: bool = True) -> Frequency:
    return find_frequency(found, np.ones(len(found) - 1, dtype=np.bool_), "t", has_clock)


WEEKDAYS = np.array([t for t in days("2024-01-01", "2024-02-01") if are_business_days(t[None])])


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (days("2024-01-01", "2024-01-09"), "1 day"),
        (days("2024-01-01", "2024-01-02", "h"), "1 hour"),
        (days("2024-01-01", "2024-01-29")[::7], "1 week"),
        (WEEKDAYS, "1 business day"),
        (days("2024-01", "2025-01", "M"), "1 month"),
        (days("2020-01", "2025-01", "M")[::3], "3 months"),
        (times("2024-01-31", "2024-02-29", "2024-03-31", "2024-04-30"), "1 month"),
    ],
)
def test_the_usual_step_is_found(found: NDArray[np.int64], text: str) -> None:
    frequency = frequency_of(found)
    assert str(frequency) == text
    assert (np.diff(frequency.ticks(found)) == 1).all()
    assert frequency.are_whole_steps(found).all()
    np.testing.assert_array_equal(frequency.after(int(found[0]), len(found)), found)


def test_whole_numbers_step_by_rows_and_a_single_time_by_days() -> None:
    assert frequency_of(np.array([3, 5, 7, 9]), has_clock=False) == Frequency(2, "rows")
    assert frequency_of(np.array([3])) == DAYS
    assert frequency_of(np.array([3]), has_clock=False) == ROWS


@pytest.mark.parametrize("february", ["28", "29"])
def test_months_go_by_a_day_that_short_ones_lack(february: str) -> None:
    found = times("2024-01-30", f"2024-02-{february}", "2024-03-30", "2024-04-30", "2024-05-30")
    monthly = frequency_of(found)
    assert monthly == Frequency(1, "months", month_day=30)
    assert monthly.fits(found, np.ones(4, dtype=np.bool_))
    assert Frequency.from_json(monthly.to_json()) == monthly
    after = monthly.after(int(times("2025-01-30")[0]), 4)
    assert (after == times("2025-01-30", "2025-02-28", "2025-03-30", "2025-04-30")).all()


def test_a_frequency_fits_times_that_mostly_step_by_it() -> None:
    found = days("2024-01-01", "2024-01-09")
    same = np.ones(len(found) - 1, dtype=np.bool_)
    assert DAYS.fits(found, same)
    assert not DAYS.fits(found[::2], same[::2][:3])
    assert not Frequency(7 * 3_600_000_000).fits(found, same)


@pytest.mark.parametrize("frequency", [ROWS, DAYS, BUSINESS_DAYS, Frequency(3, "months", True)])
def test_a_frequency_is_read_back_from_json(frequency: Frequency) -> None:
    assert Frequency.from_json(frequency.to_json()) == frequency


@pytest.mark.parametrize("changes", [{"step": 0}, {"step": 1.0}, {"unit": "s"}, {"more": 1}])
def test_what_is_no_frequency_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="frequency"):
        Frequency.from_json({**DAYS.to_json(), **changes})


@pytest.mark.parametrize(
    ("text", "shown"),
    [("2024-01-02", "2024-01-02"), ("2024-01-02 03:04:05.5", "2024-01-02 03:04:05.500000")],
)
def test_times_are_shown_without_zeros(text: str, shown: str) -> None:
    assert show_time(int(times(text)[0])) == shown
