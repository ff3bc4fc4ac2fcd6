"""Both directions of a layer side by side give the bits of one after the other."""

from __future__ import annotations

import contextlib

import pytest
import torch

import fastlstm
from fastlstm.ops import kernels
from fastlstm.ops.backends.native import NativeBackend

SHAPES = (  # T, B, I, H
    (33, 2, 16, 64),
    (450, 2, 16, 64),  # small steps, but many
    (100, 22, 48, 40),
    (7, 200, 33, 64),
    (40, 70, 20, 50),
    (9, 8, 160, 192),
)
KINDS = (
    "plain", "state", "lengths", "packed", "bf16", "no bias", "layer norm", "zoneout",
    "recurrent dropout", "weight hook", "last state only", "frozen direction", "batch_first",
)  # fmt: skip


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def layer_of(kind, I, H):  # noqa: E741
    options = {"layer norm": {"layer_norm": True}, "zoneout": {"zoneout": (0.25, 0.5)}}
    options["recurrent dropout"] = {"recurrent_dropout": 0.3}
    torch.manual_seed(0)
    layer = fastlstm.LSTM(
        I, H, bidirectional=True, bias=kind != "no bias", batch_first=kind == "batch_first",
        **options.get(kind, {}),
    )  # fmt: skip
    if kind == "weight hook":
        layer.weight_hook = lambda name, w: w * 0.9
    if kind == "frozen direction":
        for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"):
            getattr(layer, name).requires_grad_(False)
    return layer


def everything(layer, kind, shape):
    """Returns outputs without and with gradients, then all gradients."""
    T, B, I, H = shape  # noqa: E741
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(T, B, I, generator=generator)
    state = tuple(torch.randn(2, B, H, generator=generator) for _ in range(2))
    lengths = torch.randint(1, T + 1, (B,), generator=generator)
    found = []
    for needs_grad in (False, True):
        rows = x.clone().requires_grad_(needs_grad and kind != "frozen direction")
        hx = None
        if kind in ("state", "lengths"):
            hx = tuple(t.clone().requires_grad_(needs_grad) for t in state)
        given = rows.transpose(0, 1) if kind == "batch_first" else rows
        if kind == "packed":
            pack = torch.nn.utils.rnn.pack_padded_sequence
            given = pack(rows, lengths, enforce_sorted=False)
        options = {"lengths": lengths} if kind == "lengths" else {}
        torch.manual_seed(2)
        with (
            torch.set_grad_enabled(needs_grad),
            torch.autocast("cpu", torch.bfloat16, enabled=kind == "bf16"),
        ):
            y, last = layer(given, hx, **options)
        outputs = [y.data if kind == "packed" else y, *last]
        found += [t.detach().clone() for t in outputs]
        if not needs_grad:
            continue
        if kind == "last state only":
            outputs = outputs[1:]
        sum((t.float() ** 2).sum() for t in outputs).backward()
        leaves = [rows, *(hx or ()), *layer.parameters()]
        found += [t.grad for t in leaves if t.grad is not None]
        layer.zero_grad()
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_equal(shape, kind, monkeypatch):
    layer = layer_of(kind, *shape[2:])
    calls, run_both = [], NativeBackend.run_both
    monkeypatch.setattr(
        NativeBackend, "run_both", lambda *args: calls.append(run_both(*args)) or calls[-1]
    )
    both = everything(layer, kind, shape)
    # A frozen direction needs no gradient: the directions are two calls of different kinds.
    assert len(calls) == (1 if kind == "frozen direction" else 2)
    assert all(result is not None for result in calls)
    monkeypatch.setattr(NativeBackend, "_can_run_both", staticmethod(lambda call: False))
    in_turns = everything(layer, kind, shape)
    assert len(both) == len(in_turns) > 6
    for index, (a, b) in enumerate(zip(both, in_turns, strict=True)):
        assert torch.equal(a, b), index


@pytest.mark.parametrize("threads", [1, 3, 4, 6])
def test_the_number_of_threads_does_not_count(threads):
    shape = (40, 20, 160, 192)  # each direction has half of the team
    layer = layer_of("state", *shape[2:])
    expected = everything(layer, "state", shape)
    torch.set_num_threads(threads)
    for a, b in zip(expected, everything(layer, "state", shape), strict=True):
        assert torch.equal(a, b)


def test_a_second_backward_pass_computes_the_activations_again():
    layer, x = layer_of("plain", 16, 64), torch.randn(20, 3, 16, requires_grad=True)
    y, _ = layer(x)
    first, second = (
        torch.autograd.grad(y.sum(), [x, *layer.parameters()], retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_output_may_be_written_to_as_in_torch(is_packed):
    layer, x = layer_of("plain", 16, 64), torch.randn(20, 3, 16)
    torchs = torch.nn.LSTM(16, 64, bidirectional=True)
    torchs.load_state_dict(layer.state_dict())
    for each in (layer, torchs):
        pack = torch.nn.utils.rnn.pack_padded_sequence
        y, _ = each(pack(x, torch.tensor([20, 20, 20])) if is_packed else x)
        y = y.data if is_packed else y
        y.mul_(2.0)
        y.sum().backward()
    for a, b in zip(layer.parameters(), torchs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-4)


@torch._dynamo.config.patch(allow_rnn=True)
def test_a_layer_with_a_limit_of_memory_compiles_to_one_graph():
    layer, x = layer_of("plain", 16, 64), torch.randn(200, 3, 16)
    layer.max_activation_bytes = 10**6
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x)[0], layer(x)[0])
    sizes = {0: torch.export.Dim("T", min=2, max=5000), 1: torch.export.Dim("B", min=2, max=100)}
    torch.export.export(layer, (x,), dynamic_shapes=(sizes,), strict=False)


def test_second_derivatives_are_those_of_torch():
    layer = layer_of("plain", 5, 6)
    torchs = torch.nn.LSTM(5, 6, bidirectional=True)
    torchs.load_state_dict(layer.state_dict())
    found = []
    x = torch.randn(4, 3, 5)
    for each in (layer, torchs):
        rows = x.clone().requires_grad_()
        y, (h, _) = each(rows)
        said = pytest.warns(UserWarning, match="loop over time")
        with said if each is layer else contextlib.nullcontext():
            (d,) = torch.autograd.grad((y**2).sum() + h.sum(), rows, create_graph=True)
        found.append(torch.autograd.grad((d**2).sum(), [rows, *each.parameters()]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_weights_packed_in_training_do_not_overwrite_each_other():
    """Both directions use the thread's memory for packed weights at once."""
    layer, x = layer_of("plain", 16, 64), torch.randn(33, 2, 16)
    layer(x)
    y, _ = layer(x)
    torchs = torch.nn.LSTM(16, 64, bidirectional=True)
    torchs.load_state_dict(layer.state_dict())
    torch.testing.assert_close(y, torchs(x)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("threads", "shape", "expected"),
    [
        (1, (100, 8, 64, 64), (1, 1)),
        (2, (100, 8, 64, 64), (2, 1)),
        (8, (100, 32, 512, 512), (8, 4)),
        (3, (100, 32, 512, 512), (3, 3)),  # halves would not be equal
        (8, (1000, 1, 64, 64), (8, 1)),  # small steps: one thread each
        (3, (1000, 1, 64, 64), (3, 1)),
        (8, (100, 1, 64, 64), (1, 1)),  # too little work to wake a team for
    ],
)
def test_team_of_both_directions(threads, shape, expected):
    torch.set_num_threads(threads)
    assert kernels.team_of_layer(*shape, 2) == expected


def test_explain_says_that_they_run_side_by_side():
    layer = fastlstm.LSTM(64, 64, bidirectional=True)
    assert "1 thread for each direction" in fastlstm.explain(layer, T=100, B=8)[0].kernel
    layer.max_activation_bytes = 0  # in parts of the sequence, one direction after the other
    assert "each direction" not in fastlstm.explain(layer, T=1000, B=8)[0].kernel


def test_a_call_with_a_wrong_number_of_fields_is_refused():
    kernel = kernels.fastest_kernels(is_bf16=False)
    with pytest.raises(ValueError, match="a call has 3 fields, expected 22"):
        kernel.forward(1, 1, (1, 2, 3))
