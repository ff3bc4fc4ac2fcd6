"""Sequences of many lengths: read, scaled, padded and loaded in order."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from fastlstm.errors import CorruptFileError, DataError
from fastlstm.sequence.answers import Labels
from fastlstm.sequence.data import SequenceData, SequenceLoader, Sequences

PARTS = [np.arange(2.0 * n).reshape(n, 2) + 10 * n for n in (3, 1, 2)]
ZERO, ONE = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)


def test_a_batch_is_padded_at_the_ends_to_its_longest() -> None:
    batch = Sequences.of(PARTS).batch(np.array([2, 1]), ZERO, ONE)
    assert batch.values.shape == (2, 2, 2)
    assert batch.values.dtype == torch.float32
    assert batch.values[0].tolist() == PARTS[2].tolist()
    assert batch.values[1, 0].tolist() == PARTS[1][0].tolist()
    assert batch.lengths is not None
    assert batch.lengths.tolist() == [2, 1]


def test_the_scale_is_measured_on_the_given_sequences() -> None:
    sequences = Sequences.of(PARTS)
    mean, std = sequences.scale(np.array([0, 2]))
    rows = np.concatenate([PARTS[0], PARTS[2]])
    np.testing.assert_allclose(mean, rows.mean(0))
    np.testing.assert_allclose(std, rows.std(0))
    scaled = sequences.batch(np.array([0]), mean, std).values
    np.testing.assert_allclose(scaled[0], (PARTS[0] - rows.mean(0)) / rows.std(0), rtol=1e-6)


def test_constants_and_missing_values_have_a_scale() -> None:
    values = np.array([[[7.0, np.nan, 1.0]], [[7.0, np.nan, np.nan]], [[7.0, np.nan, 5.0]]])
    sequences = Sequences.of(values)
    assert sequences.has_missing
    mean, std = sequences.scale(np.arange(3))
    assert mean.tolist() == [7.0, 0.0, 3.0]
    assert std.tolist() == [1.0, 1.0, 2.0]


class Sparse:
    """Stands for a sparse matrix of SciPy."""

    def toarray(self) -> None: ...


@pytest.mark.parametrize(
    ("X", "message"),
    [
        ([], "got no sequences"),
        ([PARTS[0], np.zeros((2, 3))], "sequence 1 has 3 columns, sequence 0 has 2; give the same"),
        ([PARTS[0], np.zeros((0, 2))], "sequence 1 has no steps; leave it out"),
        (np.zeros((2, 3, 0)), "the sequences have no columns"),
        (np.zeros((2, 3)), r"X has shape \(2, 3\) .* numbers of shape \(N, T, C\)"),
        ([np.zeros(3)], r"sequence 0 has shape \(3,\) .* shape \(T, C\)"),
        ([[["a"]]], "sequence 0 has shape .* dtype <U1"),
        ([[[1.0], [1.0, 2.0]]], r"sequence 0 is not an array of numbers"),
        (Sparse(), r"X is a sparse array, sparse input is not supported; give toarray"),
        ([PARTS[1], np.array([[0.0, 1.0], [np.inf, 0.0]])], "sequence 1, step 1, column 0 is inf"),
        ([PARTS[0], PARTS[1] * 1e38 * 1e38], "sequence 1, step 0, column 0 is infinite, or beyond"),
    ],
)
def test_unreadable_sequences_are_named(X: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Sequences.of(X)


def loader(seed: int = 3) -> SequenceLoader:
    sequences = Sequences.of(np.arange(22.0).reshape(11, 2, 1))
    data = SequenceData(
        sequences, torch.arange(11), torch.zeros(1), torch.ones(1), np.arange(1, 11),
        np.zeros(1, np.int64), Labels(np.arange(11)),
    )  # fmt: skip
    return SequenceLoader(data, 4, seed)


def numbers(of: SequenceLoader, count: int) -> list[list[int]]:
    return [of.next().targets.tolist() for _ in range(count)]


def test_every_epoch_has_each_sequence_once_in_another_order() -> None:
    found = loader()
    assert found.steps_per_epoch == 3
    epochs = [numbers(found, 3) for _ in range(3)]
    assert [list(map(len, epoch)) for epoch in epochs] == [[4, 4, 2]] * 3
    assert all(sorted(chain(*epoch)) == list(range(1, 11)) for epoch in epochs)
    assert len({str(epoch) for epoch in epochs}) == 3
    assert numbers(loader(), 3) == epochs[0]
    assert numbers(loader(seed=4), 3) != epochs[0]


def test_answers_go_with_their_sequences() -> None:
    batch = loader().next()
    assert batch.inputs.values[:, 0, 0].tolist() == [2.0 * n for n in batch.targets.tolist()]


@pytest.mark.parametrize("after", [0, 2, 3, 7])
def test_a_position_is_enough_to_continue(after: int) -> None:
    first, second = loader(), loader()
    numbers(first, after)
    state = first.state_dict()
    assert state == {"epoch": after // 3, "index": after % 3}
    second.load_state_dict(state)
    assert numbers(second, 5) == numbers(first, 5)


@pytest.mark.parametrize("state", [{}, {"epoch": 0, "index": 3}, {"epoch": -1, "index": 0}])
def test_an_invalid_position_is_refused(state: dict[str, int]) -> None:
    with pytest.raises(CorruptFileError, match="loader position is"):
        loader().load_state_dict(state)
