"""Streams: chunks follow each other in their lanes, every row is read at most once an epoch."""

from __future__ import annotations

import numpy as np
import pytest

from fastlstm.errors import CorruptFileError, DataError, Stopped
from fastlstm.forecast.data.table import Segments, Table, table_from_array
from fastlstm.forecast.data.window_loader import ChunkBatch, ChunkLoader

LENGTHS = (70, 11, 200, 23, 12)
LENGTH, HORIZON, PHASES = 6, 5, 3


def table() -> Table:
    """Segments of such lengths; the cell of row r is r."""
    num_rows = np.array(LENGTHS, dtype=np.int64)
    first = np.cumsum(num_rows) - num_rows
    plain = table_from_array(np.arange(num_rows.sum(), dtype=np.float32))
    series = np.arange(len(LENGTHS), dtype=np.int64)
    segments = Segments(series, first, num_rows, np.zeros_like(first))
    return Table(plain.values, plain.columns, segments)


def loader(
    batch_size: int = 4, run_length: int = 24, seed: int = 0, **given: object
) -> ChunkLoader:
    ends = np.cumsum(np.array(LENGTHS, dtype=np.int64))
    return ChunkLoader(
        table(), ends, LENGTH, HORIZON, PHASES, batch_size, run_length, seed, **given
    )  # fmt: skip


def an_epoch(found: ChunkLoader) -> list[ChunkBatch]:
    return [found.next() for _ in range(found.steps_per_epoch)]


@pytest.mark.parametrize("batch_size", [1, 2, 4, 7, 1000])
@pytest.mark.parametrize("run_length", [1, 6, 24, 10_000])
def test_chunks_follow_each_other_and_no_row_is_read_twice(
    batch_size: int, run_length: int
) -> None:
    found = loader(batch_size, run_length)
    ends = np.cumsum(LENGTHS)
    for _ in range(3):
        before: ChunkBatch | None = None
        rows = []
        for batch in an_epoch(found):
            assert batch.values.shape == (len(batch.rows), LENGTH + HORIZON, 1)
            assert (batch.values[:, :, 0].numpy() == batch.rows[:, None] + np.arange(11)).all()
            assert (batch.rows + LENGTH + HORIZON <= ends[batch.segments]).all()
            assert (batch.rows >= (ends - LENGTHS)[batch.segments]).all()
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
    found = loader()
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
    found = loader(batch_size=1, run_length=24)
    batches = an_epoch(found)
    run, longest = 0, 0
    for batch in batches:
        run = run + 1 if batch.continues[0] else 1
        longest = max(longest, run)
    assert longest == 24 // LENGTH
    rows = [int(batch.rows[0]) for batch in batches]
    assert rows != sorted(rows)
    again = [int(batch.rows[0]) for batch in an_epoch(loader(batch_size=1))]
    assert rows == again
    assert rows != [int(batch.rows[0]) for batch in an_epoch(loader(batch_size=1, seed=1))]


def test_a_position_goes_on_exactly() -> None:
    whole = loader()
    batches = [whole.next() for _ in range(3 * whole.steps_per_epoch)]
    for taken in (0, 1, whole.steps_per_epoch - 1, whole.steps_per_epoch + 2):
        before = loader()
        for _ in range(taken):
            before.next()
        after = loader()
        after.load_state_dict(before.state_dict())
        for batch in batches[taken:]:
            same = after.next()
            assert same.rows.tolist() == batch.rows.tolist()
            assert same.continues.tolist() == batch.continues.tolist()
    with pytest.raises(CorruptFileError, match="loader position is"):
        loader().load_state_dict({"epoch": 0, "index": 10_000})


def test_what_cannot_be_is_refused() -> None:
    ends = np.cumsum(np.array(LENGTHS, dtype=np.int64))
    with pytest.raises(DataError, match=r"needs 300 rows and 5 after them, .* has 200; give"):
        ChunkLoader(table(), ends, 300, 5, 1, 4, 300)
    with pytest.raises(Stopped):
        loader(should_stop=lambda: True).next()
