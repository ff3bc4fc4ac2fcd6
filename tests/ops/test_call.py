"""Describing a call."""

import torch

from fastlstm.ops.call import LSTMArgs, compute_dtype, describe_call


def test_description_follows_the_tensors(ops):
    x, h0, c0, *weights = ops.make(5, 3, 8, 16).copy(torch.float32, ("w_hh",)).list()
    call = describe_call(LSTMArgs(x, None, h0, c0, *weights))
    assert (call.T, call.B, call.I, call.H) == (5, 3, 8, 16)
    assert call.requires_grad
    assert call.has_bias
    assert str(call) == "T=5 B=3 I=8 H=16 float32 cpu train"
    with torch.no_grad():
        assert not describe_call(LSTMArgs(x, None, h0, c0, *weights)).requires_grad
    bare = LSTMArgs(x, None, h0, c0, weights[0], weights[1].detach(), None, None)
    assert str(describe_call(bare)).endswith("cpu infer")
    assert not describe_call(bare).has_bias


def test_compute_dtype_is_autocasts_except_for_float64():
    with torch.autocast("cpu", torch.bfloat16):
        assert compute_dtype(torch.zeros(1)) == torch.bfloat16
        assert compute_dtype(torch.zeros(1, dtype=torch.float64)) == torch.float64
    assert compute_dtype(torch.zeros(1, dtype=torch.float16)) == torch.float16
