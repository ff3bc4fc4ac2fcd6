"""What is said about the kernels of a model, and that it is true."""

import pytest
import torch
from torch import nn

from fastlstm.errors import ShapeError
from fastlstm.nn.convert import accelerate
from fastlstm.nn.lstm import LSTM
from fastlstm.ops.explain import explain

pytestmark = pytest.mark.isa

REFUSED = "native: these kernels compute in float32 and bf16, not in float64"


def test_explain_has_one_line_per_layer_and_follows_autocast():
    stack = nn.Sequential(LSTM(16, 32), LSTM(32, 32))
    reports = explain(stack, torch.zeros(6, 5, dtype=torch.long))
    assert [report.layer for report in reports] == ["layer 0", "layer 1"]
    assert (reports[1].call.T, reports[1].call.B, reports[1].call.I) == (6, 5, 32)
    assert str(reports[0]).startswith("layer 0: native, fused LSTM fp32")
    with torch.autocast("cpu", torch.bfloat16):
        assert explain(stack)[0].call.dtype == torch.bfloat16
    slow = explain(stack.double())[0]
    assert str(slow) == f"layer 0: torch, torch.nn.LSTM ({REFUSED})"
    assert not slow.is_fast
    with torch.autocast("cpu", torch.bfloat16):  # which leaves float64 as it is
        assert explain(stack)[0].call.dtype == torch.float64


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.LSTM(4, 5), (7, 3, 4)),
        (nn.LSTM(4, 5, batch_first=True), (3, 7, 4)),
        (nn.Sequential(LSTM(4, 5, batch_first=True)), (3, 7)),
    ],
)
def test_explain_reads_an_input_in_the_layout_of_the_model(model, shape):
    call = explain(model, torch.zeros(shape))[0].call
    assert (call.T, call.B) == (7, 3)


@pytest.mark.parametrize("batch_first", [True, False])
def test_explain_of_a_layer_reads_an_unbatched_input(batch_first):
    call = explain(LSTM(4, 5, batch_first=batch_first), torch.zeros(7, 4))[0].call
    assert (call.T, call.B) == (7, 1)


@pytest.mark.parametrize("sizes", [{"T": 0}, {"B": -3}])
def test_explain_refuses_sizes_below_one(sizes):
    with pytest.raises(ShapeError, match="expected a whole number, 1 or more"):
        explain(LSTM(4, 5), **sizes)


def test_explain_has_one_line_per_direction():
    model = nn.ModuleList([LSTM(16, 32, 3, bidirectional=True), LSTM(8, 4, bias=False)])
    reports = explain(model, T=3, B=2)
    assert [(r.layer, r.call.I, r.call.H, r.call.has_bias) for r in reports] == [
        ("layer 0", 16, 32, True), ("layer 0 reverse", 16, 32, True), ("layer 1", 64, 32, True),
        ("layer 1 reverse", 64, 32, True), ("layer 2", 64, 32, True),
        ("layer 2 reverse", 64, 32, True), ("layer 3", 8, 4, False),
    ]  # fmt: skip
    assert {r.backend for r in reports} == {"native"}


def test_explain_says_that_a_projection_is_left_to_torch():
    reports = explain(nn.LSTM(16, 32, 2, proj_size=5))
    assert [(str(r), r.call.I, r.is_fast) for r in reports] == [
        (f"layer {k}: torch, torch.nn.LSTM (no kernel here projects its output, proj_size=5)", *v)
        for k, v in enumerate([(16, False), (5, False)])
    ]


@pytest.mark.usefixtures("with_onednn")
def test_explain_says_that_torch_runs_what_is_not_accelerated():
    layer = nn.LSTM(16, 32)
    (report,) = explain(layer)
    assert (report.backend, report.is_fast) == ("torch", True)
    assert report.kernel.startswith("nn.LSTM, oneDNN fused LSTM fp32")
    assert report.why.startswith("accelerate makes it native, fused LSTM fp32")
    assert explain(accelerate(layer))[0].backend == "native"


@pytest.mark.usefixtures("without_onednn")
def test_explain_says_that_torchs_loop_is_slow():
    (report,) = explain(nn.LSTM(16, 32))
    assert (report.backend, report.is_fast) == ("torch", False)
    assert report.kernel == "nn.LSTM, ATen per-step loop"


def test_explain_of_a_layer_that_torch_never_runs():
    layer = LSTM(16, 32).double()
    layer.is_drop_in = False
    (report,) = explain(layer)
    assert (report.backend, report.is_fast) == ("aten", False)


def test_explain_of_modules_that_accelerate_leaves_alone():
    class Own(nn.LSTM):
        def forward(self, x, hx=None):
            return nn.LSTM.forward(self, -x, hx)

    model = nn.ModuleDict({"own": Own(16, 32, 2), "gru": nn.GRU(16, 32), "ours": LSTM(8, 4)})
    reports = explain(model)
    assert [(r.layer, r.module, r.backend, r.kernel) for r in reports[:3]] == [
        ("layer 0", "own", "torch", "forward pass of Own"),
        ("layer 1", "own", "torch", "forward pass of Own"),
        ("layer 2", "gru", "torch", "nn.GRU"),
    ]
    assert "does not call super().forward()" in reports[0].why
    assert reports[1].call.I == 32
    assert reports[2].call is None
    assert (reports[3].layer, reports[3].module, reports[3].backend) == (
        "layer 3",
        "ours",
        "native",
    )


def test_a_report_prints_as_an_aligned_table():
    reports = explain(nn.ModuleDict({"first": nn.GRU(4, 4), "second": LSTM(4, 4)}))
    assert isinstance(reports, list)
    header, first, second = str(reports).splitlines()
    assert header.split() == ["layer", "module", "backend", "kernel", "why", "not", "faster"]
    for name, cells in (("module", ("first", "second")), ("backend", ("torch", "native"))):
        assert [first.find(cells[0]), second.find(cells[1])] == [header.find(name)] * 2
    assert len(str(explain(nn.LSTM(4, 4))).splitlines()) == 2
    assert repr(reports) == str(reports)
    assert "module" not in str(explain(LSTM(4, 4))).split()
    assert str(explain(nn.Linear(1, 1))) == "no recurrent layer"


def test_explain_knows_training_from_inference():
    layer = nn.LSTM(4, 4)
    assert explain(layer)[0].call.requires_grad
    with torch.no_grad():
        assert not explain(layer)[0].call.requires_grad
    assert not explain(layer.eval())[0].call.requires_grad
