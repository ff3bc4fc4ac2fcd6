"""`fastlstm.LSTM` with lengths: every sequence as if it ran alone."""

import numpy as np
import pytest
import torch

import fastlstm
from fastlstm.errors import KernelError, ShapeError
from native_run import ALL_OPTIONS as ALL

T, I, H = 6, 5, 7  # noqa: E741
LENGTHS = [4, 6, 0, 1, 6, 0, 3]
B = len(LENGTHS)
LAYERS = {
    "one layer": {},
    "three layers": {"num_layers": 3},
    "two layers, both directions": {"num_layers": 2, "bidirectional": True},
    "no bias": {"bidirectional": True, "bias": False},
    "projected": {"num_layers": 2, "bidirectional": True, "proj_size": 3},
}
TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-12}
pytestmark = [
    pytest.mark.isa,
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]


def make(dtype=torch.float32, seed=0, **fields):
    torch.manual_seed(seed)
    layer = fastlstm.LSTM(I, H, **fields, dtype=dtype)
    num = layer.num_layers * (2 if layer.bidirectional else 1)
    h0 = torch.randn(num, B, layer.proj_size or H, dtype=dtype)
    return layer, torch.randn(T, B, I, dtype=dtype), h0, torch.randn(num, B, H, dtype=dtype)


def each_alone(layer, x, h0, c0, lengths, padding):
    """Outputs and last states of every sequence run by itself, padded again."""
    columns, hs, cs = [], [], []
    for b, length in enumerate(lengths):
        begin = T - length if padding == "left" else 0
        state = h0[:, b : b + 1], c0[:, b : b + 1]
        if length > 0:
            y, state = layer(x[begin : begin + length, b : b + 1], state)
        else:
            y = x.new_zeros((0, 1, 1))
        width = h0.shape[2] * (2 if layer.bidirectional else 1)
        before, after = (x.new_zeros((n, 1, width)) for n in (begin, T - begin - length))
        columns.append(torch.cat([before, y.expand(-1, -1, width), after]))
        hs.append(state[0])
        cs.append(state[1])
    return torch.cat(columns, 1), torch.cat(hs, 1), torch.cat(cs, 1)


def gradients(outputs, layer, leaves):
    rng = torch.Generator().manual_seed(3)
    terms = [(t * torch.randn(t.shape, generator=rng).to(t.dtype)).sum() for t in outputs]
    names = ["x", "h0", "c0", *(name for name, _ in layer.named_parameters())]
    grads = torch.autograd.grad(torch.stack(terms).sum(), [*leaves, *layer.parameters()])
    return dict(zip(names, grads, strict=True))


@pytest.mark.parametrize("lengths", [LENGTHS, [T] * B, [1] * B, [0] * B], ids=str)
@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_lengths(kind, dtype, padding, lengths):
    layer, *values = make(dtype, **LAYERS[kind])
    leaves = [t.requires_grad_() for t in values]
    x, h0, c0 = leaves
    y, (h, c) = layer(x, (h0, c0), lengths=torch.tensor(lengths), padding=padding)
    want = each_alone(layer, x, h0, c0, lengths, padding)
    tolerance = {"rtol": 0, "atol": TOLERANCES[dtype]}
    for name, a, b in zip(("y", "h_n", "c_n"), (y, h, c), want, strict=True):
        torch.testing.assert_close(a, b, **tolerance, msg=lambda text, name=name: f"{name}: {text}")
    if not any(lengths):
        return  # nothing reaches the weights, each alone has no gradient for them
    got, want = gradients((y, h, c), layer, leaves), gradients(want, layer, leaves)
    for name, b in want.items():
        size = max(1.0, float(b.abs().max()))
        torch.testing.assert_close(
            got[name] / size, b / size, **tolerance, msg=lambda text, name=name: f"d{name}: {text}"
        )


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("dtype", [*TOLERANCES, torch.bfloat16], ids=str)
@pytest.mark.parametrize("extras", [{}, {"layer_norm": True}, ALL], ids=["torch's", "norm", "all"])
def test_padding_is_never_seen(dtype, padding, extras):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    layer, x, h0, c0 = make(wide, num_layers=2, bidirectional=True, **extras)
    steps = torch.arange(T)[:, None]
    lengths = torch.tensor(LENGTHS)
    is_real = steps < lengths if padding == "right" else steps >= T - lengths
    results = []
    for filling in (0.0, float("nan"), float("inf")):
        given = x.where(is_real[:, :, None], torch.full_like(x, filling)).requires_grad_()
        h, c = h0.clone().requires_grad_(), c0.clone().requires_grad_()
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            y, (h_n, c_n) = layer(given, (h, c), lengths=lengths, padding=padding)
        grads = gradients((y, h_n, c_n), layer, [given, h, c])
        assert not grads["x"][~is_real].any()
        assert not y[~is_real].any()
        results.append([y, h_n, c_n, *grads.values()])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_sequence_of_no_step_keeps_its_state(dtype):
    layer, x, h0, c0 = make(dtype, num_layers=2, bidirectional=True)
    _, (h, c) = layer(x, (h0, c0), lengths=LENGTHS)
    empty = torch.tensor(LENGTHS) == 0
    assert torch.equal(h[:, empty], h0[:, empty])
    assert torch.equal(c[:, empty], c0[:, empty])
    assert not torch.equal(h[:, ~empty], h0[:, ~empty])
    _, (h, c) = layer(x, lengths=LENGTHS)
    assert not h[:, empty].any()
    assert not c[:, empty].any()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_other_layouts(dtype):
    layer, x, h0, c0 = make(dtype, bidirectional=True)
    want = layer(x, (h0, c0), lengths=LENGTHS, padding="left")
    layer.batch_first = True
    got = layer(x.transpose(0, 1), (h0, c0), lengths=np.array(LENGTHS), padding="left")
    assert torch.equal(got[0].transpose(0, 1), want[0])
    assert torch.equal(got[1][0], want[1][0])
    alone = layer(x[:, 0], (h0[:, 0], c0[:, 0]), lengths=LENGTHS[:1], padding="left")
    torch.testing.assert_close(alone[0], want[0][:, 0])
    torch.testing.assert_close(alone[1][1], want[1][1][:, 0])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_an_empty_batch(dtype):
    layer, x, *_ = make(dtype)
    assert layer(x[:, :0], lengths=[])[0].shape == (T, 0, H)


@pytest.mark.parametrize(
    ("lengths", "padding", "message"),
    [
        ([1] * (B - 1), "right", rf"lengths are torch.int64 \({B - 1},\), expected {B} whole"),
        ([1.0] * B, "right", "lengths are torch.float32"),
        ([True] * B, "right", "lengths are torch.bool"),
        ([T + 1] + [1] * (B - 1), "right", "lengths run from 1 to 7, expected 0 to T = 6"),
        ([-1] + [1] * (B - 1), "left", "lengths run from -1 to 1"),
        ("432", "right", f"lengths is a str, expected {B} whole numbers"),
        (4, "right", f"lengths is an int, expected {B} whole numbers"),
        ([1] * B, "both", "padding is 'both', expected 'right' or 'left'"),
    ],
)
def test_wrong_lengths_are_named(lengths, padding, message):
    layer, x, *_ = make()
    with pytest.raises(ShapeError, match=message):
        layer(x, lengths=lengths, padding=padding)


def test_lengths_that_are_refused():
    layer, x, *_ = make()
    packed = torch.nn.utils.rnn.pack_padded_sequence(x[:, :2], [T, 2])
    with pytest.raises(ShapeError, match="a PackedSequence knows its lengths"):
        layer(packed, lengths=[T, 2])
    with pytest.raises(RuntimeError, match="larger than 0"):
        layer(x[:0], lengths=[0] * B)
    with pytest.raises(RuntimeError, match="input_size"):
        layer(x[..., 1:], lengths=[1] * B)
    layer.backend = "aten"
    with pytest.raises(KernelError, match=r"backend 'aten' cannot run .* it takes no lengths"):
        layer(x, lengths=LENGTHS)


def test_autocast():
    layer, x, h0, c0 = make(num_layers=2, bidirectional=True)
    want = layer(x, (h0, c0), lengths=LENGTHS)
    with torch.autocast("cpu", torch.bfloat16):
        got = layer(x, (h0, c0), lengths=LENGTHS)
    assert got[0].dtype == got[1][0].dtype == torch.bfloat16
    torch.testing.assert_close(got[0].float(), want[0], rtol=0, atol=0.02)
    torch.testing.assert_close(got[1][1].float(), want[1][1], rtol=0, atol=0.05)


def test_dropout_reaches_no_padding():
    torch.manual_seed(0)
    layer = fastlstm.LSTM(I, H, 2, dropout=0.5)
    x = torch.randn(T, B, I)
    a, b = (layer(x, lengths=LENGTHS)[0] for _ in range(2))
    assert not torch.equal(a, b)
    is_padding = torch.arange(T)[:, None] >= torch.tensor(LENGTHS)
    assert not a[is_padding].any()
