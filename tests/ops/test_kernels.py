"""Memory as the kernels read it."""

import os
import subprocess
import sys

import pytest
import torch

from fastlstm.nn.lstm import LSTM
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


@pytest.fixture
def _unfilled_memory(_poisoned_memory):
    """Torch fills fresh memory otherwise."""
    torch.use_deterministic_algorithms(False)


@pytest.mark.skipif(os.name != "posix", reason="memory is kept on Linux and macOS")
@pytest.mark.usefixtures("_unfilled_memory")
def test_a_large_block_takes_the_place_of_the_last_one_and_no_others():
    first, second = kernels.empty((1 << 21,)), kernels.empty((1 << 22,), torch.bfloat16)
    assert (first.nbytes, second.nbytes) == (8 << 20, 8 << 20)
    places = {first.data_ptr(), second.data_ptr()}
    assert len(places) == 2
    view = first.fill_(3.0).numpy()[-5:]
    del first
    third = kernels.empty((1 << 21,)).fill_(4.0)
    assert (view == 3.0).all(), "a view keeps its block"
    del second, third, view
    again = [kernels.empty((512, 4096)).fill_(k) for k in range(3)]
    assert places < {t.data_ptr() for t in again}
    assert [float(t.mean()) for t in again] == [0.0, 1.0, 2.0]


@pytest.mark.usefixtures("_unfilled_memory")
def test_outputs_on_blocks_are_no_views_for_autograd():
    layer, x = LSTM(4, 512), torch.randn(64, 32, 4)
    with torch.no_grad():
        y, _ = layer(x)
    assert y.nbytes >= 4 << 20
    assert not y._is_view()
    y.add_(torch.nn.Parameter(torch.ones(512))).sum().backward()
    shared = torch.randn(2000, 1024, requires_grad=True)
    (kernels.empty((2000, 1024)).fill_(1.0) * shared).sum().backward()
    assert shared.grad.shape == (2000, 1024)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.usefixtures("_unfilled_memory")
def test_kept_blocks_after_a_fork():
    kernels.empty((1 << 21,)).fill_(1.0)
    held = kernels.empty((1 << 22,)).fill_(2.0)
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # the threads of OpenMP are not in the child
        own = kernels.empty((1 << 21,)).fill_(5.0)
        held.fill_(6.0)
        os._exit(0 if own.sum() == 5 << 21 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert held.mean() == 2.0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_blocks_that_are_kept_have_a_limit(monkeypatch):
    code = """
import os, resource
from fastlstm.nn.lstm import LSTM
from fastlstm.ops import kernels
held = [kernels.empty((1 << 19,)) for _ in range(3)]
del held
size = lambda: int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGESIZE")
before, most = size(), 0
for k in range(30):  # never written: address space only
    t = kernels.empty(((100 + 30 * k) << 18,))
    del t
    most = max(most, size() - before)
assert most < (2100 << 20), most
"""
    subprocess.run([sys.executable, "-c", code], check=True)


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


def test_memory_that_torch_is_told_to_fill_is_filled():
    assert kernels.empty((1 << 21,)).isnan().all()


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
