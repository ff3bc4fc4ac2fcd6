"""oneDNN's conditions as stated here are torch's, and the kernel really runs."""

import pytest
import torch

from fastlstm.ops.backends import onednn
from fastlstm.ops.call import LSTMArgs, LSTMCall, describe_call
from fastlstm.ops.registry import select
from fastlstm.system import hardware
from native_run import lstm

pytestmark = pytest.mark.isa

FUSED, FUSED_BACKWARD = "aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def run(ops, args, grads):
    out = lstm(*args.list(), backend="aten")
    if grads:
        ops.backpropagate(args, out)


@pytest.mark.parametrize("sizes", [(6, 3, 8, 16), (1, 1, 1, 1), (1, 4, 7, 63)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("train", [True, False])
def test_the_reported_kernel_runs(ops, sizes, dtype, train):
    grads = ops.names if train else ()
    args = ops.make(*sizes).copy(dtype, grads)
    x, h0, c0, *weights = args.list()
    kernel = select(describe_call(LSTMArgs(x, None, h0, c0, *weights)), backend="aten").kernel
    events = ops.events(lambda: run(ops, args, grads))
    is_fused = kernel.name.startswith("oneDNN fused LSTM")
    assert (FUSED in events) == is_fused, f"announced {kernel.name}"
    assert (FUSED_BACKWARD in events) == (is_fused and train)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("train", [True, False])
def test_refusal_agrees_with_torchs_own_choice(ops, dtype, train):
    grads = ops.names if train else ()
    x, h0, c0, *weights = ops.make(4, 3, 8, 16).copy(dtype, grads).list()
    call = describe_call(LSTMArgs(x, None, h0, c0, *weights))

    def run_torch():
        with torch.set_grad_enabled(train):
            state = (h0.unsqueeze(0), c0.unsqueeze(0))
            torch.lstm(x, state, weights, True, 1, 0.0, train, False, False)

    assert (FUSED in ops.events(run_torch)) == (onednn.refusal(call) is None)


@pytest.mark.usefixtures("without_onednn")
def test_switched_off_runs_the_loop_and_says_so(ops):
    args = ops.make(4, 3, 8, 16).copy(torch.float32)
    x, h0, c0, *weights = args.list()
    events = ops.events(lambda: run(ops, args, ops.names))
    kernel = select(describe_call(LSTMArgs(x, None, h0, c0, *weights)), backend="aten").kernel
    assert FUSED not in events
    assert kernel.why == "because torch.backends.mkldnn is switched off"
    assert not kernel.is_fast


@pytest.mark.usefixtures("with_onednn")
def test_autocast_runs_the_bf16_kernel_where_the_cpu_has_one(ops):
    args = ops.make(4, 3, 8, 16).copy(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        x, h0, c0, *weights = args.list()
        call = describe_call(LSTMArgs(x, None, h0, c0, *weights))
        assert call.dtype == torch.bfloat16
        is_fused = onednn.refusal(call) is None
        events = ops.events(lambda: run(ops, args, ops.names))
    assert (FUSED in events) == is_fused
    if not is_fused:
        assert "AVX-512" in onednn.refusal(call)


@pytest.mark.parametrize("unit", ["AMX", "AVX512-BF16", None])
def test_kernel_names_the_instructions(monkeypatch, unit):

    monkeypatch.setattr(hardware, "bf16_instructions", lambda: unit)
    call = LSTMCall(T=2, B=2, I=2, H=2, dtype=torch.bfloat16, device="cpu", requires_grad=True)
    kernel = onednn.kernel(call)
    if unit is None:
        assert not kernel.is_fast
        assert kernel.why == (
            "this CPU has no bf16 instructions, they are emulated; fp32 is faster here"
        )
    else:
        assert kernel.name == f"oneDNN fused LSTM bf16 ({unit})"
        assert kernel.is_fast


def test_a_second_derivative_is_right():
    found = []
    for dtype, backend in ((torch.float32, "aten"), (torch.float64, "reference")):
        torch.manual_seed(0)
        layer = torch.nn.LSTM(8, 8, dtype=torch.float64).to(dtype)
        x, state = torch.randn(3, 2, 8, dtype=torch.float64).to(dtype), torch.zeros(2, 8).to(dtype)
        y = lstm(x, state, state, *layer._flat_weights, backend=backend).y
        weight = layer.weight_hh_l0
        (first,) = torch.autograd.grad(y.square().sum(), weight, create_graph=True)
        found += torch.autograd.grad(first.square().sum(), weight)
    torch.testing.assert_close(found[0].double(), found[1], rtol=1e-4, atol=1e-7)
