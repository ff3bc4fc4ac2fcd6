"""Numbers and labels as targets of a network; invalid answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fastlstm.errors import ConfigError, DataError
from fastlstm.sequence.answers import (
    Labels,
    answers_of,
    class_weights,
    classes_of,
    labels_of,
    storable_class_weight,
    stratified,
    weights_of,
)


@pytest.mark.parametrize(
    ("labels", "dtype", "classes", "kind"),
    [
        ([3, 1, 2, 1], None, [1, 2, 3], "i"),
        (["b", "a"], None, ["a", "b"], "U"),
        ([2.5, None, "a"], None, [2.5, None, "a"], "O"),
        ([("a", 1), ("b", 2)], None, [("a", 1), ("b", 2)], "O"),
        ([1, "a"], None, [1, "a"], "O"),
        ([1, 0], np.dtype(np.int16), [0, 1], "i"),
        ([1, 0], np.dtype(object), [0, 1], "i"),
        ([2, 0.5], None, [0.5, 2], "f"),
        ([2**60 + 1, 0.5], None, [0.5, 2**60 + 1], "O"),
        ([True, 0], None, [0, True], "O"),
    ],
)
def test_classes_are_sorted_if_possible(
    labels: list[Any], dtype: Any, classes: list[Any], kind: str
) -> None:
    found = classes_of(labels, dtype)
    assert found.tolist() == classes
    assert found.dtype.kind == kind
    assert dtype in (None, object) or found.dtype == dtype


@pytest.mark.parametrize(
    "scalar", [np.int64, np.int32, np.float32, np.str_, np.bool_, np.array, torch.tensor]
)
def test_scalars_of_numpy_and_torch_are_plain_labels(scalar: Any) -> None:
    values: list[Any] = [True, False] if scalar is np.bool_ else [1, 0]
    values = ["1", "0"] if scalar is np.str_ else values
    found = labels_of([scalar(value) for value in values])
    assert found == values
    assert classes_of(found).dtype.kind in "ifUb"


def test_times_stay_as_they_are() -> None:
    times = [np.datetime64("2026-01-01T00:00:00.000000001"), np.datetime64("2026-01-02")]
    assert labels_of(times) == times


def test_each_class_has_its_share_held_out() -> None:
    classes = np.array([0] * 60 + [1] * 30 + [2] * 9 + [3])
    order = np.random.default_rng(1).permutation(100)
    held_out, train = stratified(order, classes, 10)
    assert sorted([*held_out, *train]) == list(range(100))
    assert np.bincount(classes[held_out], minlength=4).tolist() == [6, 3, 1, 0]
    position = np.argsort(order)  # both stay in the random order
    assert (np.diff(position[held_out]) > 0).all()
    assert (np.diff(position[train]) > 0).all()
    few = stratified(order, classes, 96)[1]
    assert sorted(classes[few]) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (["a", "b"], r"dtype <U1, expected numbers of shape \(N,\) or \(N, K\); labels are for"),
        (np.zeros((2, 2, 2)), r"shape \(2, 2, 2\)"),
        ([], r"shape \(0,\)"),
        ([1.0, float("nan")], "the answer of sequence 1 is NaN, infinite or beyond float32"),
        ([[1.0, 2.0], [float("inf"), 0.0]], "the answer of sequence 1 is NaN, infinite or"),
        ([1.0, -1e300], "the answer of sequence 1 is NaN, infinite or beyond float32"),
    ],
)
def test_answers_that_are_not_numbers_are_refused(y: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        answers_of(y)


def test_numbers_as_objects_are_numbers() -> None:
    assert answers_of(np.array([1, 2.5], dtype=object)).tolist() == [1.0, 2.5]


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.zeros((2, 2)), r"y has shape \(2, 2\), expected one label per sequence"),
        (["a", ["b"]], "the label of sequence 1 is a list, expected a hashable value"),
        (["a", float("nan")], "the label of sequence 1 is NaN; give one, or leave"),
        ([pd.NA, "a"], "the label of sequence 0 is <NA>"),
    ],
)
def test_invalid_labels_are_named(y: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        labels_of(y)


def test_labels_come_from_lists_arrays_and_series() -> None:
    array = np.array(["a", "b"])
    for y in (["a", "b"], array, pd.Series(array), ("a", "b"), array[:, None], pd.DataFrame(array)):
        assert labels_of(y) == ["a", "b"]


def test_one_class_is_too_few() -> None:
    with pytest.raises(DataError, match="every label is 'a', expected two or more classes"):
        classes_of(["a", "a"])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (["a", "b"], "not an array of numbers"),
        ([1.0], r"shape \(1,\), expected \(2,\)"),
        ([1.0, -1.0], "numbers from 0 on, not all of them 0"),
        ([0.0, 0.0], "not all of them 0"),
        ([1.0, float("inf")], "numbers from 0 on"),
    ],
)
def test_invalid_weights_are_refused(weights: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        weights_of(weights, 2)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("even", ConfigError, "is 'even', expected None, 'balanced' or a dict of a weight by"),
        (2.0, ConfigError, "is 2.0, expected"),
        (np.ones(2), ConfigError, r"is array\(\[1., 1.\]\), expected"),
        ({"a": "much"}, ConfigError, "is {'a': 'much'}, expected"),
        ({"d": 2.0}, DataError, "has 'd', which is no label of y"),
        ({"a": -1.0}, DataError, "must be numbers from 0 on"),
        ({"a": float("nan")}, DataError, "must be numbers from 0 on"),
        ({"a": 0, "b": 0}, DataError, "must be numbers from 0 on, not all of them 0"),
    ],
)
def test_invalid_class_weights_are_refused(given: Any, error: Any, message: str) -> None:
    answers = Labels(np.array(["a", "b"]))
    with pytest.raises(error, match=f"`class_weight` {message}"):
        class_weights(storable_class_weight(given), answers, torch.tensor([0, 1, 1]))
