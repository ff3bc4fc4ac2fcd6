"""Reads of shared memory in lstm_cluster.cu, which must not collide in a bank."""

import re

import pytest
import torch

from fastlstm.ops.cell_options import TORCHS_CELL
from fastlstm.ops.cuda.cluster_lstm import KernelVariant
from fastlstm.ops.cuda.compiler import source_text

LANES = range(32)


@pytest.mark.parametrize("H", [128, 256, 512])
def test_banks_of_shared_memory_do_not_collide(H):
    """Two words of 16 lanes are read at once, and one of 32 lanes: from 32 banks."""
    for start in (0, 16):
        lanes = range(start, start + 16)
        banks = {
            (((lane & 3) * 64 + (((lane >> 2) ^ (((lane & 3) >> 1) << 2)) << 3)) // 4 + i) % 32
            for lane in lanes
            for i in range(2)
        }
        assert len(banks) == 32
    half = H // 32 // 2
    for warp in range(8):
        read = [
            (lane >> 4) * half * 128 + ((warp * 16 + (lane & 15)) ^ ((lane >> 4) << 4))
            for lane in LANES
        ]
        assert len({word % 32 for word in read}) == 32


def test_the_formulas_equal_the_source():
    source = re.sub(r"\s+", " ", source_text("lstm_cluster"))
    for formula in (
        "s * HB + part * KS * 256 + p * 64 + ((q ^ ((p >> 1) << 2)) << 3);",
        "memory + OWN + own_gates(s, it) + p * 64 + ((q ^ ((p >> 1) << 2)) << 3);",
        "read_at = half * HALF * 512 + ((x ^ (half << 4)) << 2);",
    ):
        assert formula in source, formula


@pytest.mark.parametrize(
    ("zoneout", "norm_size", "size"), [(0, 0, 3072), (2, 0, 4096), (0, 100, 5120), (1, 128, 6144)]
)
def test_blocks_save_as_many_bytes_as_allocated(zoneout, norm_size, size):
    """256 cells of 8 bytes of gates and 4 of c, with options c before zoneout and 8 bytes more."""
    of = (torch.bfloat16, 128, True, False, False, False, zoneout, TORCHS_CELL, norm_size)
    assert KernelVariant(*of).saved_bytes == size
