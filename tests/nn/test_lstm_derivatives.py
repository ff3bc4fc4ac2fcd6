"""Second derivatives, batched gradients and torch.func of `fastlstm.LSTM`, beside `nn.LSTM`."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils.rnn import pack_padded_sequence

import fastlstm
from fastlstm.errors import KernelError
from native_run import lstm, lstm_tokens

T, B, I, H = 4, 3, 5, 6  # noqa: E741
OPTIONS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "stack": {"num_layers": 2, "bidirectional": True},
    "no bias": {"bias": False},
    "kept in parts": {"max_activation_bytes": 0},
}
LOOP = "ignore:.* Python loop over time"
SAYS_SO = pytest.warns(UserWarning, match="Python loop over time")


def pair(**fields):
    """A layer, and torch's in float64."""
    torch.manual_seed(0)
    ours = fastlstm.LSTM(I, H, **fields)
    fields.pop("max_activation_bytes", None)
    theirs = nn.LSTM(I, H, **fields)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs.double()


def penalty(layer, x, call):
    """A gradient penalty, and its gradients of input and weights."""
    x = x.detach().to(layer.weight_ih_l0.dtype).requires_grad_()
    layer.zero_grad()
    y, (h, c) = call(layer, x)
    scalar = y.square().sum() + h.sum() + (c * c).sum()
    (first,) = torch.autograd.grad(scalar, x, create_graph=True)
    loss = first.square().sum() + scalar
    loss.backward()
    return [first, loss, x.grad, *(p.grad for p in layer.parameters())]


def plain(layer, x):
    return layer(x)


def packed(layer, x):
    y, state = layer(pack_padded_sequence(x, [4, 2, 1]))
    return y.data, state


def assert_equal(ours, theirs, x, call=plain):
    with SAYS_SO:
        got = penalty(ours, x, call)
    for a, b in zip(got, penalty(theirs, x, call), strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-6


@pytest.mark.parametrize("option", OPTIONS)
def test_a_gradient_penalty_equals_torchs(option):
    assert_equal(*pair(**OPTIONS[option]), torch.randn(T, B, I))


def test_a_gradient_penalty_of_a_packed_sequence_equals_torchs():
    assert_equal(*pair(num_layers=2), torch.randn(T, B, I), packed)


def test_a_gradient_penalty_with_lengths_sees_no_padding():
    ours, theirs = pair()
    x = torch.randn(T, B, I)
    x[2:, 1], x[1:, 2] = torch.nan, torch.nan

    def call(layer, x):
        if layer is theirs:
            return packed(layer, x)
        return layer(x, lengths=[4, 2, 1])

    assert_equal(ours, theirs, x, call)


EXTRAS = {
    "layer_norm": {"layer_norm": True},
    "zoneout": {"zoneout": (0.3, 0.2)},
    "recurrent_dropout": {"recurrent_dropout": 0.4},
    "activations": {"activation": "softsign", "recurrent_activation": "hard_sigmoid"},
}


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_gradient_penalty_with_options_equals_the_reference(extra):
    torch.manual_seed(0)
    ours = fastlstm.LSTM(I, H, **EXTRAS[extra])
    with torch.no_grad():
        for name in ours.options.parameters:
            own = getattr(ours, f"{name}_l0")
            own.add_(torch.randn(own.shape) * 0.1)
    loop = copy.deepcopy(ours)
    loop.backend = "reference"

    def call(layer, x):
        torch.manual_seed(1)
        return layer(x)

    assert_equal(ours, loop, torch.randn(T, B, I), call)


@pytest.mark.usefixtures("fast_kernels")
def test_strict_refuses_the_loop():
    for change in ({"strict": True}, {"backend": "native"}):
        ours, _ = pair()
        vars(ours).update(change)
        y, _ = ours(torch.randn(T, B, I))
        with pytest.raises(KernelError, match=r"create_graph=True\) needs a Python loop .* strict"):
            torch.autograd.grad(y.sum(), list(ours.parameters()), create_graph=True)


def test_a_plain_gradient_warns_of_nothing():
    ours, _ = pair()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours(torch.randn(T, B, I))[0].sum().backward()


@pytest.mark.filterwarnings(LOOP)
def test_one_tensor_in_two_places_has_both_gradients():
    torch.manual_seed(0)
    x, w = torch.randn(T, B, H), torch.randn(4 * H, H)
    found = []
    for dtype, backend in ((torch.float32, None), (torch.float64, "reference")):
        state, weight = torch.ones(B, H, dtype=dtype), w.to(dtype)
        state.requires_grad_()
        weight.requires_grad_()
        y = lstm(x.to(dtype), state, state, weight, weight, backend=backend)[0]
        first = torch.autograd.grad(y.square().sum(), (state, weight), create_graph=True)
        again = torch.autograd.grad(sum(t.square().sum() for t in first), (state, weight))
        found.append([*first, *again])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings(LOOP)
def test_tokens_have_second_derivatives():
    torch.manual_seed(0)
    tokens = torch.randint(0, 3, (T, B))
    args = [torch.randn(s) for s in ((3, I), (B, H), (B, H), (4 * H, I), (4 * H, H))]
    found = []
    for dtype, backend in ((torch.float32, None), (torch.float64, "reference")):
        given = [t.to(dtype).requires_grad_() for t in args]
        y = lstm_tokens(tokens, *given, backend=backend)[0]
        first = torch.autograd.grad(y.square().sum(), given, create_graph=True)
        found.append(torch.autograd.grad(sum(t.square().sum() for t in first), given))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-3, atol=1e-3)


def test_autocast_has_second_derivatives():
    ours, theirs = pair()
    x = torch.randn(T, B, I)

    def call(layer, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=layer is ours):
            y, (h, c) = layer(x)
        return y.to(x.dtype), (h.to(x.dtype), c.to(x.dtype))

    with SAYS_SO:
        got = penalty(ours, x, call)
    for a, b in zip(got, penalty(theirs, x, call), strict=True):
        torch.testing.assert_close(a, b.float(), rtol=0.1, atol=0.1)


@pytest.mark.filterwarnings(LOOP, "ignore:Input #")
def test_gradgradcheck():
    ours, _ = pair()
    x = torch.randn(2, 1, I, requires_grad=True)
    assert torch.autograd.gradgradcheck(
        lambda t: ours(t)[0], x, eps=1e-2, atol=2e-3, rtol=1e-2, nondet_tol=1e-6
    )


@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_in_batches_equal_single_ones(option):
    ours, _ = pair(**OPTIONS[option])
    x = torch.randn(T, B, I, requires_grad=True)
    y = ours(x)[0]
    many = torch.randn(7, *y.shape)
    wanted = [x, *ours.parameters()]
    one_by_one = [torch.autograd.grad(y, wanted, g, retain_graph=True) for g in many]
    with SAYS_SO:
        got = torch.autograd.grad(y, wanted, many, is_grads_batched=True)
    for a, b in zip(got, zip(*one_by_one, strict=True), strict=True):
        torch.testing.assert_close(a, torch.stack(b), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings(LOOP)
def test_vmap_over_a_backward_pass_is_one_by_one():
    ours, _ = pair()
    x = torch.randn(T, B, I, requires_grad=True)
    y = ours(x)[0]

    def gradient(g):
        return torch.autograd.grad(y, x, g, retain_graph=True)[0]

    many = torch.randn(7, *y.shape)
    want = torch.stack([gradient(g) for g in many])
    torch.testing.assert_close(torch.func.vmap(gradient)(many), want, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings(LOOP)
@pytest.mark.parametrize("name", ["jacobian", "hessian"])
def test_vectorized_derivatives_equal_torchs(name):
    ours, theirs = pair()
    x = torch.randn(2, 1, I)
    derive = getattr(torch.autograd.functional, name)

    def call(layer):
        return lambda t: layer(t)[0].sum() if name == "hessian" else layer(t)[0]

    got = derive(call(ours), x, vectorize=True)
    torch.testing.assert_close(got, derive(call(theirs), x.double()).float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fields", [{}, {"num_layers": 2, "bidirectional": True}], ids=str)
def test_vmap_equals_a_loop_over_calls(fields):
    ours, theirs = pair(**fields)
    x = torch.randn(7, T, B, I)
    with SAYS_SO:
        got = torch.func.vmap(lambda t: ours(t)[0])(x)
    want = torch.stack([theirs(t)[0] for t in x.double()])
    torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-5)
    ours.strict = True
    with pytest.raises(KernelError, match=r"torch\.func transforms"):
        torch.func.vmap(lambda t: ours(t)[0])(x)


def test_vmap_of_a_projection_is_left_to_torch(monkeypatch):
    class RanTorch(Exception):
        pass

    def ran(*args):
        raise RanTorch

    monkeypatch.setattr(fastlstm.LSTM, "_torch", ran)
    layer = fastlstm.LSTM(I, H, proj_size=3)
    with pytest.raises(RanTorch):
        torch.func.vmap(lambda t: layer(t)[0])(torch.randn(7, T, B, I))


@pytest.mark.filterwarnings(LOOP)
def test_vmap_over_an_ensemble_and_per_sample_gradients():
    layers = [fastlstm.LSTM(I, H) for _ in range(3)]
    parameters, _ = torch.func.stack_module_state(layers)
    x = torch.randn(T, B, I)

    def loss(p, x):
        return torch.func.functional_call(layers[0], p, (x,))[0].square().sum()

    got = torch.func.vmap(loss, in_dims=(0, None))(parameters, x)
    want = torch.stack([layer(x)[0].square().sum() for layer in layers])
    torch.testing.assert_close(got, want)
    own = dict(layers[0].named_parameters())
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 1))(own, x)
    for name, p in own.items():
        whole = torch.autograd.grad(loss(own, x), p)[0]
        torch.testing.assert_close(each[name].sum(0), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings(LOOP)
@pytest.mark.parametrize("options", [{}, {"recurrent_dropout": 0.5}], ids=["plain", "of training"])
def test_forward_mode_equals_the_product_with_the_jacobian(options):
    plain, theirs = pair()
    ours = fastlstm.LSTM(I, H, **options).eval()
    ours.load_state_dict(plain.state_dict())
    x, v = torch.randn(T, B, I), torch.randn(T, B, I)
    got = torch.func.jvp(lambda t: ours(t)[0], (x,), (v,))[1]
    jacobian = torch.autograd.functional.jacobian(lambda t: theirs(t)[0], x.double())
    want = torch.einsum("abcijk,ijk->abc", jacobian, v.double()).float()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    hessian = torch.func.hessian(lambda t: ours(t)[0].sum())(x[:2, :1])
    expected = torch.autograd.functional.hessian(
        lambda t: theirs(t)[0].sum(), x[:2, :1].double()
    ).float()
    torch.testing.assert_close(hessian, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("fast_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", ["jvp", "dual"])
def test_the_op_has_a_tangent_in_forward_mode(level, dtype):
    torch.manual_seed(0)
    shapes = ((T, B, I), (B, H), (B, H), (4 * H, I), (4 * H, H), (4 * H,), (4 * H,))
    args = [(0.5 * torch.randn(s)).to(dtype) for s in shapes]
    tangents = [torch.randn(s).to(dtype) for s in shapes]

    def tangent(args, tangents, **options):
        if level == "jvp":
            return torch.func.jvp(lambda *t: lstm(*t, **options).y, args, tangents)[1]
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(t, v) for t, v in zip(args, tangents, strict=True)]
            return forward_ad.unpack_dual(lstm(*duals, **options).y).tangent

    wide = [[t.double() for t in given] for given in (args, tangents)]
    want = tangent(*map(tuple, wide), backend="reference")
    with SAYS_SO:
        got = tangent(tuple(args), tuple(tangents))
    assert got.dtype == dtype
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    assert (got.double() - want).norm() <= limit * want.norm()
    with pytest.raises(KernelError, match=r"forward mode \(jvp\) needs a Python loop"):
        tangent(tuple(args), tuple(tangents), strict=True)


@pytest.mark.filterwarnings(LOOP)
def test_a_weight_that_an_output_does_not_depend_on():
    layer = fastlstm.LSTM(I, H, layer_norm=True)
    c = layer(torch.randn(1, B, I))[1][1]  # of one step: the norm of the cell comes after it
    first = torch.autograd.grad(
        c.square().sum(),
        [layer.weight_ih_l0, layer.gamma_c_l0],
        create_graph=True,
        allow_unused=True,
    )
    assert first[0].norm() > 0
    assert first[1] is None or first[1].norm() == 0


@pytest.mark.filterwarnings(LOOP)
def test_autocast_rounds_no_tangent_between_steps():
    torch.manual_seed(0)
    shapes = ((T, B, I), (B, H), (B, H), (4 * H, I), (4 * H, H))
    args, tangents = (tuple(torch.randn(s) for s in shapes) for _ in range(2))
    _, want = torch.func.jvp(lstm, args, tangents)
    with torch.autocast("cpu", torch.bfloat16):
        _, got = torch.func.jvp(lstm, args, tangents)
    assert got.y.dtype == torch.bfloat16
    for a, b in ((got.hT, want.hT), (got.cT, want.cT)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings(LOOP)
def test_gradients_in_batches_hold_no_graph():
    ours, _ = pair()
    x = torch.randn(T, B, I, requires_grad=True)
    y = ours(x)[0]
    many = torch.randn(2, *y.shape)
    (got,) = torch.autograd.grad(y, x, many, is_grads_batched=True)
    assert not got.requires_grad


@pytest.mark.filterwarnings(LOOP)
def test_autocast_around_a_backward_pass_changes_no_derivative():
    ours, _ = pair()
    x = torch.randn(T, B, I)

    def first(*, enabled):
        leaf = x.clone().requires_grad_()
        y = ours(leaf)[0]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            return torch.autograd.grad(y.square().sum(), leaf, create_graph=True)[0]

    torch.testing.assert_close(first(enabled=True), first(enabled=False), rtol=1e-6, atol=1e-6)
