"""Every backend, every named case, against the float64 reference."""

import pytest
import torch

from fastlstm.errors import KernelError, ShapeError
from fastlstm.system import hardware
from native_run import lstm, lstm_tokens

pytestmark = pytest.mark.isa

CASES = {
    "small": (5, 3, 4, 6), "T=1": (1, 4, 8, 16), "B=1": (9, 1, 8, 16), "H=1": (6, 3, 2, 1),
    "I=1": (4, 2, 1, 8), "H=63": (7, 5, 33, 63), "H=100": (6, 4, 50, 100),
    "H=257": (3, 2, 129, 257), "B=33": (4, 33, 16, 32),
}  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
BACKENDS = ("aten", "reference")


def run_and_check(ops, args, backend, dtype, grads):
    given = args.copy(dtype, grads)
    out = lstm(*given.list(), backend=backend)
    assert out.y.dtype == dtype
    if grads:
        ops.backpropagate(given, out)
    want = ops.reference(args, dtype, grads)
    # torch's loop adds the gradients of all steps up in bf16.
    is_loop = backend == "aten" and not hardware.has_bf16_products()
    times = 2.0 if is_loop and dtype is torch.bfloat16 else 1.0
    for name, value in zip(("y", "hT", "cT"), out, strict=True):
        ops.assert_close(name, value, want[name], dtype)
    for name, tensor in given.tensors.items():
        if tensor is None:
            continue
        if name in grads:
            assert tensor.grad is not None, f"no gradient for {name}"
            assert tensor.grad.dtype == dtype
            ops.assert_close(f"d{name}", tensor.grad, want[f"d{name}"], dtype, times)
        else:
            assert tensor.grad is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_outputs_states_and_gradients(ops, case, dtype, backend):
    run_and_check(ops, ops.make(*CASES[case]), backend, dtype, ops.names)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_without_gradient(ops, dtype, backend):
    with torch.no_grad():
        run_and_check(ops, ops.make(7, 3, 12, 20), backend, dtype, ())


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp16_trains_by_the_loop(ops, backend):
    run_and_check(ops, ops.make(5, 3, 8, 16), backend, torch.float16, ops.names)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_bias(ops, dtype, backend):
    grads = ops.names[:5]
    run_and_check(ops, ops.make(6, 3, 8, 16, bias=False), backend, dtype, grads)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_subsets_of_gradients(ops, dtype, backend):
    args = ops.make(5, 3, 8, 16)
    for grads in ops.subsets:
        run_and_check(ops, args, backend, dtype, grads)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_arguments(ops, dtype, backend):
    args = ops.make(6, 4, 10, 16)
    for name, value in args.tensors.items():
        args.tensors[name] = torch.stack([value, value], -1).select(-1, 0)
    args.tensors["x"] = args.tensors["x"].transpose(0, 1).contiguous().transpose(0, 1)
    assert not any(value.is_contiguous() for value in args.tensors.values())
    run_and_check(ops, args, backend, dtype, ops.names)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_of_a_final_state_alone(ops, backend):
    args = ops.make(5, 3, 8, 16)
    for index, name in ((1, "dh"), (2, "dc")):
        given, exact = args.copy(torch.float32), args.copy(torch.float64)
        for each in (given, exact):
            out = lstm(*each.list(), backend="reference" if each is exact else backend)
            (out[index].double() * getattr(args, name)).sum().backward()
        for key in ops.names:
            got, want = given.tensors[key].grad, exact.tensors[key].grad
            ops.assert_close(f"d{key}", got, want, torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_takes_float32_and_gives_float32_gradients(ops, backend):
    args = ops.make(6, 3, 16, 32)
    given = args.copy(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = lstm(*given.list(), backend=backend)
    assert (out.y.dtype, out.hT.dtype, out.cT.dtype) == (
        torch.bfloat16,
        torch.float32,
        torch.float32,
    )
    ops.backpropagate(given, out)
    want = ops.reference(args, torch.float32, ops.names)
    for name, value in zip(("y", "hT", "cT"), out, strict=True):
        ops.assert_close(name, value, want[name], torch.bfloat16)
    for name in ops.names:
        grad = given.tensors[name].grad
        assert grad.dtype == torch.float32
        ops.assert_close(f"d{name}", grad, want[f"d{name}"], torch.bfloat16)


def test_gradcheck(ops):
    args = ops.make(3, 2, 3, 4).copy(torch.float64).list()
    for backend in BACKENDS:
        assert torch.autograd.gradcheck(lambda *a, b=backend: tuple(lstm(*a, backend=b)), args)


def test_state_carries_over_a_cut(ops):
    x, h, c, *weights = ops.make(10, 3, 8, 16).copy(torch.float32, ()).list()
    whole = lstm(x, h, c, *weights)
    first = lstm(x[:4], h, c, *weights)
    second = lstm(x[4:], first.hT, first.cT, *weights)
    torch.testing.assert_close(torch.cat([first.y, second.y]), whole.y, rtol=0, atol=1e-6)
    torch.testing.assert_close(second.cT, whole.cT, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(0, 3), (4, 0), (0, 0)], ids=["T=0", "B=0", "both 0"])
def test_no_step_and_no_lane(ops, sizes, dtype, backend):
    T, B = sizes
    given = ops.make(T, B, 8, 16).copy(dtype)
    tokens = torch.zeros((T, B), dtype=torch.int64)
    embedding = torch.ones((5, 8), dtype=dtype)
    for out in (
        lstm(*given.list(), backend=backend),
        lstm_tokens(tokens, embedding, *given.list()[1:], backend=backend),
    ):
        assert (out.y.shape, out.y.dtype) == ((T, B, 16), dtype)
        assert torch.equal(out.hT, given.tensors["h0"])
        assert torch.equal(out.cT, given.tensors["c0"])
    ops.backpropagate(given, lstm(*given.list(), backend=backend))
    for name, tensor in given.tensors.items():
        want = {"h0": given.dh, "c0": given.dc}.get(name, torch.zeros(tensor.shape))
        assert torch.equal(tensor.grad, want.to(dtype)), name


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "x",
            (5, 3, 7),
            r"x has last axis 7, this layer has input_size=8; pass x of shape \(5, 3, 8\)",
        ),
        ("x", (5, 24), r"x has shape \(5, 24\), expected \(T, B, I\)"),
        ("h0", (1, 3, 16), r"h0 has shape \(1, 3, 16\), expected \(3, 16\)"),
        ("c0", (4, 16), r"c0 has shape \(4, 16\), expected \(3, 16\)"),
        ("w_ih", (60, 8), r"w_ih has shape \(60, 8\), expected \(64, 8\)"),
        ("w_hh", (64, 15), r"w_hh has shape \(64, 15\), expected \(4H, H\)"),
        ("b_hh", (16,), r"b_hh has shape \(16,\), expected \(64,\)"),
    ],
)
def test_wrong_shapes_are_named(ops, name, shape, message):
    args = ops.make(5, 3, 8, 16).copy(torch.float32, ())
    args.tensors[name] = torch.zeros(shape)
    with pytest.raises(ShapeError, match=message):
        lstm(*args.list())


@pytest.mark.parametrize("backend", [None, "native", "aten", "reference"])
@pytest.mark.parametrize(("I", "H"), [(0, 16), (8, 0)])
def test_sizes_of_zero_are_refused(I, H, backend):  # noqa: E741
    x, state = torch.zeros(5, 3, I), (torch.zeros(3, H), torch.zeros(3, H))
    weights = torch.zeros(4 * H, I), torch.zeros(4 * H, H)
    with pytest.raises(ShapeError, match=f"input size {I} and hidden size {H} were given"):
        lstm(x, *state, *weights, backend=backend)
    tokens, embedding = torch.zeros(5, 3, dtype=torch.int64), torch.zeros(2, I)
    with pytest.raises(ShapeError, match=f"input size {I} and hidden size {H} were given"):
        lstm_tokens(tokens, embedding, *state, *weights, backend=backend)


def test_other_wrong_arguments_are_named(ops):
    x, h0, c0, w_ih, w_hh, b_ih, b_hh = ops.make(5, 3, 8, 16).copy(torch.float32, ()).list()
    with pytest.raises(ShapeError, match="give both biases or none"):
        lstm(x, h0, c0, w_ih, w_hh, b_ih)
    with pytest.raises(ShapeError, match=r"x is torch\.int64, expected a floating-point tensor"):
        lstm(x.long(), h0, c0, w_ih, w_hh, b_ih, b_hh)
    with pytest.raises(ShapeError, match="w_hh is on meta, x on cpu"):
        lstm(x, h0, c0, w_ih, w_hh.to("meta"), b_ih, b_hh)
    with pytest.raises(KernelError, match=r"no backend is called 'atem' \(did you mean 'aten'\?\)"):
        lstm(x, h0, c0, w_ih, w_hh, b_ih, b_hh, backend="atem")
