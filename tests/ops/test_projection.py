"""The native projection and cross-entropy: every instruction set, against float64."""

import random
from functools import cache

import pytest
import torch
from torch.nn import functional

from decoding import ISAS
from fastlstm.errors import ShapeError
from fastlstm.nn import loss
from fastlstm.ops import projection
from fastlstm.ops.projection import Projection
from fastlstm.system import hardware

DTYPES = (torch.float32, torch.bfloat16)
ALL = (True, True, True)
NAMES = ("nats", "df", "dw", "db")
TOLERANCE = 2e-6  # relative RMS in float32: that of tests/ops/conftest.py
ROUNDING = 4e-3  # of bf16: 2^-8, which torch's own error may fall below by luck in a few values
SHAPES = (  # N, H, V
    (1, 1, 1), (1, 16, 2), (5, 15, 15), (5, 32, 5000), (47, 17, 16), (48, 32, 17), (49, 100, 31),
    (49, 64, 1000), (511, 130, 33), (512, 16, 100), (513, 32, 257), (1500, 1, 2), (1500, 32, 31),
    (1500, 17, 100),
)  # fmt: skip
LARGE = (300, 32, 16400)
"""Chunks of fewer rows, and the weight's rows as an inner dimension in several parts."""


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture
def use_threads(monkeypatch):
    """Sets the number of threads, however small the work."""

    def use(num):
        monkeypatch.setattr(projection, "_MIN_FLOP", 0)
        monkeypatch.setattr(torch, "get_num_threads", lambda: num)

    return use


def make_inputs(N, H, V, has_bias=True, seed=0):
    """Returns features, weight, bias or None, and targets."""
    rng = torch.Generator().manual_seed(seed)
    features = torch.randn(N, H, generator=rng)
    weight = torch.randn(V, H, generator=rng) * 1.5 * H**-0.5
    bias = torch.randn(V, generator=rng) if has_bias else None
    return features, weight, bias, torch.randint(V, (N,), generator=rng)


def reference(features, weight, bias, targets, scale=1.0):
    """Returns nats, df, dw, db in float64 by plain torch."""
    leaves = [None if t is None else t.double().requires_grad_() for t in (features, weight, bias)]
    nats = functional.cross_entropy(functional.linear(*leaves), targets, reduction="none")
    (nats.sum() * scale).backward()
    return [nats.detach(), *(None if t is None else t.grad for t in leaves)]


@cache
def small_reference(shape, has_bias):
    return reference(*make_inputs(*shape, has_bias))


@cache
def torch_errors(shape, has_bias):
    """Relative RMS errors of torch's path under bf16 autocast."""
    inputs = make_inputs(*shape, has_bias)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "is_native", lambda *_: False)
        got = through_autograd(inputs, torch.bfloat16)
    return relative_errors(got, small_reference(shape, has_bias))


def through_autograd(inputs, dtype, scale=1.0):
    """Returns nats, df, dw, db as a user gets them."""
    *given, targets = inputs
    leaves = [None if t is None else t.clone().requires_grad_() for t in given]
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        nats = loss.projected_nats(*leaves, targets)
        total = loss.projected_cross_entropy(*leaves, targets)
    (total * scale).backward()
    return [nats, *(None if t is None else t.grad for t in leaves)]


def kept(inputs, dtype, scale=1.0, needs=ALL):
    """Returns nats, df, dw, db by two calls, the gradient of the logits kept between them."""
    *given, targets = inputs
    p = Projection.of(*given, dtype)
    d = projection.logits_gradient(p)
    forget()
    nats = projection.nats_of(p, targets, d)
    forget()
    return [nats, *projection.gradients_of(p, d, scale, wanted(inputs, needs))]


def at_once(inputs, dtype, needs=ALL):
    """As `kept`, by one call."""
    *given, targets = inputs
    forget()
    p = Projection.of(*given, dtype)
    nats, found = projection.nats_and_gradients(p, targets, wanted(inputs, needs))
    return [nats, *found]


def wanted(inputs, needs):
    return (needs[0], needs[1], needs[2] and inputs[2] is not None)


def forget():
    """Makes what earlier calls left in the scratch NaN."""
    hardware.native().fill_scratch(0xFF)


def rms(t):
    return float(t.double().pow(2).mean().sqrt())


def relative_errors(got, want):
    """Relative RMS errors by name; both zero is no error."""
    found = {}
    for name, one, exact in zip(NAMES, got, want, strict=True):
        assert (one is None) == (exact is None)
        if one is not None:
            assert one.shape == exact.shape
            error, size = rms(one.double() - exact), rms(exact)
            found[name] = error / size if size > 0 else error
    return found


def check(got, want, limits):
    for name, error in relative_errors(got, want).items():
        assert error <= limits[name], f"{name}: {error:.2e} > {limits[name]:.2e}"  # not for NaN


def whole_rows(N, H, V):
    """The kernels take bf16 rows of a multiple of 32."""
    return N, -(-H // 32) * 32, V


def limits_of(shape, has_bias, dtype):
    if dtype == torch.float32:
        return dict.fromkeys(NAMES, TOLERANCE)
    errors = torch_errors(shape, has_bias)
    return {name: max(2 * error, ROUNDING) for name, error in errors.items()}


def equal(one, other):
    pairs = zip(one, other, strict=True)
    return all(b is None if a is None else torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_instruction_set(isa, dtype, shape):
    """With a bias and without, in turns: any two of shape, type and instruction set have both."""
    has_bias = (SHAPES.index(shape) + ISAS.index(isa) + DTYPES.index(dtype)) % 2 == 0
    if dtype == torch.bfloat16:
        shape = whole_rows(*shape)
    limits = limits_of(shape, has_bias, dtype)
    inputs, want = make_inputs(*shape, has_bias), small_reference(shape, has_bias)
    for got in (kept(inputs, dtype), at_once(inputs, dtype)):
        check(got, want, limits)


def test_many_columns(isa, dtype, use_threads):
    """In float32 a sum of so many terms in order is a little less exact."""
    use_threads(2)
    limits = {name: 1.5 * limit for name, limit in limits_of(LARGE, True, dtype).items()}
    check(at_once(make_inputs(*LARGE), dtype), small_reference(LARGE, True), limits)


@pytest.mark.parametrize("chunk_elements", [1 << 22, 0], ids=["kept", "at once"])
def test_through_autograd(isa, dtype, chunk_elements, monkeypatch):
    """The scale of the loss reaches every gradient; both ways are taken."""
    ways = []
    for name in ("gradients_of", "nats_and_gradients"):
        function = getattr(loss, name)
        monkeypatch.setattr(loss, name, lambda *a, f=function, n=name: (ways.append(n), f(*a))[1])
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", chunk_elements)
    shape = (130, 32, 257)
    inputs = make_inputs(*shape)
    limits = limits_of(shape, True, dtype)
    check(through_autograd(inputs, dtype, 0.37), reference(*inputs, 0.37), limits)
    assert ways == ["nats_and_gradients" if chunk_elements == 0 else "gradients_of"]


@pytest.mark.parametrize("shape", [(77, 64, 100), (600, 32, 257)], ids=str)
def test_both_ways_agree(isa, dtype, shape):
    """In float32 even in every bit: it is the same arithmetic."""
    inputs = make_inputs(*shape)
    assert equal(kept(inputs, dtype), at_once(inputs, dtype))


@pytest.mark.parametrize("shape", [(70, 160, 33), (600, 32, 270)], ids=str)
def test_threads_and_repeats_give_equal_bits(isa, dtype, shape, use_threads):
    inputs = make_inputs(*shape)
    use_threads(1)
    first = kept(inputs, dtype), at_once(inputs, dtype)
    for num in (2, 2, 3):
        use_threads(num)
        for way, one in zip((kept, at_once), first, strict=True):
            assert equal(way(inputs, dtype), one), f"{way.__name__} on {num} threads"


def test_a_shorter_last_chunk_waits_for_the_others(isa, dtype, use_threads):
    """Threads that are done with a chunk leave alone the rows that others are still at."""
    inputs = make_inputs(513, 64, 300)
    p = Projection.of(*inputs[:3], dtype)
    use_threads(1)
    want = kept(inputs, dtype)[:2]
    use_threads(4)
    for _ in range(4):
        assert torch.equal(projection.nats_of(p, inputs[3]), want[0])
        assert equal(kept(inputs, dtype, needs=(1, 0, 0))[:2], want)
        assert equal(at_once(inputs, dtype, needs=(1, 0, 0))[:2], want)


@pytest.mark.parametrize("row", [0, 50, 89])
def test_a_nan_stays_in_its_row(isa, dtype, row, use_threads):
    use_threads(2)
    inputs = make_inputs(90, 64, 77)
    clean = at_once(inputs, dtype)
    inputs[0][row, 5] = float("nan")
    others = torch.arange(90) != row
    for way in (kept, at_once):
        nats, df, dw, db = way(inputs, dtype)
        assert nats[row].isnan()
        assert df[row].isnan().all()
        assert dw.isnan().all()
        assert db.isnan().all()
        assert torch.equal(nats[others], clean[0][others])
        assert torch.equal(df[others], clean[1][others])


def test_after_a_nan_nothing_is_left(isa, dtype):
    inputs = make_inputs(45, 32, 19)
    clean = at_once(inputs, dtype)
    broken = inputs[0].clone()
    broken[:] = float("nan")
    at_once((broken, *inputs[1:]), dtype)
    p = Projection.of(*inputs[:3], dtype)
    nats, found = projection.nats_and_gradients(p, inputs[3], ALL)
    assert equal([nats, *found], clean)


@pytest.mark.parametrize("bias", [float("inf"), -float("inf"), 1e4, -1e4], ids=str)
def test_infinite_and_huge_logits_as_torch(isa, dtype, bias):
    """In the columns of the targets and in another one, by turns of instruction set and type."""
    is_target = (ISAS.index(isa) + DTYPES.index(dtype)) % 2 == 0
    features, weight, biases, targets = make_inputs(20, 32, 37)
    biases[4] = bias
    targets[:] = 4 if is_target else 9
    nats, df, dw, db = kept((features, weight, biases, targets), dtype)
    want = reference(features, weight, biases, targets)
    tolerance = (
        {"rtol": 2e-6, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.1}
    )
    for got, exact in zip((nats, df, dw, db), want, strict=True):
        torch.testing.assert_close(got.double(), exact, equal_nan=True, **tolerance)


def test_logits_far_apart(isa, dtype):
    """Products of 1e4 and more: the largest logit takes it all, nothing overflows."""
    features, weight, bias, targets = make_inputs(30, 32, 50)
    features *= 1e4
    got = kept((features, weight, bias, targets), dtype)
    rounded = (features.to(dtype).float(), weight.to(dtype).float(), bias, targets)
    want = reference(*rounded)
    assert all(torch.isfinite(t).all() for t in got)
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-5, atol=0.02)


@pytest.mark.parametrize("V", [1, 17, 100])
def test_very_negative_logits(isa, dtype, V):
    """Where columns are padded, nothing there counts."""
    features, weight, _, targets = make_inputs(20, 32, V)
    inputs = (features, weight, torch.full((V,), -512.0), targets)
    with_none = kept((features, weight, torch.zeros(V), targets), dtype)
    tolerance = (
        {"rtol": 2e-4, "atol": 2e-4} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    )
    for got, want in zip(kept(inputs, dtype), with_none, strict=True):
        torch.testing.assert_close(got, want, **tolerance)


def test_a_row_of_infinite_logits_is_nan_as_in_torch(isa, dtype):
    features, weight, bias, targets = make_inputs(3, 32, 7)
    bias[:] = -float("inf")
    assert kept((features, weight, bias, targets), dtype)[0].isnan().all()


@pytest.mark.parametrize("chunk_elements", [1 << 22, 0], ids=["kept", "at once"])
def test_a_second_pass_over_the_same_graph(isa, dtype, chunk_elements, monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", chunk_elements)
    *given, targets = make_inputs(130, 32, 50)
    leaves = [t.requires_grad_() for t in given]
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        total = loss.projected_cross_entropy(*leaves, targets)
    total.backward(retain_graph=True)
    first = [leaf.grad.clone() for leaf in leaves]
    total.backward()
    for leaf, one in zip(leaves, first, strict=True):
        torch.testing.assert_close(leaf.grad, 2 * one, rtol=0, atol=0)


def test_only_some_gradients(isa, dtype):
    """What is not asked for does not change the rest."""
    inputs = make_inputs(70, 32, 45)
    for way in (kept, at_once):
        whole = way(inputs, dtype)
        for needs in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1)):
            got = way(inputs, dtype, needs=needs)
            assert [t is not None for t in got[1:]] == [bool(need) for need in needs]
            want = [t if need else None for t, need in zip(whole[1:], needs, strict=True)]
            assert equal(got, [whole[0], *want]), needs


def test_without_gradients(isa, dtype):
    inputs = make_inputs(70, 32, 45)
    forget()
    nats = projection.nats_of(Projection.of(*inputs[:3], dtype), inputs[3])
    assert torch.equal(nats, at_once(inputs, dtype)[0])


@pytest.mark.parametrize(("target", "text"), [(-1, "-1 to 4"), (5, "0 to 5"), (1 << 40, "0 to 1")])
def test_targets_out_of_range_are_refused(target, text):
    features, weight, bias, targets = make_inputs(9, 3, 5)
    targets[:] = torch.arange(9) % 5
    targets[8] = target
    with pytest.raises(ShapeError, match=rf"targets are {text}\d*, expected 0 to 4: rows of"):
        loss.projected_cross_entropy(features, weight, bias, targets)
    with pytest.raises(ShapeError, match="expected 0 to 4"):
        loss.projected_nats(features, weight, bias, targets)


def test_other_layouts_are_taken():
    """Strided features, a transposed weight and every second target."""
    features, weight, bias, targets = make_inputs(24, 20, 15)
    want = through_autograd((features, weight, bias, targets), torch.float32)
    given = (
        torch.stack([features, features], 1)[:, 1],
        weight.t().contiguous().t(),
        torch.stack([bias, bias], 1)[:, 0],
        torch.stack([targets, targets], 1)[:, 1],
    )
    assert not any(t.is_contiguous() for t in given)
    for one, other in zip(through_autograd(given, torch.float32), want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("features", "weight", "gemm", "expected"),
    [
        ((4, 7, torch.float32), torch.float32, torch.float32, True),
        ((4, 32, torch.float32), torch.float32, torch.bfloat16, True),
        ((4, 33, torch.float32), torch.float32, torch.bfloat16, False),
        ((0, 32, torch.float32), torch.float32, torch.float32, False),
        ((4, 32, torch.float64), torch.float64, torch.float64, False),
        ((4, 32, torch.float32), torch.bfloat16, torch.bfloat16, False),
        ((4, 32, torch.float32), torch.float32, torch.float16, False),
    ],
)
def test_calls_that_the_kernels_run(features, weight, gemm, expected):
    N, H, dtype = features
    given = torch.zeros(N, H, dtype=dtype), torch.zeros(5, H, dtype=weight), None
    assert projection.is_native(*given, gemm) is expected


@pytest.mark.parametrize("seed", range(2))
def test_random_shapes(isa, dtype, seed, use_threads):
    """Other ones for every instruction set and type."""
    rng = random.Random(f"{seed} {isa} {dtype}")
    for number in range(7):
        shape = (rng.randrange(1, 600), rng.randrange(1, 140), rng.randrange(1, 300))
        if dtype == torch.bfloat16:
            shape = whole_rows(*shape)
        has_bias = rng.random() < 0.5
        use_threads(rng.randrange(1, 5))
        inputs = make_inputs(*shape, has_bias, seed=number)
        exact = reference(*inputs)
        if dtype == torch.float32:
            limits = dict.fromkeys(NAMES, TOLERANCE)
        else:
            limits = dict.fromkeys(NAMES, 1.2e-2)
        way = rng.choice((kept, at_once))
        check(way(inputs, dtype), exact, limits)
