"""The weights of a layer as a call takes them, and whether input and state fit them."""

import pytest
import torch
from torch import nn

import fastlstm
from fastlstm.errors import ShapeError

I, H = 3, 5  # noqa: E741


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("proj_size", [0, 2])
def test_weights_come_by_layer_and_direction(bias, proj_size):
    layer = fastlstm.LSTM(I, H, 2, bias=bias, bidirectional=True, proj_size=proj_size)
    found = layer._layer_weights(layer.flat_weights())
    for place, weights in zip(["l0", "l0_reverse", "l1", "l1_reverse"], found, strict=True):
        names = ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if bias else [])]
        expected = [getattr(layer, f"{name}_{place}") for name in names]
        assert all(got is want for got, want in zip(weights, expected, strict=False))
        assert weights[len(names) :] == (None,) * (4 - len(names))


def test_a_hook_sees_every_weight_by_its_name():
    layer, seen = fastlstm.LSTM(I, H, 2), []

    def doubled(name, weight):
        seen.append(name)
        return 2 * weight

    layer.weight_hook = doubled
    flat = layer.flat_weights()
    assert seen == [name for name, _ in layer.named_parameters()]
    assert all(torch.equal(w, 2 * p) for w, p in zip(flat, layer.parameters(), strict=True))


def test_a_replaced_parameter_is_used_with_all_others():
    layer = fastlstm.LSTM(I, H)
    layer._flat_weights[0] = torch.zeros(4 * H, I)
    assert layer.flat_weights()[0] is layer._flat_weights[0]
    layer.bias_hh_l0 = nn.Parameter(torch.ones(4 * H))
    assert all(w is p for w, p in zip(layer.flat_weights(), layer.parameters(), strict=True))


@pytest.mark.parametrize(
    ("x", "hx", "expected"),
    [
        ((4, 2, I), None, True),
        ((4, I), None, True),
        ((4, 2, I + 1), None, False),
        ((4, 0, I), None, False),
        ((4, 2, 2, I), None, False),
        ((4, 2, I), (1, 2, H), True),
        ((4, I), (1, H), True),
        ((4, 2, I), (1, 3, H), False),
        ((4, 2, I), (1, H), False),
        ((4, I), (1, 2, H), False),
    ],
)
def test_shapes_of_input_and_state(x, hx, expected):
    layer = fastlstm.LSTM(I, H)
    state = None if hx is None else (torch.zeros(hx), torch.zeros(hx))
    weights = layer._layer_weights(layer.flat_weights())
    assert layer._fits(torch.zeros(x), state, weights) is expected


def test_dtypes_of_input_and_state():
    layer = fastlstm.LSTM(I, H)
    weights, x, h = (
        layer._layer_weights(layer.flat_weights()),
        torch.zeros(4, 2, I),
        torch.zeros(1, 2, H),
    )
    assert layer._fits(x, (h, h), weights)
    assert not layer._fits(x.double(), None, weights)
    assert not layer._fits(x, (h, h.double()), weights)
    assert not layer._fits(x, (h,), weights)
    assert not layer._fits(x, h, weights)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer._fits(x.double(), (h, h.double()), weights)


def test_a_weight_of_another_shape_is_named():
    layer = fastlstm.LSTM(I, H, 2)
    layer.weight_ih_l1 = nn.Parameter(torch.zeros(4 * H, I))
    weights = layer._layer_weights(layer.flat_weights())
    with pytest.raises(ShapeError, match=r"weight_ih_l1 has shape \(20, 3\), expected \(20, 5\)"):
        layer._fits(torch.zeros(4, 2, I), None, weights)
