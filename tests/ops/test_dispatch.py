"""Who is chosen, what is said about it, and that it is true."""

import pytest
import torch
from torch import nn

from fastlstm.errors import KernelError
from fastlstm.ops.call import LSTMCall
from fastlstm.ops.dispatch import BACKENDS, explain, select


def make_call(**changes):
    fields = {"T": 8, "B": 4, "I": 16, "H": 32, "dtype": torch.float32, "device": "cpu"}
    return LSTMCall(**{**fields, "requires_grad": True, **changes})


def test_fp32_on_a_cpu_runs_onednn():
    chosen = select(make_call(), strict=True)
    assert chosen.backend.name == "aten"
    assert chosen.kernel.name.startswith("oneDNN fused LSTM fp32")
    assert chosen.refusals == ()


def test_float64_says_why_it_is_slow():
    chosen = select(make_call(dtype=torch.float64))
    assert chosen.kernel.name == "ATen per-step loop"
    assert chosen.why == "because oneDNN has no LSTM in float64"


def test_strict_refuses_a_slow_path():
    message = (
        r"LSTM T=8 B=4 I=16 H=32 float64 cpu train would run on a slow path, aten: ATen per-step"
        r" loop \(because oneDNN has no LSTM in float64\); change that or leave out"
        r" --strict-kernels"
    )
    with pytest.raises(KernelError, match=message):
        select(make_call(dtype=torch.float64), strict=True)


@pytest.mark.usefixtures("without_onednn")
def test_strict_refuses_when_onednn_is_off():
    with pytest.raises(KernelError, match="switched off"):
        select(make_call(), strict=True)


def test_refusals_name_the_backend_and_the_reason():
    chosen = select(make_call(device="xpu"))
    assert chosen.backend.name == "reference"
    assert chosen.refusals == (("aten", "torch has no LSTM kernel for device xpu"),)
    assert chosen.why.startswith("aten: torch has no LSTM kernel for device xpu; ")
    with pytest.raises(KernelError, match=r"no backend can run LSTM .* aten: torch has no LSTM"):
        select(make_call(dtype=torch.int32), backend="aten")


def test_the_last_backend_runs_everything():
    for dtype in (torch.float64, torch.bfloat16):
        for device in ("cpu", "cuda", "mps"):
            assert BACKENDS[-1].supports(make_call(dtype=dtype, device=device)) is None


def test_explain_has_one_line_per_layer_and_follows_autocast():
    stack = nn.Sequential(nn.LSTM(16, 32), nn.LSTM(32, 32))
    reports = explain(stack, torch.zeros(6, 5, dtype=torch.long))
    assert [report.layer for report in reports] == ["layer 0", "layer 1"]
    assert (reports[1].call.T, reports[1].call.B, reports[1].call.I) == (6, 5, 32)
    assert str(reports[0]).startswith("layer 0: aten, oneDNN fused LSTM fp32")
    with torch.autocast("cpu", torch.bfloat16):
        assert explain(stack)[0].call.dtype == torch.bfloat16
    slow = explain(stack.double())[0]
    assert str(slow) == (
        "layer 0: aten, ATen per-step loop (because oneDNN has no LSTM in float64)"
    )
    assert not slow.is_fast


def test_explain_knows_training_from_inference():
    layer = nn.LSTM(4, 4)
    assert explain(layer)[0].call.requires_grad
    assert not explain(layer.eval())[0].call.requires_grad
