"""The parameters that options add to a layer."""

import pytest
import torch
from torch import nn

import fastlstm
from fastlstm.errors import ShapeError

T, B, I, H = 6, 4, 5, 7  # noqa: E741


def test_norms_belong_to_the_parameters():
    torch.manual_seed(0)
    theirs = nn.LSTM(I, H, 2, bidirectional=True)
    torch.manual_seed(0)
    ours = fastlstm.LSTM(I, H, 2, bidirectional=True, layer_norm=True)
    own = dict(ours.named_parameters())
    for name, p in theirs.named_parameters():
        assert torch.equal(own.pop(name), p)
    sizes = {"gamma_ih": 4 * H, "gamma_hh": 4 * H, "gamma_c": H, "beta_c": H}
    places = ("l0", "l0_reverse", "l1", "l1_reverse")
    assert {name: tuple(p.shape) for name, p in own.items()} == {
        f"{name}_{place}": (size,) for place in places for name, size in sizes.items()
    }
    for _ in range(2):
        assert all(p.eq(0 if name.startswith("beta") else 1).all() for name, p in own.items())
        before = ours.weight_hh_l1.clone()
        ours.reset_parameters()
        assert not torch.equal(ours.weight_hh_l1, before)
        with torch.no_grad():
            own["gamma_c_l1"].fill_(9)
        ours.reset_parameters()


@pytest.mark.parametrize("fields", [{}, {"dtype": torch.float64}, {"device": "meta"}], ids=str)
def test_norms_are_made_where_the_weights_are(fields):
    layer = fastlstm.LSTM(I, H, layer_norm=True, **fields)
    for p in layer.parameters():
        assert (p.dtype, p.device) == (layer.weight_ih_l0.dtype, layer.weight_ih_l0.device)
    shape = layer(torch.zeros(T, B, I, **fields))[0].shape
    assert shape == (T, B, H)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_norms_of_a_wrong_shape_never_reach_a_kernel(dtype):
    layer = fastlstm.LSTM(I, H, num_layers=2, layer_norm=True, dtype=dtype)
    layer.gamma_hh_l1 = nn.Parameter(torch.ones(3, dtype=dtype))
    with pytest.raises(ShapeError, match=r"gamma_hh_l1 has shape \(3,\) on cpu, expected \(28,\)"):
        layer(torch.zeros(T, B, I, dtype=dtype))
