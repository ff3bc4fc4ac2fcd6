"""Our kernels: every instruction set this machine has, against the float64 reference."""

import math

import pytest
import torch

from fastlstm.errors import KernelError, ShapeError
from fastlstm.ops import kernels
from fastlstm.ops.backends.native import NativeBackend
from fastlstm.ops.call import LSTMArgs, LSTMCall
from fastlstm.system import environment, hardware
from native_run import lstm, lstm_tokens, run_native

# Not `decoding.ISAS`: conftest.py imports that file before --cpu limits the CPU.
ISAS = environment.ISA_NAMES[: environment.ISA_NAMES.index(hardware.cpu().isa) + 1]

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = {
    "small": (5, 3, 4, 6), "T=1": (1, 4, 8, 16), "B=1": (9, 1, 8, 16), "all 1": (1, 1, 1, 1),
    "H=63": (7, 5, 33, 63), "H=257": (3, 2, 129, 257), "B=33": (4, 33, 16, 32),
    "B=67": (3, 67, 40, 72), "many rows": (41, 17, 5, 24), "panels in parts": (2, 3, 6200, 5),
}  # fmt: skip


@pytest.fixture(params=(1, 2, 4), ids=lambda n: f"{n} threads")
def threads(request, monkeypatch):
    monkeypatch.setattr(kernels, "num_threads", lambda B, I, H: request.param)  # noqa: E741
    return request.param


def check(ops, args, dtype, grads=None, **fields):
    grads = ops.names if grads is None else grads
    given = args.copy(dtype, grads)
    out = lstm(*given.list(), backend="native", **fields)
    ops.backpropagate(given, out)
    want = ops.reference(args, dtype, grads)
    for name, value in zip(("y", "hT", "cT"), out, strict=True):
        ops.assert_close(name, value, want[name], dtype)
    for name in grads:
        ops.assert_close(f"d{name}", given.tensors[name].grad, want[f"d{name}"], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_instruction_set(ops, isa, shape, dtype, threads):
    check(ops, ops.make(*SHAPES[shape]), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_asked_instruction_set_runs(isa, dtype):
    table = kernels.kernel_table(isa, dtype == torch.bfloat16)
    narrower = {"avx512_bf16": "avx512", "amx_bf16": "avx512", "neon_bf16": "neon"}
    expected = isa if dtype == torch.bfloat16 else narrower.get(isa, isa)
    assert table.isa == expected


def run_one_unit_each(dtype, T, logits, c0, *, keep=False):
    """H units without weights: unit j's gates i, f, g, o are `logits[:, j]` in every step."""
    H = logits.shape[1]
    weights = torch.zeros(4 * H, 1), torch.zeros(4 * H, H), logits.flatten(), torch.zeros(4 * H)
    x, h0 = torch.zeros(T, 1, 1, dtype=dtype), torch.zeros(1, H)
    return run_native(LSTMArgs(x, None, h0, c0[None], *weights), dtype, keep=keep)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_memories_decay_as_their_forget_gates_say(isa, dtype):
    forget = torch.arange(-20.0, 21.0)
    logits = torch.zeros(4, len(forget))
    logits[1] = forget
    T = 64
    many = run_one_unit_each(dtype, T, logits, torch.ones(len(forget)))[2][0].double()
    one = run_one_unit_each(dtype, 1, logits, torch.ones(len(forget)))[2][0].double()
    exact = forget.double().sigmoid()
    assert ((one - exact).abs() <= 2e-4 * exact).all()
    # Per step, as far as float32 has a number beside 1.
    lost, exact_lost = 1 - many[24:] ** (1 / T), 1 - exact[24:]
    assert ((lost - exact_lost).abs() <= 1e-3 * exact_lost + 2**-24).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinite_logits_close_and_open_gates(isa, dtype):
    inf = torch.inf
    gates = [[0.0] * 4, [-inf, inf, -inf, -inf], [0.0, 0.0, inf, -inf], [0.0, 0.0, inf, -inf]]
    _, h, c = run_one_unit_each(dtype, 3, torch.tensor(gates), torch.ones(4))[:3]
    assert c[0].tolist() == pytest.approx([0.0, 1.0, 0.5, -0.5], abs=1e-4)
    assert h[0, 2:].tolist() == pytest.approx([math.tanh(0.5), 0.0], abs=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gate_that_is_no_number_is_not_hidden(isa, dtype):
    logits = torch.zeros(4, 5)
    logits.fill_diagonal_(torch.nan)
    h = run_one_unit_each(dtype, 1, logits, torch.ones(5))[1][0]
    assert h.isnan().tolist() == [True] * 4 + [False]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_slope_of_a_full_cell(isa, dtype):
    c0 = torch.arange(-8.0, 8.25, 0.25).requires_grad_()
    logits = torch.zeros(4, len(c0))
    logits[1] = logits[3] = 30.0
    h = run_one_unit_each(dtype, 1, logits, c0, keep=True)[1]
    h.sum().backward()
    slope = 1 - c0.detach().double().tanh() ** 2
    assert ((c0.grad - slope).abs() <= 1e-3 * slope + 4 * 2**-24).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(6, 4, 7, 20, 40), (3, 40, 9, 64, 64), (1, 2, 1, 8, 4)])
def test_tokens_equal_rows_of_the_embedding(ops, isa, dtype, sizes, threads):
    T, B, V, I, H = sizes  # noqa: E741
    args = ops.make(T, B, I, H)
    rng = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, V, (T, B), generator=rng)
    embedding = torch.randn((V, I), generator=rng, dtype=torch.float64)
    args.tensors["x"] = embedding[tokens]
    want = ops.reference(args, dtype, ops.names)
    given = args.copy(dtype)
    leaf = embedding.to(dtype).requires_grad_()
    out = lstm_tokens(tokens, leaf, *given.list()[1:], backend="native")
    ops.backpropagate(given, out)
    for name, value in zip(("y", "hT", "cT"), out, strict=True):
        ops.assert_close(name, value, want[name], dtype)
    for name in ops.names[1:]:
        ops.assert_close(f"d{name}", given.tensors[name].grad, want[f"d{name}"], dtype)
    summed = torch.zeros_like(embedding).index_add_(0, tokens.flatten(), want["dx"].flatten(0, 1))
    ops.assert_close("dx", leaf.grad, summed, dtype)


def test_a_frequent_token_loses_nothing_to_rounding(ops, isa):
    """Its gradient is a sum over 8,000 rows of one sign; a plain sum is wrong by 1e-6 and more."""
    T, B, I, H = 20, 400, 1, 16  # noqa: E741
    args = ops.make(T, B, I, H)
    args.dy = torch.ones_like(args.dy)
    embedding = torch.tensor([[0.5]], dtype=torch.float64)
    tokens = torch.zeros((T, B), dtype=torch.int64)
    args.tensors["x"] = embedding[tokens]
    want = ops.reference(args, torch.float32, ("b_ih",))["db_ih"]
    given = args.copy(torch.float32)
    out = lstm_tokens(tokens, embedding.float(), *given.list()[1:], backend="native")
    ops.backpropagate(given, out)
    error = given.tensors["b_ih"].grad.double() - want
    assert float(error.norm() / want.norm()) < 2e-7


@pytest.mark.isa
@pytest.mark.parametrize("route", ["eager", "compiled", "traced"])
@pytest.mark.parametrize("token", [5, -1, 1 << 40])
def test_a_token_outside_the_embedding_is_named(ops, route, token):
    args = ops.make(3, 2, 4, 8).copy(torch.float32).list()[1:]
    tokens = torch.tensor([[0, 1], [4, 1], [0, 0]])
    embedding = torch.ones(5, 4)

    def call(tokens):
        return run_native(LSTMArgs(embedding, tokens, *args), torch.float32)[0]

    graph = call
    if route == "compiled":
        torch._dynamo.reset()
        graph = torch.compile(call, backend="eager", fullgraph=True)
    elif route == "traced":
        graph = torch.fx.experimental.proxy_tensor.make_fx(call)(tokens)
    assert torch.equal(graph(tokens), call(tokens))
    tokens[1, 0] = token
    with pytest.raises(ShapeError, match=rf"tokens run from .*{token}.*rows 0 to 4"):
        graph(tokens)


@pytest.mark.isa
def test_a_token_that_left_the_embedding_before_backward_is_named(ops):
    args = ops.make(3, 2, 4, 8).copy(torch.float32)
    tokens = torch.tensor([[0, 1], [4, 1], [0, 0]])
    embedding = torch.zeros(5, 4, requires_grad=True)
    y = lstm_tokens(tokens, embedding, *args.list()[1:])[0]
    tokens.numpy()[1, 0] = 1 << 20
    with pytest.raises(ShapeError, match=r"to 1048576, the embedding has rows 0 to 4"):
        y.sum().backward()


def lanes_reference(args, begins, ends, mask):
    """The loop with lengths and a mask on the recurrent state, in float64."""
    x, h, c, w_ih, w_hh, b_ih, b_hh = args.list()
    steps = []
    for t, x_t in enumerate(x):
        gates = x_t @ w_ih.t() + (h * mask) @ w_hh.t() + b_ih + b_hh
        i, f, g, o = gates.chunk(4, dim=1)
        new_c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        new_h = o.sigmoid() * new_c.tanh()
        active = ((begins <= t) & (t < ends))[:, None]
        c, h = torch.where(active, new_c, c), torch.where(active, new_h, h)
        steps.append(torch.where(active, h, torch.zeros_like(h)))
    return torch.stack(steps), h, c


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lengths_and_recurrent_mask(ops, isa, dtype, threads):
    T, B, I, H = 7, 19, 10, 40  # noqa: E741
    args = ops.make(T, B, I, H)
    rng = torch.Generator().manual_seed(2)
    begins = torch.randint(0, 3, (B,), generator=rng)
    ends = (begins + torch.randint(0, T - 1, (B,), generator=rng)).clamp(max=T)
    mask = (torch.rand((B, H), generator=rng) < 0.7).to(torch.float32) / 0.7
    exact = args.copy(dtype, ()).copy(torch.float64)
    want = lanes_reference(exact, begins, ends, mask.double())
    ops.backpropagate(exact, want)
    given = args.copy(dtype)
    x, h0, c0, *weights = given.list()
    s = LSTMArgs(x, None, h0, c0, *weights, mask, begins, ends)
    out = run_native(s, dtype)
    ops.backpropagate(given, out)
    for name, value, exact_value in zip(("y", "hT", "cT"), out, want, strict=True):
        ops.assert_close(name, value.to(dtype), exact_value.detach(), dtype)
    for name in ops.names:
        got, exact_value = given.tensors[name].grad, exact.tensors[name].grad
        ops.assert_close(f"d{name}", got, exact_value, dtype)


@pytest.mark.parametrize(
    "sizes", [(9, 21, 24, 80), (4, 25, 40, 264), (3, 130, 8, 136), (2, 70, 8, 300)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_and_repeats_give_equal_bits(ops, isa, dtype, sizes, monkeypatch):
    def run(num):
        monkeypatch.setattr(kernels, "num_threads", lambda B, I, H: num)  # noqa: E741
        given = ops.make(*sizes).copy(dtype)
        out = lstm(*given.list(), backend="native")
        ops.backpropagate(given, out)
        return [*out, *(given.tensors[name].grad for name in ops.names)]

    first = run(1)
    for num in (1, 2, 2, 3, 7, 64):
        assert all(torch.equal(a, b) for a, b in zip(first, run(num), strict=True))


def test_a_second_pass_over_the_same_graph(ops, isa):
    given = ops.make(5, 3, 8, 16).copy(torch.float32)
    out = lstm(*given.list(), backend="native")
    out.y.sum().backward(retain_graph=True)
    first = {name: given.tensors[name].grad.clone() for name in ops.names}
    out.y.sum().backward()
    for name in ops.names:
        torch.testing.assert_close(given.tensors[name].grad, 2 * first[name], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_nan_stays_in_its_lane(ops, isa, dtype, threads):
    given = ops.make(6, 35, 20, 48).copy(dtype)
    with torch.no_grad():
        given.tensors["x"][2, 33, 5] = float("nan")
    y = lstm(*given.list(), backend="native").y
    assert y[2:, 33].isnan().all()
    assert not y[:2].isnan().any()
    assert not y[:, [b for b in range(35) if b != 33]].isnan().any()


@pytest.mark.parametrize("scale", [1e-6, 30.0, 1e30])
def test_tiny_and_huge_inputs(ops, isa, scale):
    args = ops.make(4, 5, 6, 16)
    args.tensors["x"] = args.tensors["x"] * scale
    with torch.no_grad():
        got = lstm(*args.copy(torch.float32, ()).list(), backend="native")
    want = ops.reference(args, torch.float32, ())
    for name, value in zip(("y", "hT", "cT"), got, strict=True):
        ops.assert_close(name, value, want[name], torch.float32)


@pytest.mark.isa
def test_a_mask_that_requires_a_gradient_is_an_error(ops):
    x, h0, c0, *weights = ops.make(3, 2, 4, 8).copy(torch.float32).list()
    mask = torch.ones(2, 8, requires_grad=True)
    y = run_native(LSTMArgs(x, None, h0, c0, *weights, mask), torch.float32).y
    with pytest.raises(KernelError, match="mask has no gradient"):
        y.sum().backward()


@pytest.mark.isa
@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("scalar", ["FASTLSTM_ISA allows no more than scalar", "without bf16 instructions"]),
        ("avx2", ["FASTLSTM_ISA allows no more than avx2", "without bf16 instructions"]),
    ],
)
def test_reasons_for_a_slow_kernel_are_reported(monkeypatch, name, reasons):
    if name not in ISAS:
        pytest.skip(f"this CPU has no {name}")
    monkeypatch.setenv("FASTLSTM_ISA", name)
    call = LSTMCall(8, 4, 16, 32, torch.bfloat16, "cpu", requires_grad=True)
    kernel = NativeBackend().describe(call)
    assert kernel.is_fast == (name != "scalar")
    for reason in reasons:
        assert reason in kernel.why
    assert "this CPU has none" not in kernel.why


@pytest.mark.isa
@pytest.mark.parametrize("isa", ISAS)
def test_weights_are_padded_to_what_a_product_takes(isa):
    kernel = kernels.kernel_table(isa, True)
    step = 32 if isa == "amx_bf16" else 4 if isa == "neon_bf16" else 2

    def padded(size, multiple):
        return -(-size // multiple) * multiple

    I, H, lanes = 1, 203, kernel.lanes  # noqa: E741
    forward = padded(4 * H, lanes) * (padded(I, step) + padded(H, step))
    assert kernel.forward_bytes(I, H) == 2 * forward + 4 * 4 * padded(H, lanes)
    backward = padded(4 * H, step) * (padded(I, lanes) + padded(H, lanes))
    assert kernel.backward_bytes(I, H) == 2 * backward


@pytest.mark.isa
def test_threads_beside_torchs_are_reported(monkeypatch, threads):
    monkeypatch.setattr(hardware, "join_openmp", lambda: False)
    call = LSTMCall(8, 64, 64, 64, torch.float32, "cpu", requires_grad=True)
    assert ("threads compete with torch's" in NativeBackend().describe(call).why) == (threads > 1)


@pytest.mark.isa
def test_torchs_openmp_comes_before_any_other():
    other, own = "/usr/lib/libgomp.so.1", "/venv/site-packages/torch/lib/libgomp-a34b.so.1"
    assert sorted([other, own], key=hardware._beside_torch) == [own, other]
