"""The reference itself, against an independent scalar loop and torch's cell."""

import math

import pytest
import torch
from torch.nn import functional as F

from fastlstm.ops.call import LSTMWeights
from fastlstm.ops.cell_call import CellCall, Norm, activate, zoneout_masks
from fastlstm.ops.cell_options import ACTIVATIONS, CellOptions
from fastlstm.ops.reference import lstm_reference, lstm_step_reference


def test_one_unit_by_hand():
    w_ih = torch.tensor([[0.1], [0.2], [0.3], [0.4]], dtype=torch.float64)
    w_hh = torch.tensor([[0.5], [-0.6], [0.7], [-0.8]], dtype=torch.float64)
    bias = torch.tensor([0.01, 0.02, 0.03, 0.04], dtype=torch.float64)
    x = torch.tensor([[[1.5]], [[-2.0]]], dtype=torch.float64)
    h, c = 0.25, -0.5
    start = torch.tensor([[h]], dtype=torch.float64), torch.tensor([[c]], dtype=torch.float64)
    out = lstm_reference(x, *start, LSTMWeights(w_ih, w_hh, bias, 2 * bias))
    for t in range(2):
        raw = [float(w_ih[k] * x[t] + w_hh[k] * h + 3 * bias[k]) for k in range(4)]
        i, f, o = (1 / (1 + math.exp(-raw[k])) for k in (0, 1, 3))
        c = f * c + i * math.tanh(raw[2])
        h = o * math.tanh(c)
        assert math.isclose(float(out.y[t]), h, rel_tol=1e-14)
    assert math.isclose(float(out.hT), h, rel_tol=1e-14)
    assert math.isclose(float(out.cT), c, rel_tol=1e-14)


def test_equals_torchs_cell(ops):
    x, h, c, *weights = ops.make(4, 3, 5, 7).copy(torch.float64, ()).list()
    out = lstm_reference(x, h, c, LSTMWeights(*weights))
    for t in range(4):
        h, c = torch.lstm_cell(x[t], (h, c), *weights)
        torch.testing.assert_close(out.y[t], h, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(out.cT, c, rtol=1e-13, atol=1e-14)


T, B, I, H = 4, 3, 5, 7  # noqa: E741
SEED = torch.tensor([-(1 << 40) + 12345])


def make_norm(H=H, seed=1):
    rng = torch.Generator().manual_seed(seed)
    sizes = (4 * H, 4 * H, H, H)
    return Norm(*(torch.randn(n, generator=rng, dtype=torch.float64) for n in sizes))


def make_calls(H=H):
    mask = torch.linspace(0, 2, B * H, dtype=torch.float64).view(B, H)
    activations = {"activation": "softsign", "recurrent_activation": "hard_sigmoid"}
    others = {"activation": "softsign", "recurrent_activation": "tanh"}
    return {
        "plain": CellCall(),
        "layer norm": CellCall(norm=make_norm(H)),
        "recurrent mask": CellCall(mask=mask),
        "zoneout drawn": CellCall(CellOptions(zoneout=(0.3, 0.6)), seed=SEED),
        "zoneout expected": CellCall(CellOptions(zoneout=(0.3, 0.6))),
        "activations": CellCall(CellOptions(**activations)),
        "all": CellCall(CellOptions(zoneout=(0.3, 0.6), **others), make_norm(H), mask, SEED),
    }


CALLS = make_calls()


def arguments(ops):
    x, h0, c0, *weights = ops.make(T, B, I, H).copy(torch.float64, ()).list()
    return x, h0, c0, LSTMWeights(*weights)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("recurrent", ACTIVATIONS)
def test_each_activation_has_its_place(activation, recurrent, ops):
    x, h, c, weights = arguments(ops)
    got = lstm_step_reference(
        x[0],
        h,
        c,
        weights,
        CellCall(CellOptions(activation=activation, recurrent_activation=recurrent)),
    )
    cell = nn_cell(weights)(torch.cat([x[0], h], 1))
    i, f, g, o = cell.split(H, 1)
    new_c = activate(recurrent, f) * c + activate(recurrent, i) * activate(activation, g)
    torch.testing.assert_close(got[1], new_c)
    torch.testing.assert_close(got[0], activate(recurrent, o) * activate(activation, new_c))


def nn_cell(weights):
    """One linear layer of both products."""
    layer = torch.nn.Linear(I + H, 4 * H, dtype=torch.float64).requires_grad_(False)
    layer.weight.copy_(torch.cat([weights.w_ih, weights.w_hh], 1))
    layer.bias.copy_(weights.b_ih + weights.b_hh)
    return layer


def test_layer_norm_equals_torchs(ops):
    x, h, c, weights = arguments(ops)
    norm = make_norm()
    got = lstm_step_reference(x[0], h, c, weights, CellCall(norm=norm))
    a = F.layer_norm(x[0] @ weights.w_ih.t(), (4 * H,), norm.gamma_ih, weights.b_ih)
    a = a + F.layer_norm(h @ weights.w_hh.t(), (4 * H,), norm.gamma_hh, weights.b_hh)
    i, f, g, o = a.split(H, 1)
    new_c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    shown = F.layer_norm(new_c, (H,), norm.gamma_c, norm.beta_c)
    torch.testing.assert_close(got[0], o.sigmoid() * shown.tanh(), rtol=1e-12, atol=0)
    torch.testing.assert_close(got[1], new_c, rtol=1e-12, atol=0)  # the norm is not carried on


def test_the_mask_acts_on_the_recurrence_only(ops):
    x, h, c, weights = arguments(ops)
    mask = torch.linspace(0, 2, B * H, dtype=torch.float64).view(B, H)
    got = lstm_reference(x, h, c, weights, CellCall(mask=mask))
    for t in range(T):
        h, c = torch.lstm_cell(x[t], (h * mask, c), *weights)
        torch.testing.assert_close(got.y[t], h)
    torch.testing.assert_close(got.hT, h)
    kept = CellCall(CellOptions(zoneout=(1.0, 0.0)), mask=mask)
    torch.testing.assert_close(lstm_reference(x, h, c, weights, kept).hT, h)


@pytest.mark.parametrize("zoneout", [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0)], ids=str)
@pytest.mark.parametrize("seed", [None, SEED], ids=["expected", "drawn"])
def test_zoneout_at_its_ends(zoneout, seed, ops):
    x, h, c, weights = arguments(ops)
    cell = CellCall(CellOptions(zoneout=zoneout), seed=seed)
    got = lstm_step_reference(x[0], h, c, weights)
    out = lstm_reference(x[:1], h, c, weights, cell)
    torch.testing.assert_close(out.hT, h if zoneout[0] else got[0])  # of the cell not zoned out
    torch.testing.assert_close(out.cT, c if zoneout[1] else got[1])


def test_every_step_of_zoneout_uses_its_own_mask(ops):
    x, h, c, weights = arguments(ops)
    cell = CALLS["zoneout drawn"]
    out = lstm_reference(x, h, c, weights, cell)
    keep_h, keep_c = zoneout_masks(SEED, T, B, H, cell)
    for t in range(T):
        new_h, new_c = torch.lstm_cell(x[t], (h, c), *weights)
        h, c = keep_h[t] * h + ~keep_h[t] * new_h, keep_c[t] * c + ~keep_c[t] * new_c
        torch.testing.assert_close(out.y[t], h)
    torch.testing.assert_close(out.cT, c)


@pytest.mark.parametrize("name", CALLS)
def test_each_lane_equals_a_single_sequence(name, ops):
    x, h0, c0, weights = arguments(ops)
    cell = CALLS[name]
    begins, ends = torch.tensor([0, 1, 2]), torch.tensor([3, 4, 2])
    out = lstm_reference(x, h0, c0, weights, cell, begins, ends)
    draws = cell.seed is not None
    keep = zoneout_masks(SEED, T, B, H, cell)
    for b in range(B):
        one = slice(b, b + 1)
        h, c = h0[one], c0[one]
        own = cell._replace(mask=None if cell.mask is None else cell.mask[one])
        for t in range(T):
            want = torch.zeros_like(h)
            if begins[b] <= t < ends[b]:
                kept = (0.3, 0.6) if max(cell.options.zoneout) else (0.0, 0.0)
                kept = tuple(mask[t, one] for mask in keep) if draws else kept
                h, c = lstm_step_reference(x[t, one], h, c, weights, own, kept)
                want = h
            torch.testing.assert_close(out.y[t, one], want)
        torch.testing.assert_close(out.hT[one], h)
        torch.testing.assert_close(out.cT[one], c)
    assert torch.equal(out.hT[2], h0[2])


@pytest.mark.parametrize("has_lanes", [False, True], ids=["whole", "lanes"])
@pytest.mark.parametrize("name", CALLS)
def test_gradients_by_differences(name, has_lanes, ops):
    """Of every number by itself, so there are few of them."""
    x, h0, c0, *weights = ops.make(T, B, 2, 3).copy(torch.float64, ()).list()
    cell = make_calls(H=3)[name]
    lanes = (torch.tensor([0, 1, 2]), torch.tensor([3, 4, 2])) if has_lanes else ()
    given = [x, h0, c0, *weights, *(cell.norm or ())]

    def run(x, h0, c0, w_ih, w_hh, b_ih, b_hh, *norm):
        own = cell._replace(norm=Norm(*norm) if norm else None)
        return tuple(lstm_reference(x, h0, c0, LSTMWeights(w_ih, w_hh, b_ih, b_hh), own, *lanes))

    leaves = [t.clone().requires_grad_() for t in given]
    assert torch.autograd.gradcheck(run, leaves)
