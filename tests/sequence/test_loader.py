"""The order of training batches follows from seed, epoch and position."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastlstm.errors import CorruptFileError
from fastlstm.sequence.answers import Labels
from fastlstm.sequence.data import Sequences
from fastlstm.sequence.loader import SequenceData, SequenceLoader


def loader(seed: int = 3) -> SequenceLoader:
    sequences = Sequences.of(np.arange(22.0).reshape(11, 2, 1))
    data = SequenceData(
        sequences, torch.arange(11), torch.zeros(1), torch.ones(1), np.arange(1, 11),
        np.zeros(1, np.int64), Labels(np.arange(11)),
    )  # fmt: skip
    return SequenceLoader(data, 4, seed)


def numbers(of: SequenceLoader, count: int) -> list[list[int]]:
    return [of.next().targets.tolist() for _ in range(count)]


def test_an_epoch_hands_out_every_sequence_once_in_an_order_of_its_own() -> None:
    found = loader()
    assert found.steps_per_epoch == 3
    epochs = [numbers(found, 3) for _ in range(3)]
    assert [list(map(len, epoch)) for epoch in epochs] == [[4, 4, 2]] * 3
    assert all(
        sorted(n for batch in epoch for n in batch) == list(range(1, 11)) for epoch in epochs
    )
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
def test_a_position_that_is_none_is_refused(state: dict[str, int]) -> None:
    with pytest.raises(CorruptFileError, match="loader position is"):
        loader().load_state_dict(state)
