"""One layer as a module: an nn.LSTM whose arithmetic the op layer does."""

import torch
from torch import nn

from fastlstm.nn.lstm import LSTMLayer, dropped


def test_same_numbers_and_state_dict_as_nn_lstm():
    layer, torchs = LSTMLayer(5, 7), nn.LSTM(5, 7)
    torchs.load_state_dict(layer.state_dict())
    x, h, c = torch.randn(6, 3, 5), torch.randn(3, 7), torch.randn(3, 7)
    out = layer(x, h, c)
    y, (h_want, c_want) = torchs(x, (h.unsqueeze(0), c.unsqueeze(0)))
    torch.testing.assert_close(out.y, y)
    torch.testing.assert_close(out.hT, h_want[0])
    torch.testing.assert_close(out.cT, c_want[0])


def test_given_recurrent_weights_replace_the_parameter():
    layer = LSTMLayer(5, 7)
    x, h = torch.randn(6, 3, 5), torch.zeros(3, 7)
    got = layer.run(x, h, h, w_hh=torch.zeros(28, 7)).y
    with torch.no_grad():
        layer.weight_hh_l0.zero_()
    torch.testing.assert_close(got, layer.run(x, h, h).y)


def test_dropped_keeps_the_mean_and_broadcasts():
    x = torch.ones(100, 50, 40)
    out = dropped(x, 0.3, (1, 50, 40), torch.Generator().manual_seed(0))
    assert torch.equal(out[0], out[99])
    assert abs(float(out.mean()) - 1.0) < 0.03
