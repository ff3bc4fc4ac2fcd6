"""Linear layers beside an LSTM: as torch's, and no slow product in bf16."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fastlstm.nn.linear import Linear, linear


def gradients(layer, x, autocast=False):
    """Returns output and gradients of a call."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = layer(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]


@pytest.fixture
def pair():
    own, peer = Linear(7, 5), nn.Linear(7, 5)
    own.load_state_dict(peer.state_dict())
    return own, peer


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_reference_equals_torch(pair, monkeypatch, autocast):
    monkeypatch.setattr("fastlstm.system.hardware.has_bf16_products", lambda: True)
    x = torch.randn(3, 2, 7)
    for got, want in zip(*(gradients(layer, x, autocast) for layer in pair), strict=True):
        assert torch.equal(got, want)


@pytest.mark.usefixtures("no_bf16_products")
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
def test_without_bf16_products_autocast_leaves_it_in_float32(pair, given):
    """torch multiplied bf16 in a plain loop there, seventy times as slow."""
    own, peer = pair
    x = torch.randn(3, 2, 7).to(given)
    got, want = gradients(own, x, autocast=True), gradients(peer, x.float())
    assert [g.dtype for g in got] == [torch.float32, given, torch.float32, torch.float32]
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w.to(g.dtype))


@pytest.mark.usefixtures("no_bf16_products")
def test_the_fixture_sees_products_in_bf16(pair):
    with pytest.raises(AssertionError, match="in bf16"):
        gradients(pair[1], torch.randn(2, 7), autocast=True)


def test_a_model_in_bf16_stays_in_bf16(monkeypatch):
    monkeypatch.setattr("fastlstm.system.hardware.has_bf16_products", lambda: False)
    x, w = torch.randn(3, 7).bfloat16(), torch.randn(5, 7).bfloat16()
    assert torch.equal(linear(x, w), F.linear(x, w))
