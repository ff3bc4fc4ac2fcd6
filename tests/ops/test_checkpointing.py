"""A sequence that is kept in parts gives the gradients of one that is kept whole."""

import pytest
import torch

from fastlstm import LSTM
from fastlstm.errors import ConfigError, KernelError
from fastlstm.ops.call import TORCHS_CELL, LSTMArgs, LSTMCall
from fastlstm.ops.cell_options import CellOptions
from fastlstm.ops.checkpointing import bytes_saved, steps_per_part
from fastlstm.ops.explain import explain
from native_run import run_native

pytestmark = pytest.mark.isa

T, B, I, H, V = 61, 17, 9, 24, 11  # noqa: E741
CASES = ("dense", "tokens", "lengths", "mask", "zoneout", "norm", "no state gradients")


def outcome(case, dtype, max_activation_bytes):
    """Outputs and gradients of a fixed scalar."""
    torch.manual_seed(0)
    has_tokens = case == "tokens"
    rows = (V, I) if has_tokens else (T, B, I)
    shapes = (rows, (B, H), (B, H), (4 * H, I), (4 * H, H), (4 * H,), (4 * H,))
    leaves = [(torch.randn(s) * 0.3).requires_grad_() for s in shapes]
    tokens = torch.randint(V, (T, B)) if has_tokens else None
    x, h0, c0, *weights = leaves
    mask = begins = ends = seed = None
    norm, options = [None] * 4, TORCHS_CELL
    if case == "lengths":
        begins = torch.randint(0, T + 1, (B,))
        ends = torch.maximum(begins, torch.randint(0, T + 1, (B,)))
    if case == "mask":
        mask = (torch.rand(B, H) > 0.3) / 0.7
    if case == "zoneout":
        options, seed = CellOptions(zoneout=(0.3, 0.2)), torch.tensor([12345678901])
    if case == "norm":
        norm = [(1 + 0.1 * torch.randn(n)).requires_grad_() for n in (4 * H, 4 * H, H, H)]
        leaves += norm
        options = CellOptions(layer_norm=True)
    args = LSTMArgs(x, tokens, h0, c0, *weights, mask, begins, ends, *norm, seed)
    out = run_native(args, dtype, options=options, max_activation_bytes=max_activation_bytes)
    used = out[:1] if case == "no state gradients" else out
    scalar = sum((o.float() * torch.randn(o.shape)).sum() for o in used)
    return [*out, *torch.autograd.grad(scalar, leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_parts_give_the_gradients_of_the_whole(case, dtype):
    call = make_call(T, B, H, dtype=dtype, options=CellOptions(layer_norm=case == "norm"))
    budget = bytes_saved(call) // 3
    steps, size = steps_per_part(call._replace(max_activation_bytes=budget))
    assert 0 < steps < T / 2
    assert size <= budget
    whole, parts = outcome(case, dtype, None), outcome(case, dtype, budget)
    for index, (want, got) in enumerate(zip(whole, parts, strict=True)):
        error = (got.double() - want.double()).norm() / (want.double().norm() + 1e-9)
        # A mask meets the state before it is rounded, and at the joint of two parts after.
        assert error <= (1e-5 if dtype == torch.float32 else 4e-3), (index, float(error))
        if index < 3 and dtype == torch.float32:
            assert torch.equal(got, want), index


def make_call(T, B, H, dtype=torch.float32, **fields):
    return LSTMCall(T, B, I, H, dtype, "cpu", requires_grad=True, **fields)


def test_parts_are_the_longest_that_fit():
    call = make_call(1000, 8, 32)
    whole = bytes_saved(call)

    def parts(limit):
        return steps_per_part(call._replace(max_activation_bytes=limit))

    assert parts(None) == parts(whole) == (1000, whole)
    steps, size = parts(whole - 1)
    assert steps == 512
    assert size < whole - 1
    assert all(parts(whole // n)[1] <= whole // n for n in (2, 4, 8))
    assert parts(0)[1] == min(parts(whole * n // 200)[1] for n in range(200))


def test_saved_activations_stay_within_the_limit():
    budget = 300_000
    layer = LSTM(I, H, max_activation_bytes=budget)
    x = torch.randn(600, B, I, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
        y, _ = layer(x)
    own = {t.data_ptr() for t in (x, y, *layer.parameters())}
    kept = sum(t.nbytes for t in saved if t is not None and t.data_ptr() not in own)
    call = make_call(600, B, H, max_activation_bytes=budget)
    steps, size = steps_per_part(call)
    part = bytes_saved(call._replace(T=steps))
    assert kept + part <= size + 2 * 4 * B * H <= 1.1 * budget


def test_a_layer_in_parts_can_go_backward_twice():
    layer = LSTM(I, H, num_layers=2, bidirectional=True)
    x = torch.randn(T, B, I)

    def gradients():
        y, (h, c) = layer(x, lengths=torch.arange(B) * 3)
        loss = y.square().sum() + h.sum() + c.sum()
        first = torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True)
        again = torch.autograd.grad(loss, list(layer.parameters()))
        for a, b in zip(first, again, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        return first

    want = gradients()
    layer.max_activation_bytes = 50_000
    torch.testing.assert_close(gradients(), want, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("fast_kernels")
@pytest.mark.filterwarnings("ignore:.* Python loop over time")
def test_a_layer_in_parts_has_second_derivatives_unless_strict():
    layer = LSTM(I, H)
    x = torch.randn(T, B, I)
    found = []
    for budget in (None, 0):
        layer.max_activation_bytes = budget
        leaf = x.clone().requires_grad_()
        y = layer(leaf)[0]
        assert type(y.grad_fn).__name__.startswith(
            "LSTMFunction" if budget is None else "Checkpointed"
        )
        (first,) = torch.autograd.grad(y.square().sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), leaf)[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    layer.strict = True
    with pytest.raises(KernelError, match="Python loop over time"):
        torch.autograd.grad(layer(x)[0].sum(), layer.weight_hh_l0, create_graph=True)


def test_explain_names_what_is_kept():
    layer = LSTM(I, 512)
    assert "keeps" not in explain(layer, T=1000, B=32)[0].kernel
    layer.max_activation_bytes = 100_000_000
    (report,) = explain(layer, T=1000, B=32)
    assert "of 327.7 MB for backward and runs forward twice, 252 steps at a time" in report.kernel
    layer.max_activation_bytes = 1000
    assert "it cannot stay within 0.0 MB" in explain(layer, T=1000, B=32)[0].kernel
    with torch.no_grad():
        assert "keeps" not in explain(layer, T=1000, B=32)[0].kernel


@pytest.mark.parametrize("value", [-1, 1.5, True, "1 GB"])
def test_a_budget_is_a_number_of_bytes(value):
    with pytest.raises(ConfigError, match="max_activation_bytes"):
        LSTM(3, 4, max_activation_bytes=value)
