"""The operator of traces: it loses no tensor, no option and no gradient."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fastlstm
from fastlstm.ops.call import LSTMArgs, LSTMCall
from fastlstm.ops.cell_options import TORCHS_CELL, CellOptions
from fastlstm.ops.custom_op import (
    lstm_flop,
    run_custom_op,
)
from fastlstm.ops.kernels import fastest_kernels
from fastlstm.ops.native_call import symbolic_gate_rows
from native_run import ALL_OPTIONS, lstm, run_native

pytestmark = pytest.mark.isa

T, B, I, H, V = 7, 3, 5, 9, 6  # noqa: E741
OPTIONS = CellOptions(**{**ALL_OPTIONS, "zoneout": (0.25, 1 / 3), "recurrent_dropout": 0.0})
CASES = {
    "plain": (TORCHS_CELL, ()), "no bias": (TORCHS_CELL, ("b_ih", "b_hh")),
    "tokens": (TORCHS_CELL, ()), "lengths": (TORCHS_CELL, ()), "options": (OPTIONS, ()),
    "options, no bias, tokens, lengths": (OPTIONS, ("b_ih", "b_hh")),
}  # fmt: skip


def make(case):
    """The options of a case and its arguments, all that have a gradient as leaves."""
    options, absent = CASES[case]
    torch.manual_seed(0)
    sizes = {"rows": (V, I) if "tokens" in case else (T, B, I), "h0": (B, H), "c0": (B, H)}
    sizes |= {"w_ih": (4 * H, I), "w_hh": (4 * H, H), "b_ih": (4 * H,), "b_hh": (4 * H,)}
    if options.layer_norm:
        sizes |= {"gamma_ih": (4 * H,), "gamma_hh": (4 * H,), "gamma_c": (H,), "beta_c": (H,)}
    tensors = {n: (torch.randn(s) * 0.5).requires_grad_() for n, s in sizes.items()}
    tensors |= dict.fromkeys(absent)
    tensors["tokens"] = torch.randint(V, (T, B)) if "tokens" in case else None
    if "lengths" in case:
        tensors |= {"begins": torch.tensor([0, 2, 1]), "ends": torch.tensor([T, 2, 5])}
    if options.layer_norm:
        tensors |= {"seed": torch.tensor([12345]), "mask": (torch.rand(B, H) > 0.3) / 0.7}
    return options, LSTMArgs(**tensors)


def outcome(args, out):
    leaves = [t for t in args if t is not None and t.requires_grad]
    scalar = sum((o.float() * torch.arange(o.numel()).view(o.shape).cos()).sum() for o in out)
    first, again = (torch.autograd.grad(scalar, leaves, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, again))
    return [*out, *first]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_equal_eager_calls(case, dtype):
    options, args = make(case)
    call = LSTMCall(T, B, I, H, dtype, "cpu", requires_grad=True, options=options)
    want = outcome(args, run_native(args, dtype, options=options))
    got = outcome(args, run_custom_op(call, args))
    assert len(got) == len(want)
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), index


def test_open_sizes_are_those_of_the_kernels():
    for steps in (1, 2, 7, 127, 128, 129, 1000):
        for lanes in (1, 2, 3, 63, 64, 127, 128, 129, 500):
            rows = fastest_kernels(False).gate_rows(steps, lanes)
            assert symbolic_gate_rows(steps, lanes) == rows


DIMS = {"input": {0: torch.export.Dim("T", min=2), 1: torch.export.Dim("B", min=2)}}
LANES = {"input": {1: torch.export.Dim("B")}}


@pytest.mark.parametrize("fields", [{}, {"layer_norm": True, "zoneout": 0.2}], ids=str)
@pytest.mark.parametrize("dynamic_shapes", [None, DIMS, LANES], ids=["static", "both", "lanes"])
def test_an_exported_program_has_gradients(fields, dynamic_shapes):
    layer = fastlstm.LSTM(I, H, 2, bidirectional=True, **fields).eval()
    x = torch.randn(T, B, I)
    program = torch.export.export(layer, (x,), dynamic_shapes=dynamic_shapes).module()
    sizes = [(T, B)] if dynamic_shapes is None else [(2, 200), (150, 2), (9, 40)]
    sizes = [(T, 2), (T, 40), (T, 200)] if dynamic_shapes is LANES else sizes
    for size in sizes:
        found = []
        for module in (program, layer):
            leaf = torch.randn(*size, I, generator=torch.Generator().manual_seed(0))
            y, (h, c) = module(leaf.requires_grad_())
            loss = y.square().sum() + h.sum() + (2 * c).sum()
            found.append([y, *torch.autograd.grad(loss, [leaf, *module.parameters()])])
        program_order = [n for n, _ in program.named_parameters()]
        assert program_order == [n for n, _ in layer.named_parameters()]
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)


def test_flop_of_a_call_is_what_the_reference_runs(ops):
    args = ops.make(5, 3, 8, 16).copy(torch.float32, ())
    with FlopCounterMode(display=False) as counter:
        lstm(*args.list(), backend="reference")
    assert lstm_flop(5, 3, 8, 16) == counter.get_total_flops()
