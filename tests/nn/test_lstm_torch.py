"""`fastlstm.LSTM` inside torch: compile, export and opcheck."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import fastlstm
from fastlstm.errors import KernelError
from fastlstm.ops.call import TORCHS_CELL, LSTMArgs
from fastlstm.ops.cell_options import CellOptions
from fastlstm.ops.custom_op import (
    all_tensors,
    lstm_sequence,
    lstm_sequence_backward,
    present_tensors,
)
from native_run import ALL_OPTIONS as ALL

I, H = 5, 7  # noqa: E741
STACK = {"num_layers": 2, "bidirectional": True}


class Twice(nn.Module):
    """Uses one layer twice, the second time on what the first gave."""

    def __init__(self):
        super().__init__()
        self.first = nn.LSTM(I, H, batch_first=True)
        self.shared = nn.LSTM(H, H, batch_first=True)
        self.alias = self.shared

    def forward(self, x):
        y, state = self.shared(self.first(x)[0])
        return self.alias(y, state)[0]


@pytest.mark.isa
def test_gradients_of_a_layer_used_twice_sum():
    torch.manual_seed(0)
    model = Twice()
    faster = fastlstm.accelerate(copy.deepcopy(model))
    assert faster.shared is faster.alias
    x = torch.randn(4, 6, I)
    for each in (model, faster):
        each(x).square().sum().backward()
    for (name, a), b in zip(faster.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=lambda text, name=name: f"{name}: {text}")


NON_LEAF = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
"""torch's tracer looks at the gradient of every input."""


@pytest.fixture
def dynamo():
    """torch's switch for tracing into any `nn.LSTM`, and no graph of another test."""
    import torch._dynamo

    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        yield
    torch._dynamo.reset()


def gradients(module, compiled, x, hx, **fields):
    torch.manual_seed(7)
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    y, (h, c) = compiled(leaf, hx, **fields)
    (y.square().sum() + h.sum() + (2 * c).sum()).backward()
    return [y, h, c, leaf.grad, *(p.grad.clone() for p in module.parameters())]


@pytest.mark.usefixtures("dynamo", "fast_kernels", "only_ours")
@pytest.mark.parametrize(
    ("backend", "has_lengths", "strict", "options", "dtype"),
    [
        ("eager", False, False, {}, torch.float32),
        ("eager", True, True, ALL, torch.float32),
        ("eager", True, False, ALL, torch.float64),
        ("aot_eager", False, True, ALL, torch.float32),
        ("aot_eager", True, False, {}, torch.float32),
        ("aot_eager", False, False, ALL, torch.float64),
    ],
    ids=str,
)
def test_compile_without_a_break(backend, has_lengths, strict, options, dtype):
    torch.manual_seed(0)
    module = fastlstm.LSTM(I, H, **STACK, **options, dtype=dtype)
    module.strict = strict
    x, *hx = (torch.randn(sizes, dtype=dtype) for sizes in ((4, 3, I), (4, 3, H), (4, 3, H)))
    fields = {"lengths": torch.tensor([4, 0, 2])} if has_lengths else {}
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    want = gradients(module, module, x, hx, **fields)
    for a, b in zip(gradients(module, compiled, x, hx, **fields), want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@NON_LEAF
def test_without_allow_rnn_a_compiled_model_calls_the_layer_untraced():
    """torch 2.15 and newer trace its methods wrongly, older torch the functions that it calls."""
    torch._dynamo.reset()
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph.graph)
        return graph

    layer = fastlstm.LSTM(I, H)
    x = torch.randn(4, 3, I)
    for model in (layer, torch.nn.Sequential(torch.nn.Linear(I, I), layer)):
        want = model(x)[0].sum()
        want.backward()
        got = torch.compile(model, backend=keep)(x)[0].sum()
        got.backward()
        assert torch.equal(got, want)
    called = [str(n.target) for graph in graphs for n in graph.nodes if n.op == "call_function"]
    assert [name for name in called if "linear" not in name] == []
    torch._dynamo.reset()


@pytest.mark.usefixtures("dynamo")
def test_compiled_graphs_have_one_node_per_layer_and_direction():
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    module = fastlstm.LSTM(I, H, **STACK)
    torch.compile(module, fullgraph=True, backend=keep)(torch.randn(4, 3, I))
    assert [num_nodes(graph.graph) for graph in graphs] == [4]


def num_nodes(graph):
    return sum("lstm_sequence" in str(node.target) for node in graph.nodes)


@pytest.mark.isa
@pytest.mark.usefixtures("dynamo")
def test_lengths_out_of_range_stay_inside_a_compiled_sequence():
    module = fastlstm.LSTM(I, H)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    x = torch.randn(4, 3, I)
    got = compiled(x, lengths=torch.tensor([1000, -3, 2]))[0]
    assert torch.equal(got, module(x, lengths=[4, 0, 2])[0])


@pytest.mark.isa
@pytest.mark.usefixtures("dynamo")
def test_lengths_and_dropout_compile_without_a_break():
    module = fastlstm.LSTM(I, H, num_layers=2, dropout=0.5)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    y = compiled(torch.randn(4, 3, I), lengths=torch.tensor([4, 0, 2]))[0]
    assert torch.isfinite(y).all()


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "fields", [{}, STACK, {"zoneout": 0.2, "layer_norm": True, "activation": "relu"}], ids=str
)
def test_compile_with_dynamic_shapes(fields, backend):
    torch.manual_seed(0)
    module = fastlstm.LSTM(I, H, **fields).eval()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    for T, B in ((4, 3), (6, 2), (1, 1), (150, 4)):
        x = torch.randn(T, B, I)
        want, got = gradients(module, module, x, None), gradients(module, compiled, x, None)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    module = fastlstm.LSTM(I, H, **STACK).eval()
    x = torch.randn(4, 3, I)
    program = torch.export.export(module, (x,), strict=strict)
    assert num_nodes(program.graph) == 4
    got, want = program.module()(x), module(x)
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])


@pytest.mark.isa
@pytest.mark.parametrize("options", [{}, ALL], ids=["torch's cell", "options"])
def test_functional_gradients_equal_torchs(options):
    layer = fastlstm.LSTM(I, H, **options).eval()
    x = torch.randn(4, 3, I)

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,))[0].square().sum()

    got = torch.func.grad(loss)(dict(layer.named_parameters()), x)
    loss({}, x).backward()
    for name, p in layer.named_parameters():
        torch.testing.assert_close(got[name], p.grad, rtol=1e-4, atol=1e-5)
    for field, value in (("strict", True), ("backend", "native")):
        before = getattr(layer, field)
        setattr(layer, field, value)
        with pytest.raises(KernelError, match=rf"torch\.func transforms.*leave out {field}"):
            torch.func.grad(loss)(dict(layer.named_parameters()), x)
        setattr(layer, field, before)


CALLS = {
    "fp32": {},
    "bf16": {"is_bf16": True},
    "no bias, lanes": {"bias": False, "lanes": True},
    "nothing kept": {"keep": False},
    "tokens": {"tokens": True},
    "options": {"options": CellOptions(**{**ALL, "recurrent_dropout": 0.0})},
}


def sequence_arguments(
    *, bias=True, lanes=False, tokens=False, options=TORCHS_CELL, is_bf16=False, keep=True,
    requires_grad=False,
):  # fmt: skip
    T, B, V = 4, 3, 6
    torch.manual_seed(0)

    def make(*sizes):
        return torch.randn(sizes, requires_grad=requires_grad)

    norm = options.layer_norm
    begins, ends = (torch.tensor([0, 1, 2]), torch.tensor([2, 1, 4])) if lanes else (None, None)
    args = LSTMArgs(
        make(V, I) if tokens else make(T, B, I),
        torch.randint(0, V, (T, B)) if tokens else None,
        make(B, H),
        make(B, H),
        make(4 * H, I),
        make(4 * H, H),
        *((make(4 * H), make(4 * H)) if bias else (None, None)),
        None,
        begins,
        ends,
        *((make(4 * H), make(4 * H), make(H), make(H)) if norm else (None,) * 4),
        torch.tensor([3]) if norm else None,
    )
    return (*present_tensors(args), options.text, is_bf16, keep)


@pytest.mark.parametrize("call", CALLS)
def test_opcheck(call):
    torch.library.opcheck(lstm_sequence, sequence_arguments(**CALLS[call]))


@NON_LEAF
@pytest.mark.parametrize("call", [name for name in CALLS if CALLS[name].get("keep", True)])
def test_opcheck_with_gradients(call):
    torch.library.opcheck(lstm_sequence, sequence_arguments(**CALLS[call], requires_grad=True))


def test_the_shape_rule_knows_the_layout_of_gradients():
    """`batch_first` gives transposed rows; a compiler trusts the strides it is told."""
    tensors, present, options, *rest = sequence_arguments()
    tensors[0] = tensors[0].transpose(0, 1).contiguous().transpose(0, 1)
    y, _, _, *saved = lstm_sequence(tensors, present, options, *rest)
    args = all_tensors(tensors, present, len(LSTMArgs._fields))
    given = present_tensors((*args, y, *saved, torch.ones_like(y), None, None))
    torch.library.opcheck(lstm_sequence_backward, (*given, options), test_utils="test_faketensor")


def test_a_call_without_saved_activations_has_no_gradient():
    y, *_ = lstm_sequence(*sequence_arguments(keep=False, requires_grad=True))
    with pytest.raises(KernelError, match="keep=False"):
        y.sum().backward()


WRONG_INPUTS = [
    (
        np.zeros((4, 3, I), np.float32),
        r"the input is a ndarray, .*; torch\.as_tensor makes a tensor",
    ),
    (None, r"the input is None, expected a tensor or a PackedSequence$"),
    ([1, 2], "the input is a list"),
    ("text", "the input is a str"),
]


@pytest.mark.parametrize(("value", "text"), WRONG_INPUTS)
@pytest.mark.parametrize("fields", [{}, {"proj_size": 2}], ids=["ours", "torch's"])
def test_an_input_that_is_no_tensor(fields, value, text):
    with pytest.raises(TypeError, match=text):
        fastlstm.LSTM(I, H, **fields)(value)
    with pytest.raises(TypeError, match=text):
        fastlstm.LSTM(I, H, **fields)(value, lengths=[1])
