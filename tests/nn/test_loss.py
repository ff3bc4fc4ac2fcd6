"""The chunked loss against plain cross-entropy, and its memory."""

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from fastlstm.errors import KernelError, ShapeError
from fastlstm.nn.loss import CHUNK_ELEMENTS, projected_cross_entropy, projected_nats

pytestmark = pytest.mark.isa


def make_inputs(N, H, V, dtype=torch.float32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    features = torch.randn(N, H, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(V, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    return features, weight, bias, torch.randint(V, (N,), generator=rng)


def plain(features, weight, bias, targets):
    logits = functional.linear(features, weight, bias)
    return functional.cross_entropy(logits, targets, reduction="sum")


def value_and_grads(function, inputs, scale=1.0):
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs[:3]]
    loss = function(*leaves, inputs[3])
    (loss * scale).backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


def test_gradcheck():
    features, weight, bias, targets = make_inputs(5, 3, 4, torch.float64)
    for rows in (None, 2):
        assert torch.autograd.gradcheck(
            lambda f, w, b, r=rows: projected_cross_entropy(f, w, b, targets, chunk_rows=r),
            (features, weight, bias),
        )
        assert torch.autograd.gradcheck(
            lambda f, w, r=rows: projected_cross_entropy(f, w, None, targets, chunk_rows=r),
            (features, weight),
        )


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 12, 13, 100, None])
def test_equals_plain_cross_entropy_at_every_chunk_edge(rows):
    inputs = make_inputs(13, 8, 11)
    got = value_and_grads(lambda *a: projected_cross_entropy(*a, chunk_rows=rows), inputs, 0.3)
    for one, other in zip(got, value_and_grads(plain, inputs, 0.3), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


def test_one_row_and_one_token():
    for sizes in ((1, 4, 7), (6, 4, 1), (1, 1, 1)):
        inputs = make_inputs(*sizes)
        got = value_and_grads(projected_cross_entropy, inputs)
        for one, other in zip(got, value_and_grads(plain, inputs), strict=True):
            torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)
    certain = make_inputs(6, 4, 1)
    assert value_and_grads(projected_cross_entropy, certain)[0] == 0.0


def test_no_rows_is_zero():
    features, weight, bias, targets = make_inputs(0, 4, 7)
    loss = projected_cross_entropy(features, weight, bias, targets)
    loss.backward()
    assert loss == 0.0
    assert not weight.grad.any()


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
def test_only_the_gradients_asked_for(needed):
    inputs = make_inputs(7, 5, 6)
    for k in range(3):
        inputs[k].requires_grad_(k in needed)
    got = value_and_grads(projected_cross_entropy, inputs)
    for one, other in zip(got, value_and_grads(plain, inputs), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("rows", [None, 16])
def test_bf16_autocast(rows):
    """GEMMs in bf16, softmax and the weight's sum in float32, gradients in their own dtype."""
    inputs = make_inputs(64, 32, 50)
    exact = value_and_grads(
        plain, tuple(t.double() if t.is_floating_point() else t for t in inputs)
    )
    with torch.autocast("cpu", torch.bfloat16):
        got = value_and_grads(lambda *a: projected_cross_entropy(*a, chunk_rows=rows), inputs)
    for one, other in zip(got, exact, strict=True):
        assert one.dtype == torch.float32
        assert float((one - other).norm() / other.norm()) < 1e-2


@pytest.mark.usefixtures("no_bf16_products")
@pytest.mark.parametrize("rows", [None, 16])
def test_bf16_calls_no_missing_product_of_torch(rows):
    inputs = make_inputs(64, 9, 50)  # no whole rows of the kernels

    def under_autocast(*given):
        with torch.autocast("cpu", torch.bfloat16):
            return projected_cross_entropy(*given, chunk_rows=rows)

    got, want = value_and_grads(under_autocast, inputs), value_and_grads(plain, inputs)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


def test_bf16_features_and_float32_weights():
    features, weight, bias, targets = make_inputs(64, 32, 50)
    features = features.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        projected_cross_entropy(features, weight, bias, targets).backward()
    assert (features.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)


def test_weight_gradient_sums_over_chunks_in_float32():
    """Many chunks lose nothing: in bf16 the sum would stop growing after some hundred."""
    features, weight, bias, targets = make_inputs(4096, 8, 16)
    results = []
    for rows in (4096, 4):
        inputs = (features, weight, bias, targets)
        with torch.autocast("cpu", torch.bfloat16):
            results.append(
                value_and_grads(
                    lambda *a, r=rows: projected_cross_entropy(*a, chunk_rows=r), inputs
                )
            )
    error = (results[0][2] - results[1][2]).norm() / results[0][2].norm()
    assert float(error) < 5e-3


def test_without_gradient_and_per_row():
    inputs = make_inputs(13, 8, 11)
    want = functional.cross_entropy(
        functional.linear(*inputs[:3]), inputs[3], reduction="none"
    ).detach()
    torch.testing.assert_close(projected_nats(*inputs), want, rtol=2e-6, atol=2e-6)
    with torch.no_grad():
        loss = projected_cross_entropy(*inputs)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, want.sum(), rtol=2e-6, atol=2e-6)


class LargestTensor(TorchDispatchMode):
    """Records the most bytes of any tensor an operator returned."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for leaf in tree_flatten(out)[0]:
            if isinstance(leaf, torch.Tensor):
                self.bytes = max(self.bytes, leaf.numel() * leaf.element_size())
        return out


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("train", [False, True])
def test_all_logits_never_exist(train, autocast):
    """N V float32 logits would be 16 MB here; one chunk is a quarter of the elements."""
    N, H, V = 512, 16, 8192
    inputs = make_inputs(N, H, V)
    rows = N // 4

    def run(loss_of):
        with LargestTensor() as largest, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            with torch.set_grad_enabled(train):
                loss = loss_of()
            if train:
                loss.backward()
        return largest.bytes

    chunked = run(lambda: projected_cross_entropy(*inputs, chunk_rows=rows))
    assert chunked <= rows * V * 4
    assert run(lambda: plain(*inputs)) >= N * V * 4, "the recorder must see the plain path"


def test_default_chunks_are_bounded():
    N, V = 2 * CHUNK_ELEMENTS // 16384 + 8, 16384
    inputs = make_inputs(N, 4, V)
    with LargestTensor() as largest:
        projected_cross_entropy(*inputs).backward()
    assert largest.bytes <= CHUNK_ELEMENTS * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: torch.zeros(13, 9)}, r"features \(13, 9\) and weight \(11, 8\) do not fit"),
        (
            {3: torch.zeros(12, dtype=torch.int64)},
            r"targets are torch.int64 \(12,\), expected int64 \(13,\)",
        ),
        ({3: torch.zeros(13)}, r"targets are torch.float32 \(13,\), expected int64"),
        ({2: torch.zeros(10)}, r"bias has shape \(10,\), expected \(11,\)"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    inputs = list(make_inputs(13, 8, 11))
    for position, value in changes.items():
        inputs[position] = value
    with pytest.raises(ShapeError, match=message):
        projected_cross_entropy(*inputs)


def test_chunk_rows_must_be_positive():
    with pytest.raises(ShapeError, match="chunk_rows is 0, expected at least 1"):
        projected_cross_entropy(*make_inputs(3, 2, 2), chunk_rows=0)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch's tracer does that
def test_the_loss_is_traced_whole():
    torch.manual_seed(0)
    features, weight = torch.randn(8, 32, requires_grad=True), torch.randn(5, 32)
    targets = torch.randint(0, 5, (8,))
    traced = torch.compile(projected_cross_entropy, backend="eager", fullgraph=True)
    loss = traced(features, weight, None, targets)
    torch.testing.assert_close(loss, projected_cross_entropy(features, weight, None, targets))


@pytest.mark.parametrize("rows", [2, 100, None])
@pytest.mark.parametrize("is_squared", [False, True])
def test_a_gradient_to_differentiate_is_refused(rows, is_squared):
    """Also where the gradient of the loss is 1: a penalty would be a constant without a word."""
    f, w, b, targets = make_inputs(5, 8, 4)
    f = f.detach().clone().requires_grad_()
    loss = projected_cross_entropy(f, w, b, targets, chunk_rows=rows)
    loss = loss.square() if is_squared else loss
    with pytest.raises(KernelError, match=r"create_graph=True asks .* leave it out, or"):
        torch.autograd.grad(loss, f, create_graph=True)
