"""`fastlstm.LSTM` beside `torch.nn.LSTM` of the same state_dict: results, gradients, errors."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import pack_padded_sequence

import fastlstm
from fastlstm.errors import KernelError, ShapeError
from fastlstm.ops.explain import explain
from fastlstm.system import hardware
from native_run import ALL_OPTIONS as ALL

pytestmark = pytest.mark.isa

I, H = 5, 7  # noqa: E741
# Relative RMS and largest error; both sides are in float32, see TOLERANCES of the operator tests.
VALUE, GRADIENT = (4e-6, 2e-5), (1e-5, 4e-5)
SHAPES = {
    "one layer": {},
    "two layers": {"num_layers": 2},
    "three layers": {"num_layers": 3},
    "both directions": {"bidirectional": True},
    "two layers, both directions": {"num_layers": 2, "bidirectional": True},
    "no bias": {"num_layers": 2, "bidirectional": True, "bias": False},
}


def pair(seed=0, **fields):
    torch.manual_seed(seed)
    theirs = nn.LSTM(I, H, **fields)
    ours = fastlstm.LSTM(I, H, **fields)
    assert ours.load_state_dict(theirs.state_dict()) == ([], [])
    return theirs, ours


def state_of(layer, *batch):
    D = 2 if layer.bidirectional else 1
    h = torch.randn(layer.num_layers * D, *batch, layer.proj_size or H)
    return h, torch.randn(layer.num_layers * D, *batch, H)


def assert_close(name, got, want, limits):
    assert got.shape == want.shape, name
    assert got.dtype == want.dtype, name
    error, want = (got - want).detach().double(), want.detach().double()
    rms, size = (float(t.pow(2).mean().sqrt()) for t in (error, want))
    worst, largest = (float(t.abs().max()) for t in (error, want))
    good = rms <= limits[0] * size and worst <= limits[1] * largest  # False for NaN
    assert good, f"{name}: rms {rms:.2e} of {size:.2e}, max {worst:.2e} of {largest:.2e}"


def flat(found):
    y, (h, c) = found
    return (getattr(y, "data", y), h, c)


def run(layer, x, hx, **fields):
    """Outputs, and gradients of input, state and parameters of a sum that weighs every output."""
    leaves = {"x": x, "h0": hx[0], "c0": hx[1]} if hx is not None else {"x": x}
    leaves = {name: t.detach().clone().requires_grad_() for name, t in leaves.items()}
    state = type(hx)((leaves["h0"], leaves["c0"])) if hx is not None else None
    pack = fields.pop("pack", lambda t: t)
    found = flat(layer(pack(leaves["x"]), state, **fields))
    rng = torch.Generator().manual_seed(9)
    layer.zero_grad()
    terms = [(t.float() * torch.randn(t.shape, generator=rng)).sum() for t in found]
    torch.stack(terms).sum().backward()
    grads = {name: t.grad for name, t in leaves.items()}
    grads |= {name: p.grad.clone() for name, p in layer.named_parameters() if p.requires_grad}
    return dict(zip(("y", "h_n", "c_n"), found, strict=True)), grads


def assert_same(ours, theirs, x, hx=None, limits=(VALUE, GRADIENT), **fields):
    got, want = (run(layer, x, hx, **fields) for layer in (ours, theirs))
    for kind, limit in ((0, limits[0]), (1, limits[1])):
        assert got[kind].keys() == want[kind].keys()
        for name, value in want[kind].items():
            assert_close(name, got[kind][name], value, limit)


@pytest.mark.usefixtures("only_ours")
@pytest.mark.parametrize("with_state", [False, True], ids=["zero state", "state given"])
@pytest.mark.parametrize("layout", ["T first", "batch first", "unbatched", "T=1"])
@pytest.mark.parametrize("shape", SHAPES)
def test_results_and_gradients(shape, layout, with_state):
    theirs, ours = pair(batch_first=layout == "batch first", **SHAPES[shape])
    x = torch.randn({"unbatched": (6, I), "T=1": (1, 4, I)}.get(layout, (6, 4, I)))
    batch = {"unbatched": (), "batch first": (6,)}.get(layout, (4,))
    assert_same(ours, theirs, x, state_of(theirs, *batch) if with_state else None)


@pytest.mark.usefixtures("only_ours")
@pytest.mark.parametrize("with_state", [False, True], ids=["zero state", "state given"])
@pytest.mark.parametrize("lengths", [[6, 4, 4, 1], [2, 6, 1, 5]], ids=["sorted", "unsorted"])
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_sequences(shape, lengths, with_state):
    theirs, ours = pair(**SHAPES[shape])
    is_sorted = lengths == sorted(lengths, reverse=True)

    def pack(x):
        return pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=is_sorted)

    x = torch.randn(6, 4, I)
    assert_same(ours, theirs, x, state_of(theirs, 4) if with_state else None, pack=pack)
    got, want = ours(pack(x))[0], theirs(pack(x))[0]
    assert torch.equal(got.batch_sizes, want.batch_sizes)
    for name in ("sorted_indices", "unsorted_indices"):
        a, b = getattr(got, name), getattr(want, name)
        assert a is b is None if is_sorted else torch.equal(a, b)


def test_dropout_in_eval_changes_nothing():
    theirs, ours = pair(num_layers=3, dropout=0.5)
    assert_same(ours.eval(), theirs.eval(), torch.randn(6, 4, I))


def test_dropout_in_training_has_torchs_distribution():
    theirs, ours = pair(num_layers=2, dropout=0.4)
    x = torch.randn(3, 1, I).expand(-1, 20_000, -1).contiguous()
    with torch.no_grad():
        for p in (*ours.parameters(), *theirs.parameters()):
            p.mul_(3)
        (y, (h, _)), (want_y, (want_h, _)) = (layer(x) for layer in (ours, theirs))
        plain = ours.eval()(x)[1][0]
    # 20 000 draws: means are good to 1 %, deviations to 0.7 % of a deviation
    for got, want in ((y, want_y), (h[1], want_h[1])):
        deviation = want.std(-2)
        assert (deviation > 0.03).all()
        assert ((got.mean(-2) - want.mean(-2)).abs() < 0.06 * deviation).all()
        torch.testing.assert_close(got.std(-2), deviation, rtol=0.05, atol=0)
    assert torch.equal(h[0], plain[0])  # none inside the first layer
    assert not torch.equal(ours.train()(x)[0], y)


@pytest.mark.usefixtures("only_ours")
@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["T first", "batch first"])
@pytest.mark.parametrize("bidirectional", [False, True], ids=["one way", "both ways"])
def test_a_seed_draws_torchs_dropout(bidirectional, batch_first, is_packed):
    fields = {"num_layers": 3, "dropout": 0.4, "bidirectional": bidirectional}
    theirs, ours = pair(batch_first=batch_first, **fields)

    def pack(x):
        torch.manual_seed(7)
        if not is_packed:
            return x
        lengths = [5, 2, 6, 1, 6, 3]
        return pack_padded_sequence(x, lengths, batch_first=batch_first, enforce_sorted=False)

    assert_same(ours, theirs, torch.randn(6, 6, I), pack=pack)


@pytest.mark.parametrize("options", [{}, ALL], ids=["torch's cell", "options"])
@pytest.mark.parametrize(
    ("shape", "state"),
    [
        ((0, 3, I), None),  # torch refuses an empty sequence
        ((0, I), None),
        ((6, 3, I + 1), None),
        ((6, 3, I, 1), None),
        ((I,), None),
        ((6, 3, I), ((1, 2, H), (1, 3, H))),
        ((6, 3, I), ((1, 3, H), (1, 3, H + 1))),
        ((6, 3, I), ((1, 3, H + 1), (1, 3, H + 1))),
        ((6, 3, I), ((3, H), (3, H))),
        ((6, I), ((1, 3, H), (1, 3, H))),
        ((6, I), ((2, H), (2, H))),
    ],
    ids=str,
)
def test_errors_of_shape_equal_torchs(shape, state, options):
    layers = nn.LSTM(I, H), fastlstm.LSTM(I, H, **options)
    x, hx = torch.zeros(shape), None if state is None else tuple(map(torch.zeros, state))
    assert_same_error(x, hx, layers)
    if shape == (6, 3, I):
        assert_same_error(pack_padded_sequence(x, [6, 5, 2]), hx, layers)


H0 = torch.zeros(1, 3, H)


@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    "hx",
    [H0, torch.zeros(2, 1, 3, H), (H0,), [H0], (H0, H0, H0), (H0, None), (None, H0), (), 3, "ab"],
    ids=lambda hx: f"{type(hx).__name__} of {len(hx)}" if hasattr(hx, "__len__") else str(hx),
)
def test_errors_of_a_state_that_is_no_pair_equal_torchs(hx, is_packed):
    x = torch.zeros(6, 3, I)
    assert_same_error(pack_padded_sequence(x, [6, 5, 2]) if is_packed else x, hx)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64], ids=str)
def test_errors_of_dtype_and_device_equal_torchs(dtype):
    if not hardware.has_onednn():
        pytest.skip("torch's loop over the steps promotes dtypes instead of refusing them")
    x, hx = torch.zeros(6, 3, I), (torch.zeros(1, 3, H), torch.zeros(1, 3, H))
    assert_same_error(x.to(dtype), None)
    assert_same_error(x, (hx[0].to(dtype), hx[1].to(dtype)))
    assert_same_error(x, (hx[0], hx[1].to(dtype)))
    assert_same_error(x.to("meta"), None)
    assert_same_error(x, (hx[0].to("meta"), hx[1].to("meta")))
    assert_same_error(x, (hx[0], hx[1].to("meta")))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["weight_ih_l0", "weight_hh_l0", "weight_ih_l1", "weight_hh_l1"])
def test_errors_of_a_weight_of_another_dtype_equal_torchs(name, dtype):
    layers = pair(num_layers=2)
    for layer in layers:
        setattr(layer, name, nn.Parameter(getattr(layer, name).detach().to(dtype)))
    assert_same_error(torch.zeros(6, 3, I), None, layers)


@pytest.mark.usefixtures("only_ours")
def test_a_state_may_be_a_list():
    theirs, ours = pair()
    assert_same(ours, theirs, torch.randn(6, 4, I), list(state_of(theirs, 4)))


def assert_same_error(x, hx, layers=None):
    caught = []
    for layer in layers or pair():
        with pytest.raises(Exception) as error:  # noqa: PT011
            layer(x, hx)
        caught.append((error.type, str(error.value)))
    assert caught[0] == caught[1]


def test_weights_of_a_wrong_shape_never_reach_a_kernel():
    _, ours = pair(num_layers=2, bidirectional=True)
    ours.weight_hh_l1_reverse = nn.Parameter(torch.zeros(4, 1))
    with pytest.raises(
        ShapeError, match=r"weight_hh_l1_reverse has shape \(4, 1\), expected \(28,"
    ):
        ours(torch.zeros(6, 3, I))


@pytest.mark.parametrize("shape", SHAPES)
def test_an_empty_batch(shape):
    theirs, ours = pair(**SHAPES[shape])
    got, want = (flat(layer(torch.zeros(6, 0, I))) for layer in (ours, theirs))
    assert [t.shape for t in got] == [t.shape for t in want]


def test_state_dict_goes_both_ways():
    theirs, ours = pair(num_layers=2, bidirectional=True)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    with torch.no_grad():
        for p in ours.parameters():
            p.mul_(1.5)
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    theirs.load_state_dict(torch.load(file, weights_only=True))
    assert_same(ours, theirs, torch.randn(6, 4, I))
    assert repr(ours) == f"fastlstm.{theirs!r}"


@pytest.mark.parametrize("seed", [0, 1])
def test_the_constructor_equals_torchs(seed):
    arguments = (I, H, 2, False, True, 0.0, True, 0, "cpu", torch.float64)
    torch.manual_seed(seed)
    theirs = nn.LSTM(*arguments)
    torch.manual_seed(seed)
    ours = fastlstm.LSTM(*arguments)
    for (name, a), (other, b) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert name == other
        assert a.dtype == torch.float64
        assert torch.equal(a, b)


@pytest.mark.usefixtures("fast_kernels")
@pytest.mark.parametrize("options", [{}, ALL], ids=["torch's cell", "options"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_equal_and_apart(copied, options):
    ours = fastlstm.LSTM(I, H, 2, **options).eval()
    ours.strict = True
    x = torch.randn(6, 4, I)
    other = copied(ours)
    assert type(other) is fastlstm.LSTM
    assert other.strict
    assert repr(other) == repr(ours)
    assert torch.equal(other(x)[0], ours(x)[0])
    with torch.no_grad():
        other.weight_hh_l1.zero_()
    assert not torch.equal(other(x)[0], ours(x)[0])


def test_only_norms_may_have_gradients():
    layer = fastlstm.LSTM(I, H, **ALL)
    for name, p in layer.named_parameters():
        p.requires_grad_(name in ("gamma_c_l0", "beta_c_l0"))
    layer(torch.randn(6, 4, I))[0].square().sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in layer.parameters())
    assert layer.gamma_c_l0.grad.abs().sum() > 0


def test_frozen_parameters_get_no_gradient():
    theirs, ours = pair(num_layers=2)
    for layer in (theirs, ours):
        layer.weight_hh_l0.requires_grad_(False)
        layer.bias_ih_l1.requires_grad_(False)
    assert_same(ours, theirs, torch.randn(6, 4, I))
    assert ours.weight_hh_l0.grad is None
    assert ours.bias_ih_l1.grad is None


@pytest.mark.parametrize("is_bf16", [False, True])
def test_a_batch_first_input_may_be_written_to_before_the_backward_pass(is_bf16):
    """A residual connection in place, `x += layer(x)[0]`."""
    x, grads = torch.randn(4, 6, I), []
    layer = fastlstm.LSTM(I, H, batch_first=True)
    for _ in range(4):
        written = x.clone()
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
            y = layer(written)[0]
        if grads:
            written += 1
        y.float().square().sum().backward()
        grads.append([p.grad.clone() for p in layer.parameters()])
    assert all(all(map(torch.equal, grads[0], found)) for found in grads[1:])


@pytest.mark.parametrize("shape", [(6, 4, I), (1, 1, I)], ids=["long", "ready"])
def test_weights_written_to_the_flat_list_are_used_as_by_torch(shape):
    theirs, ours = pair()
    x = torch.randn(shape)
    with torch.no_grad():
        for _ in range(3):
            assert_close("y", ours(x)[0], theirs(x)[0], VALUE)
        for k in (0, 2, 0, None):
            for layer in (theirs, ours):
                if k is None:  # a new attribute counts again, and all others with it
                    layer.bias_ih_l0 = nn.Parameter(torch.ones(4 * H))
                else:
                    layer._flat_weights[k] = layer._flat_weights[k] * 2 + 0.1
            for _ in range(3):
                assert_close("y", ours(x)[0], theirs(x)[0], VALUE)
    for layer in (theirs, ours):
        layer._flat_weights[0] = torch.ones(4 * H, I, requires_grad=True)
        layer(x)[0].square().sum().backward()
    assert_close("gradient", ours._flat_weights[0].grad, theirs._flat_weights[0].grad, GRADIENT)


def test_functional_call_takes_its_own_weights():
    theirs, ours = pair(num_layers=2)
    x = torch.randn(6, 4, I)
    other = {name: (p * 2).detach().requires_grad_() for name, p in ours.named_parameters()}
    got = torch.func.functional_call(ours, other, (x,))[0]
    want = torch.func.functional_call(theirs, other, (x,))[0]
    assert_close("y", got, want, VALUE)
    grads = (torch.autograd.grad(y.sum(), list(other.values())) for y in (got, want))
    for name, a, b in zip(other, *grads, strict=True):
        assert_close(name, a, b, GRADIENT)
    assert_close("y afterwards", ours(x)[0], theirs(x)[0], VALUE)


def test_parametrized_weights():
    _, ours = pair()
    parametrize.register_parametrization(ours, "weight_hh_l0", nn.Tanh())
    x = torch.randn(6, 4, I)
    ours(x)[0].sum().backward()
    assert ours.parametrizations.weight_hh_l0.original.grad.abs().sum() > 0
    theirs = nn.LSTM(I, H)
    theirs.load_state_dict({n: getattr(ours, n).detach() for n in theirs.state_dict()})
    assert_close("y", ours(x)[0], theirs(x)[0], VALUE)
    ours._init_flat_weights()
    ours._flat_weights[1] = ours._flat_weights[1] * 2  # what is parametrized counts, as by torch
    assert_close("y", ours(x)[0], theirs(x)[0], VALUE)


def test_the_list_holds_a_deleted_weight():
    theirs, ours = pair()
    for layer in (theirs, ours):
        layer._flat_weights[1] = layer._parameters.pop("weight_hh_l0").detach() * 2
    x = torch.randn(6, 4, I)
    assert_close("y", ours(x)[0], theirs(x)[0], VALUE)


@pytest.mark.usefixtures("only_ours", "peer_in_bf16")
@pytest.mark.parametrize("with_state", [False, True], ids=["zero state", "state given"])
def test_autocast_gives_the_dtypes_of_torch(with_state):
    theirs, ours = pair(num_layers=2, bidirectional=True)
    x, hx = torch.randn(6, 4, I), state_of(theirs, 4) if with_state else None
    for given in (x, x.bfloat16()):
        with torch.autocast("cpu", torch.bfloat16):
            assert_same(ours, theirs, given, hx, limits=((0.03, 0.06), (0.04, 0.08)))
            assert ours(given, hx)[0].dtype == torch.bfloat16
    for lengths in ([6, 4, 4, 1], [6, 6, 6, 6]):
        packed = pack_padded_sequence(x, lengths)
        with torch.autocast("cpu", torch.bfloat16):
            for a, b in zip(flat(ours(packed, hx)), flat(theirs(packed, hx)), strict=True):
                assert_close("packed", a, b, (0.03, 0.06))


@pytest.mark.usefixtures("peer_in_bf16")
@pytest.mark.parametrize("num_layers", [1, 2])
def test_bfloat16_modules(num_layers):
    theirs, ours = (layer.bfloat16() for layer in pair(num_layers=num_layers))
    x = torch.randn(6, 4, I).bfloat16()
    assert_same(ours, theirs, x, limits=((0.03, 0.06), (0.04, 0.08)))


LEFT = {
    "proj_size": ({"proj_size": 3}, torch.float32, "no kernel here projects its output"),
    "float64": ({}, torch.float64, "compute in float32 and bf16, not in float64"),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("case", LEFT)
def test_calls_left_to_torch(case):
    fields, dtype, reason = LEFT[case]
    theirs, ours = (layer.to(dtype) for layer in pair(num_layers=2, bidirectional=True, **fields))
    x = torch.randn(6, 4, I, dtype=dtype)
    hx = tuple(t.to(dtype) for t in state_of(theirs, 4))
    assert_same(ours, theirs, x, hx, limits=((0, 0), (0, 0)))
    packed = pack_padded_sequence(x, [2, 6, 1, 5], enforce_sorted=False)
    assert torch.equal(ours(packed, hx)[0].data, theirs(packed, hx)[0].data)
    reports = explain(ours)
    assert [report.layer for report in reports] == [
        "layer 0",
        "layer 0 reverse",
        "layer 1",
        "layer 1 reverse",
    ]
    assert all(r.backend == "torch" and r.kernel == "torch.nn.LSTM" for r in reports)
    assert all(reason in r.why and not r.is_fast for r in reports)
    ours.strict = True
    for given in (x, packed):
        with pytest.raises(
            KernelError, match=rf"torch's own nn\.LSTM .*{reason}.*leave out strict"
        ):
            ours(given)
    ours.strict, ours.backend = False, "native"
    with pytest.raises(KernelError):
        ours(x)


def test_another_device_is_left_to_torch():
    ours = fastlstm.LSTM(I, H, device="meta")
    y, (h, _) = ours(torch.zeros(6, 4, I, device="meta"))
    assert (y.shape, h.shape) == ((6, 4, H), (1, 4, H))
    assert "run on the CPU, not on meta" in explain(ours)[0].why
    with pytest.raises(RuntimeError):
        ours(torch.zeros(6, 4, I))
    ours.strict = True
    with pytest.raises(KernelError, match="not on meta"):
        ours(torch.zeros(6, 4, I, device="meta"))


@pytest.mark.parametrize("backend", ["native", "aten", "reference"])
@pytest.mark.usefixtures("only_ours")
def test_a_backend_can_be_forced(backend):
    theirs, ours = pair(num_layers=2, bidirectional=True)
    ours.backend = backend
    assert_same(ours, theirs, torch.randn(6, 4, I))
    assert {report.backend for report in explain(ours)} == {backend}
    packed = pack_padded_sequence(torch.randn(6, 2, I), [6, 3])
    if backend == "aten":
        with pytest.raises(KernelError, match=r"backend 'aten' cannot run .* takes no lengths"):
            ours(packed)
    else:
        torch.testing.assert_close(ours(packed)[0].data, theirs(packed)[0].data)
    ours.strict = backend == "reference"
    if ours.strict:
        with pytest.raises(KernelError, match="slow path"):
            ours(torch.randn(6, 4, I))
