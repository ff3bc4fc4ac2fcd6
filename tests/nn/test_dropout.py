"""Dropped weights and values."""

import copy
import pickle

import pytest
import torch
from torch import nn

import fastlstm
from fastlstm.nn.dropout import WeightDrop, dropped, dropped_between_layers
from fastlstm.nn.lengths import Lanes

T, B, I, H = 6, 3, 5, 7  # noqa: E741


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_weight_drop_is_a_part_of_the_layer(copied):
    layer, x = fastlstm.LSTM(I, H), torch.randn(T, B, I)
    h, c = torch.randn(2, B, H)
    plain = layer.run(x, h, c).y
    layer.weight_hook = WeightDrop(0.5)
    for each in (layer, copied(layer)):
        torch.manual_seed(1)
        first = each.run(x, h, c).y
        torch.manual_seed(1)
        assert torch.equal(each.run(x, h, c).y, first)
        assert not torch.equal(first, plain)
        assert torch.equal(each.eval().run(x, h, c).y, plain)
    assert layer.state_dict().keys() == nn.LSTM(I, H).state_dict().keys()


def test_weight_drop_scales_the_recurrent_weights_alone():
    drop, ones = WeightDrop(0.4), torch.ones(200, 50)
    assert drop("weight_ih_l0", ones) is drop("bias_hh_l0", ones) is ones
    found = drop("weight_hh_l0", ones)
    assert {round(v, 4) for v in found.unique().tolist()} == {0.0, round(1 / 0.6, 4)}
    assert float((found != 0).float().mean()) == pytest.approx(0.6, abs=0.02)


def test_dropped_keeps_the_mean_and_broadcasts():
    torch.manual_seed(0)
    out = dropped(torch.ones(100, 50, 40), 0.3, (1, 50, 40))
    assert torch.equal(out[0], out[99])
    assert abs(float(out.mean()) - 1.0) < 0.03


def test_between_layers_nothing_is_drawn_for_padding():
    x, lengths = torch.ones(T, B, H), [6, 2, 4]
    torch.manual_seed(0)
    rows = nn.functional.dropout(torch.ones(sum(lengths), H), 0.5)
    torch.manual_seed(0)
    y = dropped_between_layers(
        x, 0.5, Lanes(torch.zeros(B, dtype=torch.long), torch.tensor(lengths))
    )
    is_real = torch.arange(T)[:, None] < torch.tensor(lengths)
    assert torch.equal(y[is_real], rows)
    assert not y[~is_real].any()
    torch.manual_seed(0)
    whole = nn.functional.dropout(x, 0.5)
    torch.manual_seed(0)
    assert torch.equal(dropped_between_layers(x, 0.5, None), whole)
