"""The exact sum of floats, against fractions and `math.fsum`."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import numpy as np
import pytest

from fastlstm.forecast.data.exact_sum import ExactSum


def total(values: list[float]) -> ExactSum:
    made = ExactSum()
    for value in values:
        made += value
    return made


@pytest.mark.parametrize("scale", [1.0, 1e300, 1e-310])
def test_a_sum_is_rounded_once_in_any_order(scale: float) -> None:
    rng = np.random.default_rng(0)
    values = (rng.normal(size=400) * 10.0 ** rng.integers(-12, 4, 400) * scale).tolist()
    exact = float(sum(map(Fraction, values)))
    assert float(total(values)) == float(total(values[::-1])) == math.fsum(values) == exact
    parts = ExactSum()
    for first in range(0, 400, 90):
        stored = json.loads(json.dumps(total(values[first : first + 90]).to_json()))
        parts += ExactSum.from_json(stored)
    assert float(parts) == exact


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_infinities_and_nan_stay(value: float) -> None:
    found = float(ExactSum.from_json(total([1.0, value, 2.0]).to_json()))
    assert found == value or (math.isnan(found) and math.isnan(value))
    assert float(ExactSum()) == 0.0
