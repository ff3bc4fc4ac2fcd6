"""The table of docs/drop-in.md, run row by row: each way must end as the table says."""

import copy
import io
import pickle
import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import pack_sequence

import fastlstm
from fastlstm.errors import FastLSTMError, KernelError
from fastlstm.nn import lstm
from fastlstm.nn.dropout import WeightDrop
from fastlstm.ops import native_call

T, B, I, H = 4, 3, 5, 7  # noqa: E741
ROWS = {}
"""Feature -> what does it, given a constructor of the layer."""


def accelerated(*args, cls=nn.LSTM, change=lambda layer: layer, **kwargs):
    return fastlstm.accelerate(change(cls(*args, **kwargs)))


def ours(*args, cls=None, change=lambda layer: layer, **kwargs):
    return change((fastlstm.LSTM if cls is None else cls)(*args, **kwargs))


WAYS = (ours, accelerated)


def row(feature):
    def keep(function):
        ROWS[feature] = function
        return function

    return keep


def given(*, dtype=torch.float32):
    return torch.randn(T, B, I, dtype=dtype)


def train(layer, x):
    layer(x)[0].sum().backward()


@row("`batch_first`, unbatched input, `bias=False`")
def _(make):
    train(make(I, H, bias=False, batch_first=True), given())
    train(make(I, H), given()[0])


@row("`num_layers`, `dropout`, `bidirectional`")
def _(make):
    train(make(I, H, 2, dropout=0.5, bidirectional=True), given())


@row("`PackedSequence`")
def _(make):
    y, _ = make(I, H)(pack_sequence([torch.randn(T, I), torch.randn(2, I)]))
    y.data.sum().backward()


@row("`lengths=`")
def _(make):
    make(I, H)(given(), lengths=[4, 0, 2])[0].sum().backward()


@row("`weight_hook`")
def _(make):
    layer = make(I, H, 2)
    layer.weight_hook = WeightDrop(0.5)
    train(layer, given())


@row("`proj_size`")
def _(make):
    layer = make(I, H, proj_size=3)
    assert_said(layer)
    train(layer, given())
    return layer


@row("float32, bfloat16, autocast to bfloat16")
def _(make):
    for dtype in (torch.float32, torch.bfloat16):
        train(make(I, H, dtype=dtype), given(dtype=dtype))
    with torch.autocast("cpu", torch.bfloat16):
        train(make(I, H), given())


@row("float64")
def _(make):
    layer = make(I, H, dtype=torch.float64)
    assert_said(layer)
    train(layer, given(dtype=torch.float64))


@row("float16 weights on the CPU")
def _(make):
    layer = make(I, H, dtype=torch.float16)
    assert_said(layer)
    train(layer, given(dtype=torch.float16))


@row("a device that is not the CPU")
def _(make):
    layer = make(I, H, device="meta")
    assert_said(layer)
    layer(given().to("meta"))


def assert_said(layer):
    assert {report.backend for report in fastlstm.explain(layer)} == {"torch"}


@row("frozen parameters, hooks")
def _(make):
    layer, seen = make(I, H), []
    layer.weight_hh_l0.requires_grad_(False)
    layer.register_forward_hook(lambda *args: seen.append("forward"))
    layer.register_full_backward_hook(lambda *args: seen.append("backward"))
    train(layer, given().requires_grad_())
    assert layer.weight_hh_l0.grad is None
    assert seen == ["forward", "backward"]


@row("`state_dict`, `copy.deepcopy`, `pickle`")
def _(make):
    layer, x = make(I, H), given()
    want = layer(x)[0]
    other = nn.LSTM(I, H)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other(x)[0], want)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(copied(x)[0], want)


@row("`torch.load(weights_only=True)` of a whole layer")
def _(make):
    layer, x, file = make(I, H), given(), io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    with torch.serialization.safe_globals([fastlstm.LSTM]):
        assert torch.equal(torch.load(file, weights_only=True)(x)[0], layer(x)[0])


@row("`torch.nn.utils.prune`")
def _(make):
    layer = make(I, H)
    prune.l1_unstructured(layer, "weight_hh_l0", amount=0.9)
    train(layer, given())
    assert int((layer.weight_hh_l0_orig.grad != 0).sum()) < 4 * H * H / 2


def parametrized(layer):
    return parametrizations.weight_norm(layer, "weight_hh_l0")


@row("`torch.nn.utils.parametrizations`")
def _(make):
    layer = parametrized(make(I, H))
    train(layer, given())
    assert layer.parametrizations.weight_hh_l0.original0.grad is not None


@row("parametrized before `accelerate`")
def _(make):
    train(make(I, H, change=parametrized), given())


class Negated(nn.LSTM):
    def forward(self, input, hx=None):
        return super().forward(-input, hx)


class OurNegated(fastlstm.LSTM):
    def forward(self, input, hx=None):
        return super().forward(-input, hx)


@row("a subclass, without a forward pass or with one that calls `super().forward()`")
def _(make):
    train(make(I, H, cls=OurNegated if make is ours else Negated), given())


class Explicit(nn.LSTM):
    def forward(self, input, hx=None):
        return nn.LSTM.forward(self, -input, hx)


class OurExplicit(fastlstm.LSTM):
    def forward(self, input, hx=None):
        return fastlstm.LSTM.forward(self, -input, hx)


@row("a subclass with another forward pass, or a name of `fastlstm.LSTM`")
def _(make):
    train(make(I, H, cls=OurExplicit if make is ours else Explicit), given())


@row("`torch.func.functional_call`")
def _(make):
    layer = make(I, H)
    parameters = {name: torch.zeros_like(p) for name, p in layer.named_parameters()}
    assert not torch.func.functional_call(layer, parameters, (given(),))[0].any()


@row("`torch.func.grad`")
def _(make):
    layer = make(I, H)
    torch.func.grad(lambda x: layer(x)[0].sum())(given())


@row("`torch.func.vmap`, `torch.func.jvp`")
def _(make):
    layer, x = make(I, H), given()
    for one in (layer, nn.LSTM(I, H)):
        with pytest.raises(RuntimeError, match="Batching rule not implemented"):
            torch.func.vmap(lambda each, one=one: one(each)[0])(x[None])
        with pytest.raises(RuntimeError, match="forward AD with mkldnn_rnn_layer"):
            torch.func.jvp(lambda x, one=one: one(x)[0], (x,), (x,))
    return "refused"


@row("second derivatives")
def _(make):
    layer, x = make(I, H), given().requires_grad_()
    y, _ = layer(x)
    with pytest.warns(UserWarning, match="loop over time"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    return "slow loop"


@row("`torch.compile`, `dynamic=True` too")
def _(make):
    import torch._dynamo

    layer, x = make(I, H), given()
    for dynamic in (None, True):
        torch._dynamo.reset()
        with torch._dynamo.config.patch(allow_rnn=True):
            got = torch.compile(layer, fullgraph=True, backend="eager", dynamic=dynamic)(x)[0]
        torch.testing.assert_close(got, layer(x)[0])
    torch._dynamo.reset()


@row("`torch.export.export`, `save`, `load`")
def _(make):
    layer, x, file = make(I, H), given(), io.BytesIO()
    torch.export.save(torch.export.export(layer, (x,)), file)
    file.seek(0)
    torch.testing.assert_close(torch.export.load(file).module()(x)[0], layer(x)[0])


@row("`torch.onnx.export` of a program of `torch.export`")
def _(make):
    pytest.importorskip("onnxscript")
    program = torch.export.export(make(I, H).eval(), (given(),))
    with pytest.raises(torch.onnx.OnnxExporterError):
        torch.onnx.export(program, dynamo=True, verbose=False)
    return "refused"


@row("`torch.export.export` with a `PackedSequence`")
def _(make):
    packed = pack_sequence([torch.randn(T, I), torch.randn(2, I)])
    torch.export.export(make(I, H).eval(), (packed,))


@row("`torch.fx.symbolic_trace`")
def _(make):
    model, x = nn.Sequential(make(I, H)), given()
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x)[0], model(x)[0])


@row("`torch.onnx.export`")
def _(make):
    pytest.importorskip("onnxscript")
    torch.onnx.export(make(I, H).eval(), (given(),), dynamo=True, verbose=False)


@row("`torch.jit.trace`")
def _(make):
    torch.jit.trace(make(I, H), given(), check_trace=False)


@row("`torch.jit.script`")
def _(make):
    torch.jit.script(make(I, H))


@row("`torch.ao.quantization`")
def _(make):
    torch.ao.quantization.quantize_dynamic(nn.Sequential(make(I, H)))


@row("thop, ptflops, Opacus")
def _(make):
    rules = {nn.LSTM: "seen"}  # such tables they look the type of a module up in, without its bases
    layer = make(I, H)
    found = rules.get(type(layer), "not seen")
    assert rules[type(fastlstm.restore(layer))] == "seen"
    return found


@row("`torch.utils.flop_counter.FlopCounterMode`")
def _(make):
    layer = make(I, H)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        layer(given())
    assert counter.get_total_flops() == 8 * T * B * H * (I + H)


@row("`torch.profiler`")
def _(make):
    layer = make(I, H)
    with torch.profiler.profile() as profile:
        train(layer, given())
    assert {"fastlstm::lstm", "fastlstm::lstm_backward"} <= {e.name for e in profile.events()}


def table(repository):
    """Returns feature -> the two outcomes, as the page has them."""
    text = (repository / "docs" / "drop-in.md").read_text(encoding="utf-8")
    cells = [re.split(r"\s*\|\s*", line)[1:4] for line in text.splitlines() if line[:2] == "| "]
    return {feature: tuple(outcomes) for feature, *outcomes in cells[1:]}


def test_the_table_has_these_rows(repository):
    assert list(table(repository)) == list(ROWS)


@pytest.fixture
def ran(monkeypatch):
    """Collects who computes."""
    found = set()

    def watch(owner, name, who):
        real = getattr(owner, name)

        def watched(*args, **kwargs):
            found.add(who)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    watch(native_call, "forward", "kernels")
    watch(lstm.LSTM, "_torch", "torch's own")
    return found


def outcome(run, make, ran):
    """Returns the text that a row returns, else who computed or what was said."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            answer = run(make)
        except FastLSTMError:
            return "refused"
    if any(re.search("accelerate (left|replaced)|restore", str(w.message)) for w in said):
        return "warned"
    if isinstance(answer, str):
        return answer
    (who,) = ran
    return who


@pytest.mark.parametrize("way", [0, 1], ids=["class", "accelerate"])
@pytest.mark.parametrize("feature", ROWS)
def test_a_row_is_true(feature, way, ran, repository):
    assert outcome(ROWS[feature], WAYS[way], ran) == table(repository)[feature][way]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("feature", ROWS)
def test_strict_refuses_calls_that_torch_runs(feature, repository, monkeypatch):
    if table(repository)[feature][0] != "torch's own":
        return
    monkeypatch.setattr(lstm.LSTM, "strict", True)
    # The ONNX exporter wraps what it meets.
    with pytest.raises(torch.onnx.OnnxExporterError if "onnx" in feature else KernelError):
        ROWS[feature](ours)
