from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastlstm.forecast.data.column_stats import ColumnStats, shown


def stats(*batches: list[float], **given: Any) -> ColumnStats:
    column = ColumnStats(**given)
    for batch in batches:
        values = np.array(batch, dtype=np.float64)
        assert column.add(values, column.stored(values)) is None
    return column


def test_range_and_missing_values_are_over_all_batches() -> None:
    column = stats([3.0, np.nan], [-2.0, 7.0], [np.nan])
    assert (column.low, column.high, column.missing) == (-2.0, 7.0, 2)


def test_the_first_value_beyond_float32_is_reported() -> None:
    column = ColumnStats()
    values = np.array([1.0, 1e39, -1e39])
    assert column.add(values, column.stored(values)) == 1


@pytest.mark.parametrize(
    ("values", "is_short"),
    [
        ([1.0, -32767.0, 32767.0], True),
        ([0.5], False),
        ([32768.0], False),
        ([-32768.0, 1.0], False),  # stands for missing values
        ([np.nan, 4.0], True),
    ],
)
def test_whole_numbers_within_int16_are_short(values: list[float], is_short: bool) -> None:
    assert stats(values).is_short is is_short


@pytest.mark.parametrize(
    ("values", "far"),
    [
        ([1.0, 2.0, -9999.0], [-9999.0]),
        ([1.0, 2.0, 9999.0], []),  # positive and once: may be a value
        ([1.0, 2.0, 9999.0, 9999.0], [9999.0]),
        ([1.0, 2.0, 1e20], [1e20]),
        ([-9000.0, 9000.0, -9999.0], []),  # within the range of the others
        ([-9999.0, -9999.0], []),  # nothing else to compare with
    ],
)
def test_sentinels_far_from_all_other_values(values: list[float], far: list[float]) -> None:
    assert list(stats(values).far_values()) == far


NOISE = np.random.default_rng(0).normal(20, 3, 500).tolist()


@pytest.mark.parametrize(
    ("codes", "far"),
    [
        ([-200.0, -200.0], [-200.0]),
        ([-200.0], []),  # once: may be a value
        ([-3.0, -3.0, -3.0], [-3.0]),  # the only negative one, whole, and not near
        ([-0.5, -0.5], []),
        ([500.0, 500.0, 500.0], [500.0]),
        ([500.0, 500.0], []),
        ([0.0, 0.0, 0.0], []),  # nothing was sold
    ],
)
def test_a_repeated_value_far_from_all_others_may_be_a_code(
    codes: list[float], far: list[float]
) -> None:
    batches = [NOISE[:100], codes[:1], NOISE[100:], codes[1:]]
    assert list(stats(*batches).far_values()) == far
    assert list(stats(*reversed(batches)).far_values()) == far
    assert list(stats(*batches, kept=tuple(codes)).far_values()) == []


@pytest.mark.parametrize("values", [[0.0, 1.0] * 9, [1.0, 2.0, 5.0] * 9, [-1.0, 0.0, 1.0] * 9])
def test_levels_are_no_codes(values: list[float]) -> None:
    assert stats(values).far_values() == {}


def test_declared_values_are_no_sentinels() -> None:
    assert stats([1.0, -9999.0], kept=(-9999.0,)).far_values() == {}


def test_a_sentinel_near_the_others_is_one_to_ask_about() -> None:
    column = stats([-6000.0, 9000.0, -9999.0])
    assert column.far_values() == {}
    assert column.near_sentinels() == [-9999.0]


@pytest.mark.parametrize(
    ("values", "origin"),
    [
        ([1e9, 1e9 + 1, 1e9 + 3], 1e9 + 2),
        ([0.1, 5.0], 0.0),
        ([3.0, 4.0], 0.0),  # short
        ([2.0**25 + 1, 2.0**25 + 1], 2.0**25 + 1),  # constant, not exact in float32
        ([2.0**25, 2.0**25], 0.0),
    ],
)
def test_the_origin_keeps_digits_of_large_values(values: list[float], origin: float) -> None:
    assert stats(values).best_origin() == origin


def test_values_are_stored_minus_the_origin() -> None:
    stored = ColumnStats(origin=1e9).stored(np.array([1e9 + 1, 1e9 + 2]))
    assert stored.dtype == np.float32
    assert stored.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(("value", "text"), [(-9999.0, "-9999"), (1e20, "1e+20"), (0.1, "0.1")])
def test_numbers_are_shown_shortly(value: float, text: str) -> None:
    assert shown(value) == text
