"""All estimators under scikit-learn's own checks, its clone, pipelines and searches."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
import pytest

from fastlstm import Forecaster, SequenceClassifier, SequenceRegressor
from fastlstm.errors import DataError

sklearn = pytest.importorskip("sklearn")

from sklearn.utils.estimator_checks import estimator_checks_generator  # noqa: E402

TINY: dict[str, Any] = {
    "horizon": 1, "input_size": 2, "patch": 1, "hidden_size": 4, "steps": 2,
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
def test_scikit_learns_checks(estimator: Any, check: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(estimator)


def test_a_forecaster_is_cloned_and_grid_searched() -> None:
    from sklearn.base import clone
    from sklearn.model_selection import GridSearchCV, TimeSeriesSplit

    model = Forecaster(
        **{**TINY, "input_size": 12, "patch": 6, "steps": 60, "target": ["0"], "linear": False}
    )
    copy = clone(model)
    assert copy is not model
    assert copy.get_params() == model.get_params()
    series = np.sin(np.arange(600) * 0.5).astype(np.float32)[:, None]
    grid = {"learning_rate": [0.0, 0.02]}
    found = GridSearchCV(copy, grid, cv=TimeSeriesSplit(2), refit=False).fit(series)
    assert found.best_params_ == {"learning_rate": 0.02}


@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_joined_by_kfold_are_a_warning(shuffle: bool) -> None:
    from sklearn.model_selection import KFold, TimeSeriesSplit

    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"y": np.sin(np.arange(90) / 3)})
    model = Forecaster(**TINY)
    seed = 0 if shuffle else None
    (_, _), (middle, _), (_, _) = KFold(3, shuffle=shuffle, random_state=seed).split(frame)
    with pytest.warns(UserWarning, match=r"the index goes from .* TimeSeriesSplit, not by KFold"):
        model.fit(frame.iloc[middle])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for train, test in TimeSeriesSplit(3).split(frame):
            model.fit(frame.iloc[train])
            model.predict(frame.iloc[test])
        model.fit(frame.iloc[::2])
        timed = frame.assign(ds=pandas.date_range("2020-01-01", periods=90))
        if not shuffle:  # a gap that windows do not cross
            model.fit(timed.iloc[middle])


SMALL: dict[str, Any] = {
    "hidden_size": 4, "embed_size": 4, "epochs": 12, "learning_rate": 0.05, "held_out": 0.2,
}  # fmt: skip


def steps_of(X: Any) -> Any:
    """Returns a table of scikit-learn as sequences with one column."""
    array = np.asarray(X)
    return array[:, :, None] if array.ndim == 2 and array.dtype.kind in "fiubO" else X


class Flat:
    """Rows of a table as sequences of one column."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()  # type: ignore[misc]
        tags.input_tags.two_d_array = True
        return tags

    def fit(self, X: Any, y: Any) -> Any:
        return super().fit(steps_of(X), y)  # type: ignore[misc]

    def _answers(self, X: Any) -> Any:
        return super()._answers(steps_of(X))  # type: ignore[misc]


class FlatClassifier(Flat, SequenceClassifier): ...


class FlatRegressor(Flat, SequenceRegressor): ...


NOT_THEIRS = {
    "check_estimators_unfitted": NOT_OURS["check_estimators_unfitted"],
    "check_complex_data": NOT_OURS["check_complex_data"],
    "check_n_features_in_after_fitting": "a row is read as steps of one column",
    "check_dtype_object": "what is no number is refused by an error of our own",
    "check_n_features_in": "a row is read as steps of one column",
    "check_fit2d_predict1d": "refused by a message of our own",
    "check_fit2d_1sample": "refused by a message of our own",
    "check_estimators_empty_data_messages": "refused by a message of our own",
    "check_classifiers_train": "sequences of another length are read, too",
    "check_regressors_train": "its score after two epochs is no good one",
    "check_classifiers_regression_target": "a label is anything hashable",
    "check_supervised_y_2d": "labels are of shape (N,)",
}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    SEQUENCE_CHECKS = [
        found
        for kind in (FlatClassifier, FlatRegressor)
        for found in estimator_checks_generator(
            kind(**{**SMALL, "epochs": 2}), expected_failed_checks=NOT_THEIRS, mark="skip"
        )
    ]


@pytest.mark.parametrize(
    ("estimator", "check"),
    SEQUENCE_CHECKS,
    ids=[f"{type(e).__name__}-{name_of(check)}" for e, check in SEQUENCE_CHECKS],
)
def test_scikit_learns_checks_of_sequences(estimator: Any, check: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(estimator)


def test_numbers_as_objects_are_read() -> None:
    X, _ = labelled()
    y = X[:, 0, 0]
    model = SequenceRegressor(**{**SMALL, "epochs": 1})
    wanted = model.fit(X, y).predict(X)
    found = model.fit(X.astype(object), y.astype(object)).predict(X.astype(object))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def labelled(num: int = 120) -> tuple[Any, Any]:
    """Sequences labelled by the sign of their mean; the labels are not sorted."""
    rng = np.random.default_rng(0)
    X = (rng.normal(size=(num, 5, 2)) + rng.choice([-1, 1], size=(num, 1, 1))).astype(np.float32)
    return X, np.where(X[:, :, 0].mean(1) > 0, "a", "b")


@pytest.mark.parametrize("as_list", [False, True])
def test_sequences_are_searched_over_and_scored_in_parts(as_list: bool) -> None:
    from sklearn.base import is_classifier, is_regressor
    from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer

    X, y = labelled()
    X = list(X) if as_list else X
    assert is_classifier(SequenceClassifier())
    assert is_regressor(SequenceRegressor())
    assert (cross_val_score(SequenceClassifier(**SMALL), X, y, cv=3) > 0.7).all()
    assert cross_val_predict(SequenceClassifier(**SMALL), X, y, cv=3).dtype == y.dtype
    grid = {"learning_rate": [0.0, 0.05]}
    found = GridSearchCV(SequenceClassifier(**SMALL), grid, cv=2).fit(X, y)
    assert found.best_params_ == {"learning_rate": 0.05}
    assert found.classes_.tolist() == ["a", "b"]
    halved = FunctionTransformer(lambda given: [x / 2 for x in given] if as_list else given / 2)
    model = make_pipeline(halved, SequenceClassifier(**SMALL)).fit(X, y)
    assert model.score(X, y) > 0.7
    assert model.predict_proba(X).shape == (120, 2)
    assert model.classes_.tolist() == ["a", "b"]


def test_scores_are_those_of_scikit_learn_and_may_be_weighted() -> None:
    from sklearn.metrics import accuracy_score, r2_score

    X, y = labelled()
    weight = np.random.default_rng(1).uniform(0, 2, 120)
    model = SequenceClassifier(**{**SMALL, "epochs": 1}).fit(X, y)
    for given in (None, weight):
        wanted = accuracy_score(y, model.predict(X), sample_weight=given)
        assert model.score(X, y, given) == pytest.approx(wanted)
    for numbers in (X[:, 0, 0], X[:, 0], np.ones(120)):
        other = SequenceRegressor(**SMALL).fit(X, numbers)
        for given in (None, weight):
            wanted = r2_score(numbers, other.predict(X), sample_weight=given)
            assert other.score(X, numbers, sample_weight=given) == pytest.approx(wanted, abs=1e-6)
    half = np.arange(120) % 2  # what does not count may change, and the rest may not
    numbers = np.where(half, 3.0, X[:, 0, 0])
    assert other.score(X, numbers, half) == r2_score(numbers, other.predict(X), sample_weight=half)
    for bad in (weight[:5], -weight, 0 * weight):
        with pytest.raises(DataError, match="sample_weight"):
            model.score(X, y, bad)


@pytest.mark.parametrize("kind", [SequenceClassifier, SequenceRegressor])
def test_a_fitted_one_is_pickled_cloned_and_fitted_again(kind: Any) -> None:
    from sklearn.base import clone
    from sklearn.utils.validation import check_is_fitted

    X, y = labelled()
    y = y if kind is SequenceClassifier else X[:, 0, 0]
    model = kind(**{**SMALL, "epochs": 2}).fit(X, y)
    check_is_fitted(model)
    assert model.n_features_in_ == 2
    again = pickle.loads(pickle.dumps(model))
    assert (again.predict(X) == model.predict(X)).all()
    copy = clone(model)
    assert not hasattr(copy, "network_")
    assert (copy.fit(X, y).predict(X) == model.predict(X)).all()
    wide = np.concatenate([X, X], 2)
    assert model.fit(wide, y).n_features_in_ == 4
    assert len(model.predict(wide)) == 120
    if kind is SequenceClassifier:
        assert model.fit(X, np.arange(120) % 3).classes_.tolist() == [0, 1, 2]
