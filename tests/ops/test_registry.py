"""Which backend runs a call, why, and what a backend has to bring along."""

import pytest
import torch

from fastlstm.errors import KernelError
from fastlstm.nn.lstm import LSTM
from fastlstm.ops import registry
from fastlstm.ops.backends.aten import AtenBackend
from fastlstm.ops.backends.native import NativeBackend
from fastlstm.ops.backends.reference import ReferenceBackend
from fastlstm.ops.call import Kernel, LSTMCall
from fastlstm.ops.explain import explain
from fastlstm.ops.registry import BACKENDS, select
from native_run import lstm, lstm_tokens

pytestmark = pytest.mark.isa

REFUSED = "native: these kernels compute in float32 and bf16, not in float64"


def make_call(**changes):
    fields = {"T": 8, "B": 4, "I": 16, "H": 32, "dtype": torch.float32, "device": "cpu"}
    return LSTMCall(**{**fields, "requires_grad": True, **changes})


def test_fp32_and_bf16_on_a_cpu_run_our_kernels():
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        chosen = select(make_call(dtype=dtype))
        assert chosen.backend.name == "native"
        assert chosen.kernel.name.startswith(f"fused LSTM {name}")
        assert chosen.refusals == ()


@pytest.mark.usefixtures("with_onednn")
def test_torchs_kernel_can_be_chosen():
    chosen = select(make_call(), backend="aten", strict=True)
    assert chosen.kernel.name.startswith("oneDNN fused LSTM fp32")


@pytest.mark.usefixtures("with_onednn")
def test_float64_says_why_it_is_slow():
    chosen = select(make_call(dtype=torch.float64))
    assert chosen.kernel.name == "ATen per-step loop"
    assert chosen.why == f"{REFUSED}; because oneDNN has no LSTM in float64"


@pytest.mark.usefixtures("with_onednn")
def test_strict_refuses_a_slow_path():
    message = (
        r"LSTM T=8 B=4 I=16 H=32 float64 cpu train would run on a slow path, aten: ATen per-step"
        rf" loop \({REFUSED}; because oneDNN has no LSTM in float64\); change that or leave out"
        r" `strict_kernels`"
    )
    with pytest.raises(KernelError, match=message):
        select(make_call(dtype=torch.float64), strict=True)


@pytest.mark.usefixtures("without_onednn")
def test_strict_refuses_when_onednn_is_off():
    with pytest.raises(KernelError, match="switched off"):
        select(make_call(), backend="aten", strict=True)


def test_refusals_name_the_backend_and_the_reason():
    chosen = select(make_call(device="xpu"))
    assert chosen.backend.name == "reference"
    assert chosen.refusals == (("aten", "torch has no LSTM kernel for device xpu"),)
    assert "aten: torch has no LSTM kernel for device xpu; " in chosen.why
    with pytest.raises(KernelError, match=r"backend 'aten' cannot run LSTM .* torch has no LSTM"):
        select(make_call(dtype=torch.int32), backend="aten")


def test_the_last_backend_runs_everything():
    for dtype in (torch.float64, torch.bfloat16):
        for device in ("cpu", "cuda", "mps"):
            assert BACKENDS[-1].supports(make_call(dtype=dtype, device=device)) is None
    assert AtenBackend().supports(make_call(device="cuda")) is None


def test_a_call_builds_no_description(monkeypatch, ops):
    def must_not_run(*args):
        raise AssertionError("a plain call was described")

    for kind in (NativeBackend, AtenBackend, ReferenceBackend):
        monkeypatch.setattr(kind, "describe", must_not_run)
    monkeypatch.setattr(LSTMCall, "__str__", must_not_run)
    args = ops.make(5, 3, 8, 16).copy(torch.float32).list()
    lstm(*args).y.sum().backward()
    lstm(*args, backend="reference")
    lstm(*(None if t is None else t.double() for t in args))
    lstm_tokens(torch.zeros(5, 3, dtype=torch.long), torch.zeros(4, 8), *args[1:])
    LSTM(8, 16, 2, zoneout=0.1)(args[0])
    with pytest.raises(AssertionError, match="was described"):
        lstm(*args, strict=True)


class Halves:
    """Kernels of somebody's own, for float64 on a CPU."""

    name = "halves"
    is_own = True
    device = None

    def supports(self, call):
        is_known = call.dtype == torch.float64 and call.device == "cpu"
        return None if is_known else "it knows float64 only"

    def describe(self, call):
        return Kernel("two half floats", is_fast=True)

    def run(self, call, args):
        out = ReferenceBackend().run(call, args)
        return out._replace(y=out.y + 1)


def test_a_listed_backend_is_used(monkeypatch):
    layer = LSTM(8, 16).double()
    x = torch.randn(5, 3, 8, dtype=torch.float64)
    want = layer(x)[0] + 1
    backends = (Halves(), *BACKENDS)
    monkeypatch.setattr(registry, "BACKENDS", backends)
    monkeypatch.setattr(registry, "_BY_NAME", {backend.name: backend for backend in backends})
    torch.testing.assert_close(layer(x)[0], want)
    (report,) = explain(layer)
    assert (report.backend, report.kernel, report.is_fast) == ("halves", "two half floats", True)
    layer.strict = True
    torch.testing.assert_close(layer(x)[0], want)
    layer.backend = "halves"
    torch.testing.assert_close(layer(x)[0], want)
    with pytest.raises(KernelError, match=r"backend 'halves' cannot run .* it knows float64 only"):
        layer.float()(x.float())
