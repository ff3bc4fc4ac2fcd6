"""Memory as the kernels read it."""

import pytest
import torch

from fastlstm.ops import kernels
from fastlstm.system import hardware
from fastlstm.system.environment import ISA_NAMES


def test_a_small_step_runs_on_one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert kernels.num_threads(1, 8, 16) == 1
        assert kernels.num_threads(32, 512, 512) == 3
    finally:
        torch.set_num_threads(threads)


def test_new_memory_ignores_torchs_defaults():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            t = kernels.empty((2, 3))
    finally:
        torch.set_default_dtype(before)
    assert (t.shape, t.dtype, t.device.type) == ((2, 3), torch.float32, "cpu")
    assert kernels.empty((3 << 20,)).fill_(1.0).sum() == 3 << 20, "on huge pages"


def test_tensors_in_format_are_not_copied():
    t = torch.randn(4, 6)
    assert kernels.dense(t) is t
    assert kernels.floats(t) is t
    assert kernels.elements(t, False) is t
    assert kernels.address_of(t) == t.data_ptr()
    assert kernels.address_of(None) == 0
    assert kernels.each(kernels.dense, (t, None)) == [t, None]


def test_other_layouts_and_dtypes_are_converted():
    t = torch.randn(6, 4, dtype=torch.float64, requires_grad=True).t()
    found = kernels.floats(t)
    assert found.is_contiguous()
    assert not found.requires_grad
    assert torch.equal(found, t.detach().float())
    assert torch.equal(kernels.elements(t, False), found)


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 64])
def test_bf16_rows_are_padded_with_zeros_to_whole_tiles(columns):
    rows = torch.randn(2, 3, columns)
    padded = kernels.padded_columns(columns, True)
    assert padded % 32 == 0
    assert columns <= padded < columns + 32
    found = kernels.elements(rows, True).reshape(6, padded)
    assert found.dtype == kernels.element_dtype(True) == torch.bfloat16
    assert torch.equal(found[:, :columns], rows.bfloat16().view(6, columns))
    assert not found[:, columns:].any()
    assert kernels.padded_columns(columns, False) == columns


def test_the_kernels_belong_to_this_cpu():
    cpu = hardware.cpu()
    for is_bf16, isa in ((False, cpu.isa), (True, cpu.bf16_isa)):
        table = kernels.fastest_kernels(is_bf16)
        assert table.is_bf16 is is_bf16
        assert ISA_NAMES.index(table.isa) <= ISA_NAMES.index(isa)
        assert table is kernels.kernel_table(isa, is_bf16)
