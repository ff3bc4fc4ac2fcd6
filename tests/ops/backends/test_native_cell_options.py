"""Options of the cell on our kernels, against the float64 reference: every instruction set."""

from functools import cache

import pytest
import torch

from fastlstm.ops import kernels
from fastlstm.ops.call import LSTMArgs, LSTMWeights
from fastlstm.ops.cell_call import CellCall, Norm
from fastlstm.ops.cell_options import ACTIVATIONS, OPTION_NAMES, CellOptions
from fastlstm.ops.reference import lstm_reference
from native_run import run_native, with_cell

SHAPES = {
    "small": (5, 3, 4, 6), "one step": (1, 2, 3, 17), "few units": (4, 2, 3, 5),
    "groups": (6, 7, 33, 70), "chunks": (40, 17, 5, 24), "lanes": (6, 40, 9, 40),
}  # fmt: skip
CELLS = {
    "norm": {"norm": True},
    "mask": {"mask": True},
    "zoneout": {"zoneout": (0.3, 0.4), "seed": 1234567890123},
    "zoneout expected": {"zoneout": (0.2, 0.1)},
    "zoneout of cells": {"zoneout": (0.0, 0.5), "seed": -3},
    "everything": {
        "norm": True, "mask": True, "zoneout": (0.3, 0.4), "seed": 7,
        "activation": "softsign", "recurrent_activation": "hard_sigmoid",
    },
}  # fmt: skip
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}
"""Relative RMS error that is always allowed; else three times the reference's in this dtype."""
NAMES = (
    "x", "h0", "c0", "w_ih", "w_hh", "b_ih", "b_hh", "gamma_ih", "gamma_hh", "gamma_c", "beta_c",
)  # fmt: skip


@pytest.fixture
def threads(monkeypatch):
    def use(n):
        monkeypatch.setattr(kernels, "num_threads", lambda B, I, H: n)  # noqa: E741

    return use


def make(T, B, I, H, seed=0):  # noqa: E741
    torch.manual_seed(seed)
    shapes = ((T, B, I), (B, H), (B, H), (4 * H, I), (4 * H, H), (4 * H,), (4 * H,))
    found = [torch.randn(s) * 0.4 for s in shapes]
    found += [1 + 0.2 * torch.randn(n) for n in (4 * H, 4 * H, H)]
    return [*found, 0.2 * torch.randn(H)]


def split(tensors, fields, dtype=None):
    """The tensors as arguments of a layer and its cell."""
    given = dict(zip(NAMES, tensors, strict=True))
    fields = dict(fields)
    B, H = given["h0"].shape
    if fields.pop("norm", False):
        fields["norm"] = Norm(*(given[n] for n in NAMES[7:]))
    if fields.pop("mask", False):
        draw = torch.rand(B, H, generator=torch.Generator().manual_seed(5))
        fields["mask"] = ((draw > 0.3) / 0.7).to(dtype or torch.float32)
    if "seed" in fields:
        fields["seed"] = torch.tensor([fields["seed"]])
    options = CellOptions(**{n: fields.pop(n) for n in OPTION_NAMES if n in fields})
    return [given[n] for n in NAMES[:7]], CellCall(options, **fields)


def outcome(tensors, run, dtype):
    """Outputs and gradients of a fixed scalar."""
    leaves = [t.detach().clone().to(dtype).requires_grad_() for t in tensors]
    out = run(leaves)
    torch.manual_seed(1)
    scalar = sum((o.to(dtype) * torch.randn(o.shape).to(dtype)).sum() for o in out)
    grads = torch.autograd.grad(scalar, leaves, allow_unused=True)
    found = (*(o.detach() for o in out), *grads)
    return dict(zip(("y", "hT", "cT", *NAMES), found, strict=True))


def native(tensors, fields, dtype, lanes=(None, None)):
    def run(leaves):
        arguments, cell = split(leaves, fields)
        x, h0, c0, *weights = arguments
        args = LSTMArgs(x, None, h0, c0, *weights, None, *lanes)
        args, options = with_cell(args, cell)
        return run_native(args, dtype, options=options)

    return outcome(tensors, run, torch.float32)


def reference(tensors, fields, lanes=(None, None), dtype=torch.float64):
    def run(leaves):
        arguments, cell = split(leaves, fields, dtype)
        x, h0, c0, *weights = arguments
        return lstm_reference(x, h0, c0, LSTMWeights(*weights), cell, *lanes)

    return outcome(tensors, run, dtype)


def check(got, want, rough, limit):
    def error(found, name):
        size = want[name].norm() + 1e-6 * want[name].numel() ** 0.5
        return float((found[name].double() - want[name]).norm() / size)

    for name in want:
        if want[name] is None:
            assert got[name] is None, name
        else:
            allowed = min(max(limit, 6 * error(rough, name)), 0.3)  # it may be lucky
            assert error(got, name) <= allowed, f"{name}: {error(got, name):.1e} > {allowed:.1e}"


def compare(tensors, fields, dtype, lanes=(None, None)):
    want = reference(tensors, fields, lanes)
    rough = reference(tensors, fields, lanes, dtype)
    check(native(tensors, fields, dtype, lanes), want, rough, LIMITS[dtype])


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_instruction_set(isa, shape, name, dtype):
    tensors, *wanted = references(shape, name, dtype)
    check(native(tensors, CELLS[name], dtype), *wanted, LIMITS[dtype])


@cache
def references(shape, name, dtype):
    """Inputs, and what the reference makes of them in float64 and in `dtype`."""
    tensors = [t.to(dtype).float() for t in make(*SHAPES[shape])]
    return tensors, *(reference(tensors, CELLS[name], dtype=d) for d in (torch.float64, dtype))


@pytest.mark.parametrize("role", ["activation", "recurrent_activation"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation(isa, name, role):
    tensors = [t / 4 for t in make(*SHAPES["groups"])]  # unbounded gates would explode
    compare(tensors, {role: name}, torch.float32)


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("name", CELLS)
def test_lengths(name, padding):
    T, B, I, H = SHAPES["chunks"]  # noqa: E741
    tensors, fields = make(T, B, I, H), CELLS[name]
    lengths = torch.arange(B) * 5 % (T + 1)
    zero, whole = torch.zeros_like(lengths), torch.full_like(lengths, T)
    lanes = (zero, lengths) if padding == "right" else (whole - lengths, whole)
    compare(tensors, fields, torch.float32, lanes)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("shape", ["lanes", "groups"])
def test_threads_give_equal_bits(shape, name, dtype, threads):
    tensors, fields, found = make(*SHAPES[shape]), CELLS[name], []
    for n in (1, 2, 3, 4, 7):
        threads(n)
        found.append(native(tensors, fields, dtype))
    for other in found[1:]:
        for name, value in found[0].items():
            assert value is other[name] is None or torch.equal(value, other[name]), name


@pytest.mark.parametrize("name", CELLS)
def test_tokens(name):
    T, B, I, H = 9, 6, 5, 33  # noqa: E741
    embedding, *rest = make(T, B, I, H)
    embedding = embedding[0]
    tokens = torch.randint(0, len(embedding), (T, B))

    def run(function):
        def inner(leaves):
            arguments, v = split(leaves, CELLS[name], leaves[0].dtype)
            return function(arguments, v)

        return inner

    def ours(arguments, v):
        rows, h0, c0, *weights = arguments
        args, options = with_cell(LSTMArgs(rows, tokens, h0, c0, *weights), v)
        return run_native(args, torch.float32, options=options)

    def theirs(arguments, v):
        rows, h0, c0, *weights = arguments
        return lstm_reference(rows[tokens], h0, c0, LSTMWeights(*weights), v)

    tensors = [embedding, *rest]
    want, rough = (outcome(tensors, run(theirs), d) for d in (torch.float64, torch.float32))
    check(outcome(tensors, run(ours), torch.float32), want, rough, LIMITS[torch.float32])


@pytest.mark.parametrize("name", CELLS)
def test_without_gradients(name):
    tensors, fields = make(*SHAPES["groups"]), CELLS[name]
    arguments, v = split(tensors, fields)
    x, h0, c0, *weights = arguments
    args, options = with_cell(LSTMArgs(x, None, h0, c0, *weights), v)
    with torch.no_grad():
        got = run_native(args, torch.float32, keep=False, options=options)
    kept = native(tensors, fields, torch.float32)
    for name, value in zip(("y", "hT", "cT"), got, strict=True):
        assert torch.equal(value, kept[name])


def test_a_second_pass_over_the_graph():
    tensors = make(*SHAPES["groups"])
    leaves = [t.clone().requires_grad_() for t in tensors]
    arguments, v = split(leaves, CELLS["everything"])
    x, h0, c0, *weights = arguments
    args, options = with_cell(LSTMArgs(x, None, h0, c0, *weights), v)
    out = run_native(args, torch.float32, options=options)
    first = torch.autograd.grad(out.y.sum(), leaves, retain_graph=True)
    second = torch.autograd.grad(out.y.sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["norm", "zoneout", "everything"])
def test_nan_in_one_lane_stays_there(name):
    tensors = make(*SHAPES["lanes"])
    clean = native(tensors, CELLS[name], torch.float32)
    tensors[0][2, 3, 0] = float("nan")
    got = native(tensors, CELLS[name], torch.float32)
    others = [b for b in range(40) if b != 3]
    assert got["y"][2:, 3].isnan().any()
    for name in ("y", "x"):
        assert torch.equal(got[name][:, others], clean[name][:, others])
    for name in ("hT", "cT", "h0", "c0"):
        assert torch.equal(got[name][others], clean[name][others])


@pytest.mark.parametrize("name", ["norm", "everything"])
@pytest.mark.parametrize("B", [15, 32, 33, 49, 70])
def test_layer_norm_has_the_same_bits_on_any_number_of_threads(name, B):
    """Threads own units, or from 16 lanes for each on lanes: sums over lanes go by blocks."""
    tensors = make(6, B, 5, 24)
    lanes = torch.arange(B) % 3, 6 - torch.arange(B) % 2
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            found.append(native(tensors, CELLS[name], torch.bfloat16, lanes))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for output, value in found[0].items():
            assert torch.equal(other[output], value), output
