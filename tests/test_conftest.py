"""What conftest.py sets up: poison in unwritten memory."""

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_unwritten_floats_are_nan(dtype):
    source = torch.zeros(3, 4, dtype=dtype)
    for tensor in (
        torch.empty(3, 4, dtype=dtype),
        torch.empty_like(source),
        torch.empty_strided((3, 4), (4, 1), dtype=dtype),
        source.new_empty(3, 4),
    ):
        assert tensor.isnan().all()


def test_unwritten_integers_are_the_lowest_value():
    assert (torch.empty(5, dtype=torch.int64) == torch.iinfo(torch.int64).min).all()


def test_poison_leaves_what_fills_its_memory_alone():
    assert torch.nn.Linear(3, 2).weight.isfinite().all()
    assert torch.empty(0).numel() == 0
    assert torch.empty(2, device="meta").is_meta
