"""torch's tools on models with `fastlstm.LSTM`: each works, or says to restore first."""

import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fastlstm
from fastlstm.errors import UsageError
from fastlstm.ops.call import TORCHS_CELL
from fastlstm.ops.custom_op import lstm_flop, lstm_sequence, present_tensors

T, B, I, H = 4, 3, 5, 7  # noqa: E741


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(I, H, 2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * H, 3)

    def forward(self, x):
        return self.out(self.rnn(x)[0])


@pytest.fixture
def tagger():
    torch.manual_seed(0)
    return fastlstm.accelerate(Tagger().eval())


@pytest.fixture
def x():
    return torch.randn(B, T, I)


OLD = ("ignore:torch.ao.quantization is deprecated", "ignore:torch.quantize_per_tensor")


@pytest.mark.filterwarnings(*OLD)
@pytest.mark.parametrize("spec", [None, {nn.LSTM, nn.Linear}], ids=["default", "named"])
def test_dynamic_quantization_warns_and_leaves_the_layer(tagger, x, spec):
    with pytest.warns(UserWarning, match=r"call fastlstm\.restore\(model\) first"):
        found = torch.ao.quantization.quantize_dynamic(tagger, spec)
    assert type(found.rnn) is fastlstm.LSTM
    assert "qconfig" not in found.rnn.__dict__
    restored = fastlstm.restore(tagger)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="torch.ao.quantization looks for")
        found = torch.ao.quantization.quantize_dynamic(restored, spec)
    assert type(found.rnn) is torch.ao.nn.quantized.dynamic.LSTM
    assert found(x).shape == (B, T, 3)


@pytest.mark.filterwarnings(*OLD)
def test_static_quantization_warns(tagger):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tagger.qconfig = torch.ao.quantization.default_qconfig
    with pytest.warns(UserWarning, match=r"call fastlstm\.restore\(model\) first"):
        torch.ao.quantization.prepare(tagger)
    with pytest.warns(UserWarning, match="looks for nn.LSTM only"):
        tagger.rnn.qconfig = tagger.qconfig
    assert tagger.rnn.qconfig is tagger.qconfig


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [True, False])
def test_onnx_export_holds_onnx_lstms(tagger, x, dynamo, tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    path = tmp_path / "tagger.onnx"
    torch.onnx.export(tagger, (x,), path, dynamo=dynamo, input_names=["x"], verbose=False)
    model = onnx.load(path)
    assert {node.domain for node in model.graph.node} <= {"", "pkg.onnxscript.torch_lib"}
    assert sum(node.op_type == "LSTM" for node in model.graph.node) == 2
    (found,) = ReferenceEvaluator(model).run(None, {"x": x.numpy()})
    assert found.shape == (B, T, 3)


@pytest.mark.filterwarnings("ignore")
def test_the_older_onnx_exporter_takes_a_layer_alone(x, tmp_path):
    """It passes the default of every argument by position."""
    onnx = pytest.importorskip("onnx")
    from onnx.reference import ReferenceEvaluator

    layer, given = fastlstm.LSTM(I, H).eval(), x.transpose(0, 1).contiguous()
    path = tmp_path / "layer.onnx"
    torch.onnx.export(layer, (given,), path, dynamo=False, input_names=["x"])
    found = ReferenceEvaluator(onnx.load(path)).run(None, {"x": given.numpy()})
    torch.testing.assert_close(torch.tensor(found[0]), layer(given)[0].detach())


@pytest.mark.filterwarnings("ignore")
def test_every_onnx_export_may_have_dynamic_shapes(x):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    for _ in range(2):  # torch's own fails the second time
        layer = fastlstm.LSTM(I, H, batch_first=True).eval()
        sizes = ({0: "B", 1: "T"},)
        program = torch.onnx.export(layer, (x,), dynamic_shapes=sizes, dynamo=True, verbose=False)
        longer = torch.cat([x, x], dim=1)
        found = ReferenceEvaluator(program.model_proto).run(None, {"input": longer.numpy()})
        torch.testing.assert_close(torch.tensor(found[0]), layer(longer)[0].detach())


@pytest.mark.usefixtures("only_ours")
def test_fx_keeps_the_layer_as_one_node(tagger, x):
    graph = torch.fx.symbolic_trace(tagger)
    nodes = [node for node in graph.graph.nodes if node.op == "call_module"]
    assert [node.target for node in nodes] == ["rnn", "out"]
    assert type(graph.rnn) is fastlstm.LSTM
    torch.testing.assert_close(graph(x), tagger(x))


class WithLengths(Tagger):
    def forward(self, x, lengths, h, c):
        y, (h, _) = self.rnn(x, (h, c), lengths=lengths, padding="left")
        return y, h


@pytest.mark.usefixtures("only_ours")
def test_fx_passes_every_argument(x):
    model = fastlstm.accelerate(WithLengths())
    state = torch.randn(2, 4, B, H)
    arguments = (x, torch.tensor([4, 0, 2]), *state)
    graph = torch.fx.symbolic_trace(model)
    torch.testing.assert_close(graph(*arguments), model(*arguments))


class Decoder(nn.Module):
    """Starts at a constant input; only a state, or lengths, are traced."""

    def __init__(self, given):
        super().__init__()
        self.rnn = nn.LSTM(I, H)
        self.given = given

    def forward(self, h, c, lengths):
        start = torch.ones(T, B, I)
        if self.given == "lengths":
            return self.rnn(start, lengths=lengths, padding="left")[0]
        hx = {"state": (h, c), "list": [h, c], "half": (h, torch.ones(1, B, H))}[self.given]
        return self.rnn(start, hx)[0]


@pytest.mark.usefixtures("only_ours")
@pytest.mark.parametrize("given", ["state", "list", "half", "lengths"])
@pytest.mark.parametrize("ready", [False, True])
def test_fx_keeps_a_layer_whose_input_is_constant(given, ready):
    model = fastlstm.accelerate(Decoder(given))
    arguments = (*torch.randn(2, 1, B, H), torch.tensor([4, 0, 2]))
    with torch.no_grad():
        for _ in range(3 if ready else 0):
            model.rnn(torch.ones(T, B, I))
        assert (model.rnn._prepared is not None) is ready
        graph = torch.fx.symbolic_trace(model)
        assert [n.target for n in graph.graph.nodes if n.op == "call_module"] == ["rnn"]
        torch.testing.assert_close(graph(*arguments), model(*arguments))


def test_fx_of_a_single_layer_is_refused_as_by_torch():
    for layer in (nn.LSTM(I, H), fastlstm.LSTM(I, H)):
        with pytest.raises(torch.fx.proxy.TraceError, match="control flow"):
            torch.fx.symbolic_trace(layer)


def test_torchscript_is_refused_with_the_way_out(tagger, x):
    for model in (tagger, tagger.rnn):
        with pytest.raises(UsageError, match=r"call fastlstm\.restore\(model\) first"):
            torch.jit.script(model)
    assert type(tagger.rnn) is fastlstm.LSTM
    want = tagger(x)
    torch.testing.assert_close(torch.jit.script(fastlstm.restore(tagger))(x), want)


@pytest.mark.filterwarnings(
    "ignore::torch.jit.TracerWarning", "ignore:The tensor attributes", "ignore:_check_is_size"
)
def test_stored_programs_that_need_fastlstm(tagger, x, tmp_path):
    """A trace does not, nor the exported program of a restored model; another names its lack."""
    torch.save([x, tagger(x).detach()], tmp_path / "pair.pt")
    torch.jit.trace(tagger, (x,)).save(tmp_path / "trace.pt")
    torch.export.save(torch.export.export(tagger, (x,)), tmp_path / "ours.pt2")
    restored = torch.export.export(fastlstm.restore(tagger), (x,))
    torch.export.save(restored, tmp_path / "restored.pt2")
    failed, said = in_another_process(tmp_path, "import sys; sys.modules['fastlstm'] = None")
    assert failed == ["ours"]
    assert "fastlstm.lstm_sequence" in said
    assert "not registered" in said
    assert in_another_process(tmp_path, "from fastlstm import LSTM")[0] == []


def in_another_process(folder, first):
    """Returns the models that a process cannot load or that compute otherwise, and what it says."""
    code = f"""
{first}
import torch
x, want = torch.load("pair.pt")
export = lambda name: torch.export.load(f"{{name}}.pt2").module()
for name in ("trace", "restored", "ours"):
    try:
        model = torch.jit.load("trace.pt") if name == "trace" else export(name)
        torch.testing.assert_close(model(x), want)
    except Exception:
        print(name)
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), done.stderr


FLOP = lstm_flop(T, B, I, H)


@pytest.mark.parametrize("passes", [1, 3], ids=["forward", "training"])
def test_flop_counter_counts_the_layer(passes):
    layer = fastlstm.LSTM(I, H)
    x = torch.randn(T, B, I, requires_grad=True)
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(passes == 3):
        y = layer(x)[0]
        if passes == 3:
            y.sum().backward()
    assert counter.get_total_flops() == passes * FLOP


@pytest.mark.parametrize("passes", [1, 3], ids=["forward", "training"])
def test_flop_of_tokens_counts_the_embedding_once(passes):
    V = 6
    weights = torch.randn(4 * H, I), torch.randn(4 * H, H)
    state = torch.zeros(B, H), torch.zeros(B, H)
    keep = passes == 3
    with FlopCounterMode(display=False) as counter:
        tokens = torch.zeros(T, B, dtype=torch.long)
        rows = torch.randn(V, I, requires_grad=keep)
        given = present_tensors((rows, tokens, *state, *weights))
        y, *_ = lstm_sequence(*given, TORCHS_CELL.text, False, keep)
        if keep:
            y.sum().backward()
    assert counter.get_total_flops() == passes * 8 * H * (V * I + T * B * H)


@pytest.mark.parametrize("ready", [False, True])
def test_the_profiler_shows_a_named_operator(ready):
    layer = fastlstm.LSTM(I, H).eval()
    x = torch.randn(1, 1, I)
    for _ in range(3 if ready else 0):
        with torch.no_grad():
            layer(x)
    with torch.profiler.profile(record_shapes=True) as profile, torch.no_grad():
        layer(x)
    assert (layer._prepared is not None) is ready
    (event,) = (event for event in profile.events() if event.name == "fastlstm::lstm")
    assert event.input_shapes[0][-1] == I
