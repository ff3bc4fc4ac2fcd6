"""torch's rules for cuDNN's persistent kernel, and padding to meet them, without a GPU."""

import pytest
import torch

from fastlstm.ops.backends import cudnn
from fastlstm.ops.call import LSTMArgs, LSTMCall
from native_run import lstm

CALL = LSTMCall(T=64, B=32, I=128, H=512, dtype=torch.float16, device="cuda", requires_grad=True)


@pytest.fixture
def _with_cudnn(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"H": 1024, "B": 128}, None),
        ({"dtype": torch.bfloat16}, "needs fp16, this is bfloat16"),
        ({"dtype": torch.float32}, "needs fp16, this is float32"),
        ({"dtype": torch.float32, "H": 100, "I": 7, "B": 300}, None),
        ({"dtype": torch.float32, "H": 160}, "needs fp16, this is float32"),
        ({"dtype": torch.float32, "H": 160, "requires_grad": False}, None),
        ({"dtype": torch.bfloat16, "H": 100}, "needs fp16, this is bfloat16"),
        ({"H": 1152}, "H=1152 is not a multiple of 128 up to 1024"),
        ({"H": 500}, "H=500 is not a multiple of 128 up to 1024"),
        ({"I": 100}, "I=100 is not a multiple of 128"),
        ({"B": 136}, "B=136 is not a multiple of 8 up to 128"),
        ({"B": 12}, "B=12 is not a multiple of 8 up to 128"),
    ],
)
def test_rules_of_the_persistent_kernel(changes, reason):
    assert cudnn.persistent_refusal(CALL._replace(**changes)) == reason


def test_cheap_padding_for_the_persistent_kernel():
    odd = CALL._replace(B=30, I=100, H=500)
    assert cudnn.padded_call(odd) == CALL._replace(B=32, I=128, H=512)
    assert cudnn.padded_call(CALL) == CALL
    assert cudnn.padded_call(odd._replace(dtype=torch.bfloat16)).H == 500
    assert cudnn.padded_call(CALL._replace(H=1030)).H == 1030
    assert cudnn.padded_call(CALL._replace(B=1)).B == 1, "eight times the work is not worth it"
    assert cudnn.padded_call(CALL._replace(H=800)).H == 896
    assert cudnn.padded_call(CALL._replace(H=800, B=128)).H == 800, "it gains less there"
    assert cudnn.padded_call(CALL._replace(H=100)).H == 100, "few units need no padding"


@pytest.mark.usefixtures("_with_cudnn")
def test_kernel_lines_name_the_kernel_and_why():
    assert cudnn.cudnn_kernel(CALL).name == ("cuDNN persistent LSTM float16 (by torch's rules)")
    padded = cudnn.cudnn_kernel(CALL._replace(H=500))
    assert "padded to B=32 I=128 H=512" in padded.name
    standard = cudnn.cudnn_kernel(CALL._replace(dtype=torch.bfloat16))
    assert standard.name == "cuDNN standard LSTM bfloat16 (by torch's rules)"
    assert standard.why == "not persistent: needs fp16, this is bfloat16"
    assert standard.is_fast


def test_without_cudnn_torch_runs_the_loop(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    kernel = cudnn.cudnn_kernel(CALL)
    assert (kernel.name, kernel.is_fast) == ("ATen per-step loop", False)
    assert kernel.why == "because cuDNN is missing or switched off"


@pytest.mark.parametrize("bias", [True, False])
def test_padding_is_exact(ops, monkeypatch, bias):
    """Run on the CPU in float64 by lifting the rule on the dtype."""
    monkeypatch.setattr(cudnn, "MAX_PADDING_COSTS", {8: 1e9})
    monkeypatch.setattr(cudnn, "MAX_SMALL_H_BACKWARD", 0)
    rule = cudnn.persistent_refusal
    half = torch.float16
    monkeypatch.setattr(cudnn, "persistent_refusal", lambda call: rule(call._replace(dtype=half)))
    args = ops.make(4, 3, 5, 7, bias=bias)
    grads = ops.names if bias else ops.names[:5]
    given = args.copy(torch.float64, grads)
    x, h0, c0, *weights = given.list()
    call = LSTMCall(4, 3, 5, 7, torch.float64, "cpu", requires_grad=True, has_bias=bias)
    assert cudnn.padded_call(call) == call._replace(B=8, I=128, H=128)
    out = cudnn.cudnn_lstm(call, LSTMArgs(x, None, h0, c0, *weights))
    ops.backpropagate(given, out)
    want = ops.reference(args, torch.float64, grads)
    for name, value in zip(("y", "hT", "cT"), out, strict=True):
        ops.assert_close(name, value, want[name], torch.float64)
    for name in grads:
        ops.assert_close(f"d{name}", given.tensors[name].grad, want[f"d{name}"], torch.float64)


def test_weights_of_the_caller_stay_where_they_are(ops):
    x, h0, c0, *weights = ops.make(2, 2, 3, 5).copy(torch.float32, ("w_ih", "b_ih")).list()
    given = LSTMArgs(x, None, h0, c0, *weights)
    assert (
        len({w.data_ptr() for w in (*given.weights(), *cudnn.own_weights(given, given).weights())})
        == 8
    )
    cast = given.cast(torch.bfloat16)
    assert cudnn.own_weights(cast, given).w_hh is cast.w_hh
    cudnn.own_weights(given, given).w_ih.sum().backward()
    assert given.w_ih.grad is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(6, 3, 5, 7), (50, 32, 128, 256), (50, 30, 100, 250)], ids=str)
def test_on_a_gpu(ops, monkeypatch, dtype, sizes):

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # torch's default is True
    args = ops.make(*sizes)
    given = args.copy(dtype)
    for name, value in given.tensors.items():
        given.tensors[name] = value.detach().cuda().requires_grad_()
    given.dy, given.dh, given.dc = args.dy.cuda(), args.dh.cuda(), args.dc.cuda()
    out = lstm(*given.list())
    ops.backpropagate(given, out)
    want = ops.reference(args, dtype, ops.names)
    times = 5.0 if sizes[-1] <= 192 and dtype == torch.float32 else 1.0  # cuDNN's, of few units
    for name, value in zip(("y", "hT", "cT"), out, strict=True):
        ops.assert_close(name, value.cpu(), want[name], dtype, times)
    for name in ops.names:
        ops.assert_close(f"d{name}", given.tensors[name].grad.cpu(), want[f"d{name}"], dtype, times)
