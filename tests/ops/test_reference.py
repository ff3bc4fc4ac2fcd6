"""The reference itself, against an independent scalar loop and torch's cell."""

import math

import torch

from fastlstm.ops.call import LSTMWeights
from fastlstm.ops.reference import lstm_reference


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
