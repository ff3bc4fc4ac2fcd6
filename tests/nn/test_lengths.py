"""Lanes: start and end of each sequence of a batch."""

import numpy as np
import pytest
import torch

from fastlstm.errors import ShapeError
from fastlstm.nn.lengths import Lanes, is_inside, lanes_of, without_padding

X = torch.ones(4, 3, 2)


def steps(lanes):
    return [lanes.begins.tolist(), lanes.ends.tolist()]


@pytest.mark.parametrize(
    "lengths",
    [[4, 0, 1], (4, 0, 1), torch.tensor([4, 0, 1], dtype=torch.int32), np.array([4, 0, 1])],
    ids=["list", "tuple", "tensor", "array"],
)
def test_lengths_are_padded_on_the_right_or_on_the_left(lengths):
    right, left = lanes_of(lengths, "right", X), lanes_of(lengths, "left", X)
    assert steps(right) == [[0, 0, 0], [4, 0, 1]]
    assert steps(left) == [[0, 4, 3], [4, 4, 4]]
    assert steps(right.reversed(4)) == steps(left)
    assert all(t.dtype == torch.int64 for t in (*right, *left))


def test_padding_is_replaced_by_zeros():
    lanes = Lanes(torch.tensor([0, 1, 4]), torch.tensor([4, 3, 4]))
    inside = is_inside(X, lanes)
    assert inside.T.tolist() == [[True] * 4, [False, True, True, False], [False] * 4]
    x = X.masked_fill(~inside[:, :, None], torch.nan)
    assert torch.equal(without_padding(x, lanes), X * inside[:, :, None])


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ("432", "lengths is a str, expected 3 whole numbers"),
        (4, "lengths is an int, expected 3 whole numbers"),
        ([4, 4], r"lengths are torch.int64 \(2,\), expected 3 whole numbers, one per sequence"),
        ([4.0, 4.0, 4.0], r"lengths are torch.float32 \(3,\)"),
        ([True] * 3, r"lengths are torch.bool \(3,\)"),
        ([5, 1, 1], "lengths run from 1 to 5, expected 0 to T = 4"),
        ([-1, 1, 1], "lengths run from -1 to 1, expected 0 to T = 4"),
    ],
)
def test_lengths_that_do_not_fit_are_named(lengths, message):
    with pytest.raises(ShapeError, match=message):
        lanes_of(lengths, "right", X)


def test_an_unknown_side_is_an_error():
    with pytest.raises(ShapeError, match="padding is 'both', expected 'right' or 'left'"):
        lanes_of([1, 1, 1], "both", X)
