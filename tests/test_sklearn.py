"""`Forecaster` under scikit-learn's own checks, its clone and its grid search."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fastlstm import Forecaster

pytest.importorskip("sklearn")

from sklearn.utils.estimator_checks import parametrize_with_checks

TINY: dict[str, Any] = {
    "horizon": 1, "input_size": 2, "segment": 1, "hidden_size": 4, "steps": 2,
}  # fmt: skip
NOT_OURS: dict[str, str] = {}


@parametrize_with_checks([Forecaster(**TINY)], expected_failed_checks=lambda estimator: NOT_OURS)
def test_what_scikit_learn_checks(estimator: Any, check: Callable[[Any], None]) -> None:
    check(estimator)
