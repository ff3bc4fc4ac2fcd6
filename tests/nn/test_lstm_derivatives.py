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
from fastlstm.system import hardware
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


def jvp(function, x, v):
    return torch.func.jvp(function, (x,), (v,))[1]


def dual(function, x, v):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, v))).tangent


def vmap(function, x, v):
    return torch.func.vmap(function)(torch.stack([x, v]))


def ensemble(function, x, v):
    return torch.func.vmap(lambda scale: function(x * scale))(torch.tensor([1.0, 2.0]))


def per_sample(function, x, v):
    return torch.func.vmap(torch.func.grad(lambda t: function(t).sum()))(torch.stack([x, v]))


BEYOND_TORCH = [jvp, dual, vmap, ensemble]
TRANSFORMS = [*BEYOND_TORCH, per_sample]


def has_rule(transform):
    """Whether torch's LSTM has a rule: without oneDNN its cells have one for forward mode."""
    return transform in (jvp, dual) and not hardware.has_onednn()


@pytest.mark.parametrize("transform", BEYOND_TORCH)
@pytest.mark.parametrize("has_grad", [True, False])
@pytest.mark.parametrize("fields", [{}, {"num_layers": 2, "bidirectional": True}], ids=str)
def test_what_torchs_lstm_has_no_rule_for_is_an_error(transform, has_grad, fields):
    """Never a wrong result, such as a tangent that is lost."""
    ours, theirs = (layer.requires_grad_(has_grad) for layer in pair(**fields))
    x, v = torch.randn(2, T, B, I)
    said = "forward AD with mkldnn_rnn_layer" if transform in (jvp, dual) else "Batching rule"
    calls = [lambda t, layer=layer: layer(t)[0] for layer in (ours, theirs.float())]
    if has_rule(transform):
        torch.testing.assert_close(*(transform(call, x, v) for call in calls))
    for call in () if has_rule(transform) else calls:
        with pytest.raises(RuntimeError, match=said):
            transform(call, x, v)
    ours.strict = True
    with pytest.raises(KernelError, match=r"on torch's own nn\.LSTM .* leave out strict"):
        transform(lambda t: ours(t)[0], x, v)


@pytest.mark.parametrize("transform", BEYOND_TORCH)
def test_an_ensemble_of_weights_is_an_error(transform):
    """Also where only the weights are batched, or have tangents."""
    ours, theirs = pair()
    w, v = torch.randn(2, 4 * H, H)
    x = torch.randn(T, B, I)

    def call(w, layer=ours):
        return torch.func.functional_call(layer, {"weight_hh_l0": w}, (x,))[0]

    if has_rule(transform):
        theirs.float()
        want = transform(lambda w: call(w, theirs), w, v)
        torch.testing.assert_close(transform(call, w, v), want)
        return
    with pytest.raises(RuntimeError, match=r"forward AD with|Batching rule"):
        transform(call, w, v)


@pytest.mark.skipif(not hardware.has_onednn(), reason="torch's own cells write in place")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_every_sample_run_on_torchs_own():
    layer = fastlstm.LSTM(I, H)
    own, x = dict(layer.named_parameters()), torch.randn(T, B, I)

    def loss(p, x):
        return torch.func.functional_call(layer, p, (x,))[0].square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 1))(own, x)
    for name, p in own.items():
        whole = torch.autograd.grad(loss(own, x), p)[0]
        torch.testing.assert_close(each[name].sum(0), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("fast_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_the_kernels_refuse_what_the_reference_derives(transform, dtype):
    torch.manual_seed(0)
    shapes = ((B, H), (B, H), (4 * H, I), (4 * H, H), (4 * H,), (4 * H,))
    args = [(0.5 * torch.randn(s)).to(dtype) for s in shapes]
    x, v = torch.randn(2, T, B, I).to(dtype)

    def call(x, **options):
        return lstm(x, *(t.to(x.dtype) for t in args), **options).y

    said = r"come to the native|must override the setup_context|Batching rule"
    for strict in (False, True):
        with pytest.raises((KernelError, RuntimeError), match=said):
            transform(lambda x, strict=strict: call(x, strict=strict), x, v)
    want = transform(lambda x: call(x, backend="reference"), x.double(), v.double())
    got = transform(lambda x: call(x, backend="reference"), x.float(), v.float())
    assert (got.double() - want).norm() <= 1e-5 * want.norm()


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_layer_with_options_is_left_to_the_reference(transform):
    ours = fastlstm.LSTM(I, H, layer_norm=True)
    x, v = torch.randn(2, T, B, I)
    got = transform(lambda t: ours(t)[0], x, v)
    theirs = copy.deepcopy(ours).double()
    if transform in (jvp, dual):
        jacobian = torch.autograd.functional.jacobian(lambda t: theirs(t)[0], x.double())
        want = torch.einsum("abcijk,ijk->abc", jacobian, v.double())
    else:
        given = [x, 2 * x] if transform is ensemble else [x, v]
        want = torch.stack([found_alone(theirs, t.double(), transform) for t in given])
    torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-5)


def found_alone(layer, x, transform):
    if transform is not per_sample:
        return layer(x)[0]
    return torch.autograd.grad(layer(x.requires_grad_())[0].sum(), x)[0]


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
