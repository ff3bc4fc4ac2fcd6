"""The rows of shards, and sums over processes in one order."""

from itertools import chain

import pytest
import torch

from distributed_run import run_script
from fastlstm.distributed.shards import Shards, shard_seed

SUMS = """
import sys, torch
from fastlstm.distributed.joining import joined
from fastlstm.distributed.reduction import TreeReduction
place = sys.argv[1]
with joined() as world:
    for size in (1, 7, 1000, 2_500_001):
        parts = [torch.randn(size, generator=torch.Generator().manual_seed(s)) for s in range(4)]
        flat = parts[world.rank].clone()
        report = torch.full((3,), 0.25, dtype=torch.float64)
        world.reduction(flat)(report)
        assert report.tolist() == [1.0, 1.0, 1.0], report
        torch.save(flat, f"{place}/{world.size}-{world.rank}-{size}.pt")
        flat = parts[world.rank].clone()
        TreeReduction(flat, torch.bfloat16)(report)
        torch.save(flat, f"{place}/bf16-{world.size}-{world.rank}-{size}.pt")
"""


@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 16, 37])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_processes_share_every_row_once(num_rows, world_size):
    rows = list(range(num_rows))
    shards = [Shards(4, rank, world_size) for rank in range(world_size)]
    own = [rows[each.rows(num_rows)] for each in shards]
    assert list(chain(*own)) == rows
    parts = [
        [each[part] for part in shards_.parts(num_rows, len(each))]
        for each, shards_ in zip(own, shards, strict=True)
    ]
    alone = [rows[part] for part in Shards(4).parts(num_rows, num_rows)]
    assert list(chain(*parts)) == alone


def test_random_numbers_differ_by_seed_step_and_shard():
    seeds = {shard_seed(a, b, c) for a in range(4) for b in range(4) for c in range(4)}
    assert len(seeds) == 64
    assert shard_seed(1, 2, 3) == shard_seed(1, 2, 3)


@pytest.mark.slow
def test_sums_have_the_same_bits_in_any_number_of_processes(tmp_path):
    run_script(SUMS, 4, tmp_path)
    for size in (1, 7, 1000, 2_500_001):
        parts = [torch.randn(size, generator=torch.Generator().manual_seed(s)) for s in range(4)]
        expected = (parts[0] + parts[1]) + (parts[2] + parts[3])
        rounded = [torch.load(tmp_path / f"bf16-4-{rank}-{size}.pt") for rank in range(4)]
        for rank in range(4):
            assert torch.equal(torch.load(tmp_path / f"4-{rank}-{size}.pt"), expected)
            assert torch.equal(rounded[rank], rounded[0])  # all ranks have the same
        torch.testing.assert_close(rounded[0], expected, rtol=0.03, atol=0.05)
