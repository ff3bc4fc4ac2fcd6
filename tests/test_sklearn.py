"""`Forecaster` under scikit-learn's own checks, its clone and its grid search."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from fastlstm import Forecaster

sklearn = pytest.importorskip("sklearn")

from sklearn.utils.estimator_checks import estimator_checks_generator  # noqa: E402

TINY: dict[str, Any] = {
    "horizon": 1, "input_size": 2, "segment": 1, "hidden_size": 4, "steps": 2,
}  # fmt: skip
NOT_OURS = {
    "check_estimators_unfitted": "raises our ConfigError: scikit-learn is no dependency",
    "check_n_features_in_after_fitting": "the message names the columns, not their number",
    "check_complex_data": "refused by a message of our own",
    "check_dtype_object": "numbers stored as objects are read",
    "check_estimators_empty_data_messages": "a table without rows is refused by our own message",
    "check_methods_sample_order_invariance": "rows are steps in time: their order is the data",
    "check_methods_subset_invariance": "rows are steps in time: a part has another forecast",
    "check_fit2d_1sample": "one row is refused, as a constant target",
    "check_fit1d": "an array of one dimension is a series",
    "check_fit2d_predict1d": "an array of one dimension is a series",
}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that it does not inherit from BaseEstimator
    CHECKS = list(
        estimator_checks_generator(Forecaster(**TINY), expected_failed_checks=NOT_OURS, mark="skip")
    )


def name_of(check: Any) -> str:
    return str(getattr(check, "func", check).__name__)


@pytest.mark.parametrize(
    ("estimator", "check"), CHECKS, ids=[name_of(check) for _, check in CHECKS]
)
def test_what_scikit_learn_checks(estimator: Any, check: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(estimator)


def test_it_is_cloned_and_searched_over() -> None:
    from sklearn.base import clone
    from sklearn.model_selection import GridSearchCV, TimeSeriesSplit

    model = Forecaster(**{**TINY, "input_size": 12, "segment": 6, "steps": 60, "target": ["0"]})
    copy = clone(model)
    assert copy is not model
    assert copy.get_params() == model.get_params()
    series = np.sin(np.arange(600) * 0.5).astype(np.float32)[:, None]
    grid = {"learning_rate": [0.0, 0.02]}
    found = GridSearchCV(copy, grid, cv=TimeSeriesSplit(2), refit=False).fit(series)
    assert found.best_params_ == {"learning_rate": 0.02}
