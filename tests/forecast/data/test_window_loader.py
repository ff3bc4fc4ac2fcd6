"""Windows: each once an epoch, copied right, resumable anywhere, shared by ranks."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest
import torch

from fastlstm.distributed.world import Share
from fastlstm.errors import ConfigError, CorruptFileError, DataError, Stopped
from fastlstm.forecast.data import window_loader
from fastlstm.forecast.data.table import MISSING_INT16, Segments, Table, table_from_array
from fastlstm.forecast.data.window_index import (
    WindowIndex,
    index_windows,
    read_windows,
    spread_out,
)
from fastlstm.forecast.data.window_loader import ChunkBatch, ChunkLoader, WindowLoader

LENGTHS = (7, 3, 20, 5, 11)


def table(lengths: tuple[int, ...] = LENGTHS, num_columns: int = 3) -> Table:
    """Segments of such lengths; the cell of row r, column c is r + c / 10."""
    num_rows = np.array(lengths, dtype=np.int64)
    first = np.cumsum(num_rows) - num_rows
    series = np.arange(len(lengths), dtype=np.int64)
    rows = np.arange(num_rows.sum(), dtype=np.float32)[:, None]
    values = np.ascontiguousarray(rows + np.arange(num_columns, dtype=np.float32) / 10)
    plain = table_from_array(values)
    segments = Segments(series, first, num_rows, np.zeros_like(first))
    return Table(values, plain.columns, segments)


@pytest.mark.parametrize("num", [1, 2, 10, 1000, 1425])
def test_every_beginning_is_spread_over_all_and_follows_no_season(num: int) -> None:
    rows = 5 + 3 * np.arange(num)
    order = spread_out(rows)
    assert np.array_equal(np.sort(order), rows)
    for first in {1, num // 50, num // 10, num // 2} - {0}:
        places = np.sort((order[:first] - 5) // 3)
        gaps = np.diff([-1, *places, num])
        assert gaps.max() <= 1 + 3 * num / first
        if first >= 100:
            days = np.bincount(places % 7, minlength=7)
            assert days.max() - days.min() <= 0.5 * days.mean()


def windows_by_hand(lengths: tuple[int, ...], length: int, stride: int) -> list[int]:
    found, first = [], 0
    for rows in lengths:
        found += [first + n for n in range(0, rows - length + 1, stride)]
        first += rows
    return found


@pytest.mark.parametrize("length", [1, 4, 7, 20])
@pytest.mark.parametrize("stride", [1, 2, 5])
def test_windows_are_those_that_fit_into_a_segment(length: int, stride: int) -> None:
    index = index_windows(table(), length, stride)
    rows, segments = index.locate(np.arange(len(index), dtype=np.int64))
    assert rows.tolist() == windows_by_hand(LENGTHS, length, stride)
    ends = np.cumsum(LENGTHS)
    assert (rows + length <= ends[segments]).all()
    assert (rows >= ends[segments] - np.array(LENGTHS)[segments]).all()


def test_windows_outside_the_table_are_refused() -> None:
    source, index = table(), index_windows(table(), 4)
    for number in (-1, len(index)):
        with pytest.raises(ValueError, match=f"window numbers are 0 to {len(index) - 1}"):
            index.locate(np.array([number], dtype=np.int64))
    for row in (-1, sum(LENGTHS) - 3):
        with pytest.raises(ValueError, match="begin at row 0 to 42"):
            read_windows(source, np.array([row]), 4)


def test_windows_may_be_kept_to_a_part_of_each_segment() -> None:
    begins, ends = np.array([2, 0, 15, 30, 36]), np.array([7, 10, 25, 35, 40])
    index = index_windows(table(), 4, begins=begins, ends=ends)
    rows, _ = index.locate(np.arange(len(index), dtype=np.int64))
    assert rows.tolist() == [2, 3, *range(15, 22), 30, 31, 36]


@pytest.mark.parametrize("num", [1, 2, 3, 5, 64, 1000, 4097])
def test_a_permutation_holds_every_number_once_and_keys_differ(num: int) -> None:
    zero = np.zeros(1, dtype=np.int64)
    index = WindowIndex(zero, zero, np.array([num], dtype=np.int64), 1, 1)
    numbers = np.arange(num, dtype=np.int64)
    orders = [index.locate(numbers, key)[0] for key in (0, 1, 2**64 - 1)]
    for order in orders:
        assert sorted(order.tolist()) == numbers.tolist()
    if num > 60:
        assert not (orders[0] == orders[1]).all()


def test_an_order_has_no_pattern() -> None:
    """Neighbours of the order are no nearer than chance, and no place prefers a number."""
    num = 10_007
    zero = np.zeros(1, dtype=np.int64)
    index = WindowIndex(zero, zero, np.array([num], dtype=np.int64), 1, 1)
    numbers = np.arange(num, dtype=np.int64)
    for key in range(20):
        order = index.locate(numbers, key)[0].astype(np.float64) / num
        # correlations of independent uniform numbers have a standard deviation of 1 / sqrt(num)
        for lag in (1, 2, 3, 64):
            assert abs(np.corrcoef(order[:-lag], order[lag:])[0, 1]) < 5 / num**0.5
        assert abs(np.corrcoef(order, numbers)[0, 1]) < 5 / num**0.5
    first = [int(index.locate(numbers[:1], key)[0][0]) for key in range(4000)]
    counts = np.histogram(first, bins=20, range=(0, num))[0]
    assert ((counts - 200) ** 2 / 200).sum() < 50  # chi-square with 19 degrees: 1 in 10^4


@pytest.mark.parametrize("batch_size", [1, 4, 7, 64])
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_is_every_window_once(batch_size: int, shuffle: bool) -> None:
    source = table()
    with WindowLoader(source, 4, batch_size, shuffle=shuffle, seed=3) as loader:
        for epoch in range(3):
            rows = []
            for batch in loader.epoch():
                assert batch.epoch == epoch
                for row, values in zip(batch.rows.tolist(), batch.values, strict=True):
                    assert torch.equal(values, torch.from_numpy(source.values[row : row + 4]))
                    rows.append(row)
            assert sorted(rows) == windows_by_hand(LENGTHS, 4, 1)
            assert (rows == windows_by_hand(LENGTHS, 4, 1)) != shuffle


def test_epochs_and_seeds_differ_and_come_again() -> None:
    def order(seed: int, epochs: int) -> list[list[int]]:
        with WindowLoader(table(), 2, 5, seed=seed) as loader:
            return [
                [row for batch in loader.epoch() for row in batch.rows.tolist()]
                for _ in range(epochs)
            ]

    first, second = order(0, 2)
    assert first != second
    assert order(0, 2) == [first, second]
    assert order(1, 1)[0] != first


@pytest.mark.parametrize("balance", [False, True])
def test_a_position_goes_on_exactly(balance: bool) -> None:
    def loader() -> WindowLoader:
        return WindowLoader(table(), 3, 4, seed=5, balance=balance)

    with loader() as read:
        whole = [next(iter(read)).rows.tolist() for _ in range(40)]
    for taken in (0, 1, 5, read.steps_per_epoch, read.steps_per_epoch + 1):
        with loader() as before:
            for _ in range(taken):
                before.next()
            position = before.state_dict()
        with loader() as after:
            after.load_state_dict(position)
            assert [after.next().rows.tolist() for _ in range(40 - taken)] == whole[taken:]
            assert after.state_dict() != position or taken == 40


def test_a_closed_loader_goes_on_where_it_was() -> None:
    with WindowLoader(table(), 3, 4, seed=5) as loader:
        whole = [loader.next().rows.tolist() for _ in range(20)]
    with WindowLoader(table(), 3, 4, seed=5) as loader:
        found = []
        for _ in range(20):
            found.append(loader.next().rows.tolist())
            loader.close()
    assert found == whole


@pytest.mark.parametrize("position", [{}, {"epoch": -1, "index": 0}, {"epoch": 0, "index": 10**6}])
def test_a_position_that_is_none_is_refused(position: dict[str, int]) -> None:
    loader = WindowLoader(table(), 3, 4)
    with pytest.raises(CorruptFileError, match="loader position is"):
        loader.load_state_dict(position)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 4, 6])
def test_processes_share_every_batch(world_size: int, batch_size: int) -> None:
    with WindowLoader(table(), 2, batch_size, seed=1) as loader:
        alone = [batch.rows.tolist() for batch in loader.epoch()]
    shared: list[list[int]] = [[] for _ in alone]
    for rank in range(world_size):
        share = Share(rank, world_size)
        with WindowLoader(table(), 2, batch_size, seed=1, share=share) as loader:
            batches = list(loader.epoch())
        assert [batch.total for batch in batches] == [len(rows) for rows in alone]
        for rows, batch in zip(shared, batches, strict=True):
            assert len(batch.values) == len(batch.rows)
            rows += batch.rows.tolist()
    assert shared == alone


@pytest.mark.parametrize("series", [[0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 1, 2]], ids=str)
@pytest.mark.parametrize("shuffle", [True, False])
def test_balanced_series_come_equally_often(series: list[int], shuffle: bool) -> None:
    """However many segments they have."""
    whole = table((7, 3, 50, 5, 11, 200))
    segments = dataclasses.replace(whole.segments, series=np.array(series, dtype=np.int64))
    source = dataclasses.replace(whole, segments=segments)
    with WindowLoader(source, 3, 4, shuffle=shuffle, seed=3, balance=True) as loader:
        for _ in range(3):
            batches = list(loader.epoch())
            segments_read = np.concatenate([batch.segments for batch in batches])
            assert len(segments_read) == loader.num_windows
            counts = np.bincount(source.segments.series[segments_read])
            assert len(counts) == len(set(series))
            assert counts.max() - counts.min() <= 1


def draws_by_series(num_windows: tuple[int, ...], epochs: int, seed: int) -> list[list[int]]:
    """The windows of each series in the order in which they are drawn, counted from 0."""
    source = table(tuple(num + 2 for num in num_windows))
    drawn: list[list[int]] = [[] for _ in num_windows]
    with WindowLoader(source, 3, 4, shuffle=False, seed=seed, balance=True) as loader:
        for _ in range(epochs):
            for batch in loader.epoch():
                for row, segment in zip(batch.rows.tolist(), batch.segments.tolist(), strict=True):
                    drawn[segment].append(row - int(source.segments.first_rows[segment]))
    return drawn


def test_every_pass_of_a_series_is_whole_in_an_order_of_its_own() -> None:
    """Also where an epoch cannot be dealt out evenly: 73 draws for three series."""
    num_windows = (40, 20, 13)
    passes = []
    for drawn, num in zip(draws_by_series(num_windows, 9, seed=3), num_windows, strict=True):
        whole = len(drawn) // num * num
        passes.append([drawn[begin : begin + num] for begin in range(0, whole, num)])
    for found, num in zip(passes, num_windows, strict=True):
        assert len(found) > 3
        assert all(sorted(one) == list(range(num)) for one in found)
        assert len(set(map(tuple, found))) == len(found)


def test_series_of_one_length_and_other_seeds_have_orders_of_their_own() -> None:
    first, second = draws_by_series((30, 30), 2, seed=3)
    assert first != second
    assert draws_by_series((30, 30), 2, seed=3) == [first, second]
    assert first not in draws_by_series((30, 30), 2, seed=4)


def test_a_batch_stays_what_it_was_while_it_is_held() -> None:
    values = np.arange(60_000, dtype=np.float32).reshape(-1, 3)
    with WindowLoader(values, 50, 16, seed=2) as loader:
        held = [loader.next() for _ in range(200)]
        copies = [batch.values.clone() for batch in held]
        for _ in range(2000):
            loader.next()
    for batch, copy in zip(held, copies, strict=True):
        assert torch.equal(batch.values, copy)


def test_memory_of_batches_that_nobody_holds_is_used_again() -> None:
    values = np.arange(60_000, dtype=np.float32).reshape(-1, 3)
    with WindowLoader(values, 50, 16, seed=2) as loader:
        held = [loader.next() for _ in range(5000)]
        num_held = len({batch.values.untyped_storage().data_ptr() for batch in held})
        del held
        assert len(loader._unused) == window_loader._MAX_UNUSED  # the rest was given back
        places = {loader.next().values.untyped_storage().data_ptr() for _ in range(5000)}
    assert len(places) <= window_loader._MAX_UNUSED < num_held


def test_memory_outlives_its_loader_and_is_no_larger_than_the_table() -> None:
    values = np.arange(60_000, dtype=np.float32).reshape(-1, 3)
    loader = WindowLoader(values, 50, 1 << 40, seed=2)
    batch = loader.next()
    copy = batch.values.clone()
    loader.close()
    del loader
    assert torch.equal(batch.values, copy)


def test_int16_and_float16_come_as_float32() -> None:
    rng = np.random.default_rng(0)
    short = rng.integers(-32768, 32767, (40, 3)).astype(np.int16)
    short[5, 1] = MISSING_INT16
    with WindowLoader(short, 10, 31, shuffle=False) as loader:
        batch = loader.next()
    want = short.astype(np.float32)
    want[short == MISSING_INT16] = np.nan
    for row in range(31):
        np.testing.assert_array_equal(batch.values[row].numpy(), want[row : row + 10])

    every = np.arange(65536, dtype=np.uint16).view(np.float16).reshape(-1, 1)
    with WindowLoader(every, 65536, 1) as loader:
        found = loader.next().values[0].numpy()
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(found, every.astype(np.float32))


def test_an_array_of_another_dtype_or_layout_is_taken() -> None:
    values = np.arange(60, dtype=np.float64).reshape(3, 20).T
    with WindowLoader(values, 5, 4, shuffle=False) as loader:
        np.testing.assert_array_equal(loader.next().values[1].numpy(), values[1:6])


def test_what_cannot_be_is_refused_with_what_to_do() -> None:
    with pytest.raises(DataError, match=r"needs 30 rows, the longest .* has 20; give longer"):
        WindowLoader(table(), 30, 1)
    with pytest.raises(ConfigError, match="length is 0"):
        WindowLoader(table(), 0, 1)
    with pytest.raises(ConfigError, match="batch_size is 0"):
        WindowLoader(table(), 2, 0)
    with pytest.raises(DataError, match="shape \\(2, 2, 2\\)"):
        WindowLoader(np.zeros((2, 2, 2)), 1, 1)


def test_a_child_process_goes_on_by_itself() -> None:
    loader = WindowLoader(table(), 3, 4, seed=5)
    whole = [loader.next().rows.tolist() for _ in range(6)]
    loader.load_state_dict({"epoch": 0, "index": 0})
    loader.next()
    child = os.fork()
    if child == 0:
        try:
            found = [loader.next().rows.tolist() for _ in range(5)]
            loader.close()
            os._exit(0 if found == whole[1:] else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [loader.next().rows.tolist() for _ in range(5)] == whole[1:]
    loader.close()


def test_waiting_can_be_stopped() -> None:
    loader = WindowLoader(table(), 3, 4, should_stop=lambda: True)

    class Never:
        def submit(self, *_: object) -> int:
            return 1

        def wait(self, *_: object) -> bool:
            return False

    loader._queue, loader._process = Never(), os.getpid()
    with pytest.raises(Stopped):
        loader.next()


CHUNKED = (70, 11, 200, 23, 12)
LENGTH, HORIZON, PHASES = 6, 5, 3


def chunk_loader(
    batch_size: int = 4, run_length: int = 24, seed: int = 0, **given: object
) -> ChunkLoader:
    ends = np.cumsum(np.array(CHUNKED, dtype=np.int64))
    return ChunkLoader(
        table(CHUNKED, 1), ends, LENGTH, HORIZON, PHASES, batch_size, run_length, seed, **given
    )  # fmt: skip


def an_epoch(found: ChunkLoader) -> list[ChunkBatch]:
    return [found.next() for _ in range(found.steps_per_epoch)]


@pytest.mark.parametrize("batch_size", [1, 2, 4, 7, 1000])
@pytest.mark.parametrize("run_length", [1, 6, 24, 10_000])
def test_chunks_follow_each_other_and_no_row_is_read_twice(
    batch_size: int, run_length: int
) -> None:
    found = chunk_loader(batch_size, run_length)
    ends = np.cumsum(CHUNKED)
    for _ in range(3):
        before: ChunkBatch | None = None
        rows = []
        for batch in an_epoch(found):
            assert batch.values.shape == (len(batch.rows), LENGTH + HORIZON, 1)
            assert (batch.values[:, :, 0].numpy() == batch.rows[:, None] + np.arange(11)).all()
            assert (batch.rows + LENGTH + HORIZON <= ends[batch.segments]).all()
            assert (batch.rows >= (ends - CHUNKED)[batch.segments]).all()
            if before is None:
                assert not batch.continues.any()
            else:
                assert len(batch.rows) <= len(before.rows)
                lanes = np.flatnonzero(batch.continues)
                assert (batch.rows[lanes] == before.rows[lanes] + LENGTH).all()
                assert (batch.segments[lanes] == before.segments[lanes]).all()
            rows += batch.rows.tolist()
            before = batch
        assert len(rows) == found.num_chunks
        gaps = np.diff(sorted(rows))
        assert (gaps >= LENGTH).all()


def test_all_but_the_ends_of_a_series_is_read_and_begins_move() -> None:
    found = chunk_loader()
    seen, firsts = [], []
    for _ in range(60):
        rows = np.concatenate([batch.rows for batch in an_epoch(found)])
        own = np.sort(rows[(rows >= 81) & (rows < 281)])
        assert len(own) == (200 - HORIZON - (PHASES - 1)) // LENGTH
        firsts.append(int(own[0]))
        seen += own.tolist()
    phases = {first % PHASES for first in firsts}
    assert phases == set(range(PHASES))
    read = {row + t for row in seen for t in range(LENGTH)}
    assert read == set(range(81, 281 - HORIZON))


def test_a_stretch_is_cut_and_shuffled() -> None:
    found = chunk_loader(batch_size=1, run_length=24)
    batches = an_epoch(found)
    run, longest = 0, 0
    for batch in batches:
        run = run + 1 if batch.continues[0] else 1
        longest = max(longest, run)
    assert longest == 24 // LENGTH
    rows = [int(batch.rows[0]) for batch in batches]
    assert rows != sorted(rows)
    again = [int(batch.rows[0]) for batch in an_epoch(chunk_loader(batch_size=1))]
    assert rows == again
    assert rows != [int(batch.rows[0]) for batch in an_epoch(chunk_loader(batch_size=1, seed=1))]


def test_a_position_in_chunks_goes_on_exactly() -> None:
    whole = chunk_loader()
    batches = [whole.next() for _ in range(3 * whole.steps_per_epoch)]
    for taken in (0, 1, whole.steps_per_epoch - 1, whole.steps_per_epoch + 2):
        before = chunk_loader()
        for _ in range(taken):
            before.next()
        after = chunk_loader()
        after.load_state_dict(before.state_dict())
        for batch in batches[taken:]:
            same = after.next()
            assert same.rows.tolist() == batch.rows.tolist()
            assert same.continues.tolist() == batch.continues.tolist()
    with pytest.raises(CorruptFileError, match="loader position is"):
        chunk_loader().load_state_dict({"epoch": 0, "index": 10_000})


def test_a_chunk_beyond_the_table_is_refused() -> None:
    ends = np.cumsum(np.array(CHUNKED, dtype=np.int64))
    with pytest.raises(DataError, match=r"needs 300 rows and 5 after them, .* has 200; give"):
        ChunkLoader(table(CHUNKED, 1), ends, 300, 5, 1, 4, 300)
    with pytest.raises(Stopped):
        chunk_loader(should_stop=lambda: True).next()
