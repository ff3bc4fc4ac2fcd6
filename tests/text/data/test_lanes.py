"""Lanes: every target once, state goes on, any position can be gone to."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastlstm.errors import CorruptFileError, DataError
from fastlstm.text.data.lanes import TextLoader

SIZES = st.tuples(st.integers(1, 5), st.integers(1, 7), st.integers(0, 40))
ORDERS = ["lanes", "windows"]


def make(order, sizes, seed=3):
    """Ids are their own positions, so a token says where it came from."""
    B, T, extra = sizes
    return TextLoader(np.arange(2 * B * T + extra, dtype=np.uint16), B, T, seed, order)


def epoch_of(loader, batches):
    return [next(batches).y for _ in range(loader.steps_per_epoch)]


@pytest.mark.parametrize("order", ORDERS)
def test_a_batch_says_where_its_tokens_are_in_the_text(order):
    loader = make(order, (3, 4, 13))
    batches = loader.batches(0, 0)
    for batch in (next(batches) for _ in range(3 * loader.steps_per_epoch)):
        assert torch.equal(batch.positions(), batch.x)
    assert next(batches).epoch == 3
    epoch = list(loader.first_epoch())
    assert [batch.index for batch in epoch] == list(range(loader.steps_per_epoch))
    for one, other in zip(epoch, loader.batches(0, 0), strict=False):
        assert torch.equal(one.x, other.x)


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=100, deadline=None)
@given(sizes=SIZES)
def test_an_epoch_has_every_target_of_one_stretch_exactly_once(order, sizes):
    B, T, extra = sizes
    loader = make(order, sizes)
    batches = loader.batches(0, 0)
    for _ in range(3):
        targets = torch.cat([y.flatten() for y in epoch_of(loader, batches)]).sort().values
        first = int(targets[0])
        assert targets.tolist() == list(range(first, first + len(targets)))
        assert first >= 1
        assert targets[-1] < 2 * B * T + extra
        assert len(targets) == loader.steps_per_epoch * B * T
        assert 2 * B * T + extra - 1 - len(targets) < (B + 1) * T


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=50, deadline=None)
@given(sizes=SIZES)
def test_shapes_types_and_the_target_is_the_next_token(order, sizes):
    B, T, _ = sizes
    loader = make(order, sizes)
    batches = loader.batches(0, 0)
    for index in range(loader.steps_per_epoch):
        batch = next(batches)
        assert batch.x.shape == batch.y.shape == (T, B)
        assert batch.x.dtype == batch.y.dtype == torch.int64
        assert batch.reset.shape == (B,)
        assert batch.reset.dtype == torch.bool
        assert (batch.epoch, batch.index) == (0, index)
        assert torch.equal(batch.y, batch.x + 1)
    assert next(batches).epoch == 1


def test_lanes_go_on_where_they_ended_and_reset_at_an_epoch():
    loader = TextLoader(np.arange(1000, dtype=np.uint16), 4, 10, seed=1)
    batches = loader.batches(0, 0)
    last = None
    for _ in range(3 * loader.steps_per_epoch):
        batch = next(batches)
        assert batch.reset.tolist() == [batch.index == 0] * 4
        if batch.index:
            assert last is not None
            assert torch.equal(batch.x[0], last)
        last = batch.y[-1]


def test_offsets_differ_between_epochs_and_reach_the_end():
    loader = TextLoader(np.arange(1000, dtype=np.uint16), 2, 16, seed=0)
    batches = loader.batches(0, 0)
    starts, ends = set(), set()
    for _ in range(200):
        targets = epoch_of(loader, batches)
        starts.add(int(targets[0][0, 0]))
        ends.add(int(targets[-1][-1, -1]))
    slack = 1000 - 1 - 2 * 16 * loader.steps_per_epoch
    assert starts == set(range(1, slack + 2))
    assert max(ends) == 999


def test_windows_are_shuffled_and_always_reset():
    loader = TextLoader(np.arange(4000, dtype=np.uint16), 4, 10, seed=5, order="windows")
    batches = loader.batches(0, 0)
    orders = []
    for _ in range(2):
        starts = []
        for _ in range(loader.steps_per_epoch):
            batch = next(batches)
            assert bool(batch.reset.all())
            starts += batch.x[0].tolist()
        assert starts != sorted(starts)
        orders.append(starts)
    assert orders[0] != orders[1]


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=50, deadline=None)
@given(sizes=SIZES, steps=st.integers(0, 30), seed=st.integers(0, 2**63 - 1))
def test_resume_anywhere_gives_the_same_batches(order, sizes, steps, seed):
    loader = make(order, sizes, seed)
    straight = loader.batches(0, 0)
    for _ in range(steps):
        next(straight)
    resumed = make(order, sizes, seed).batches(*divmod(steps, loader.steps_per_epoch))
    for _ in range(2 * loader.steps_per_epoch + 1):
        one, two = next(straight), next(resumed)
        assert torch.equal(one.x, two.x)
        assert torch.equal(one.y, two.y)
        assert torch.equal(one.reset, two.reset)
        assert (one.epoch, one.index) == (two.epoch, two.index)


def test_the_lanes_of_a_process_are_those_of_the_whole_batch():
    ids = np.arange(400, dtype=np.uint16)
    for order in ORDERS:
        whole = TextLoader(ids, 6, 5, 3, order)
        part = TextLoader(ids, 6, 5, 3, order, lanes=slice(2, 4))
        assert (whole.num_lanes, part.num_lanes) == (6, 2)
        for one, two in zip(whole.first_epoch(), part.first_epoch(), strict=True):
            assert torch.equal(one.x[:, 2:4], two.x)
            assert torch.equal(one.start[2:4], two.start)


def test_lane_resets_come_at_the_given_rate_and_only_from_the_position():
    def resets(seed, start=0):
        loader = TextLoader(np.zeros(100_000, np.uint8), 20, 5, seed, lane_reset=0.1)
        batches = loader.batches(0, start)
        return torch.stack([next(batches).reset for _ in range(500)])

    drawn = resets(1)
    assert bool(drawn[0].all())
    assert drawn[1:].float().mean().item() == pytest.approx(0.1, abs=0.02)
    assert torch.equal(resets(1, start=100)[:300], drawn[100:400])
    assert not torch.equal(resets(2), drawn)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("num", "advice"),
    [
        (8191, "give `batch_size=31` or give more text"),
        (255, "give `seq_length=3` or give more text"),
        (63, "give more text"),
    ],
)
def test_a_text_that_is_too_short_is_refused(order, num, advice):
    with pytest.raises(DataError) as caught:
        TextLoader(np.zeros(num, np.uint8), 32, 128, 0, order)
    assert str(caught.value) == (
        f"the training text has {num:,} tokens, `batch_size=32` with `seq_length=128` needs at"
        f" least 8,192; {advice}"
    )
    next(TextLoader(np.zeros(8192, np.uint8), 32, 128, 0, order).first_epoch())
    next(TextLoader(np.zeros(8191, np.uint8), 31, 128, 0, order).first_epoch())
    next(TextLoader(np.zeros(255, np.uint8), 32, 3, 0, order).first_epoch())


@pytest.mark.parametrize(
    "state", [{}, {"epoch": -1, "index": 0}, {"epoch": 0, "index": 24}, {"epoch": 0, "index": 1.0}]
)
def test_an_impossible_position_is_refused(state):
    loader = TextLoader(np.zeros(1000, np.uint8), 4, 10, 0)
    assert loader.steps_per_epoch == 24
    with pytest.raises(CorruptFileError, match="was the text or the batch size changed"):
        loader.load_state_dict(state)


def test_mapped_pages_are_released(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("fastlstm.text.data.lanes._RELEASE_EVERY", 3)
    monkeypatch.setattr("fastlstm.text.data.lanes.release_pages", calls.append)
    batches = TextLoader(np.zeros(1000, np.uint8), 4, 10, 0).batches(0, 0)
    for _ in range(7):
        next(batches)
    assert len(calls) == 2
