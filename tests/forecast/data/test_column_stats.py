from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastlstm.forecast.data.column_stats import ColumnStats, best_origins


def stats(*batches: list[float], **given: Any) -> ColumnStats:
    column = ColumnStats(**given)
    for batch in batches:
        values = np.array(batch, dtype=np.float64)
        assert column.add(values, column.stored(values)) is None
    return column


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


@pytest.mark.parametrize(
    "values", [[0.0, 1.0] * 9, [1.0, 2.0, 5.0] * 9, [-1.0, 0.0, 1.0] * 9, [-9999.0, -9999.0]]
)
def test_levels_and_values_without_others_are_no_codes(values: list[float]) -> None:
    assert stats(values).far_values() == {}


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


def test_origins_of_numbers_beyond_float32_are_found_without_a_warning() -> None:
    low, high = np.array([1e300, -1e39, 5.0]), np.array([1e300, 1e307, 5.0])
    assert np.isfinite(best_origins(low, high)).all()
