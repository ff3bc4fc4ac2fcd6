"""Packed weights are those of an earlier call while the weights are what they were.

All the ways to write to weights are in tests/nn/test_changed_weights.py.
"""

import gc

import pytest
import torch

from fastlstm.ops.call import LSTMArgs
from fastlstm.ops.kernels import fastest_kernels
from fastlstm.ops.packed_weights import _PACKED, freeze, packed

T, B, I, H = 4, 2, 5, 7  # noqa: E741


@pytest.fixture
def args(ops):
    x, *rest = ops.make(T, B, I, H).copy(torch.float32, ()).list()
    return LSTMArgs(x, None, *rest)


def pack(args, is_bf16=False, **options):
    return packed(args, fastest_kernels(is_bf16), 1, **options)


def test_weights_are_packed_once_per_pass_and_kernel(args):
    first = pack(args)
    assert pack(args) is first
    backward = pack(args, is_backward=True)
    assert pack(args, is_backward=True) is backward
    assert backward.memory.data_ptr() != first.memory.data_ptr()
    half = pack(args, is_bf16=True)
    assert half is not first
    assert half.memory.nbytes != first.memory.nbytes


def test_frozen_tensors_made_in_inference_mode_are_read(args):
    with torch.inference_mode():
        args = args._replace(w_ih=args.w_ih.clone())
        freeze(args.w_hh)
        first = pack(args)
        args.w_ih.view(-1)[3] += 1
        assert pack(args) is not first


def test_packed_weights_are_freed_with_their_weights(args):
    gc.collect()
    before = len(_PACKED[False])
    args = args._replace(w_hh=args.w_hh.clone())
    pack(args)
    assert len(_PACKED[False]) == before + 1
    del args
    gc.collect()
    assert len(_PACKED[False]) <= before
