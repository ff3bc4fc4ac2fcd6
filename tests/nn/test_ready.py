"""Small inference calls made ready once: the same results whatever changes in between."""

import copy
import pickle

import pytest
import torch
from torch import nn

import fastlstm
from fastlstm.errors import KernelError
from fastlstm.nn.ready import Ready

I, H, B = 5, 7, 3  # noqa: E741


@pytest.fixture
def pair():
    torch.manual_seed(0)
    peer, own = nn.LSTM(I, H), fastlstm.LSTM(I, H)
    own.load_state_dict(peer.state_dict())
    with torch.no_grad():
        yield peer, own


def state(batch=B):
    return torch.randn(1, batch, H), torch.randn(1, batch, H)


def agree(pair, x, hx=None):
    (want, want_state), (got, got_state) = (layer(x, hx) for layer in pair)
    for a, b in zip((got, *got_state), (want, *want_state), strict=True):
        torch.testing.assert_close(a, b)


@pytest.fixture
def calls(monkeypatch):
    """How often a ready call was tried, and how often it answered."""
    found = []
    call = Ready.call

    def counted(self, *args):
        out = call(self, *args)
        found.append(out is not None)
        return out

    monkeypatch.setattr(Ready, "call", counted)
    return found


def test_steps_are_ready_after_the_first(pair, calls):
    hx = state()
    for _ in range(4):
        agree(pair, torch.randn(1, B, I), hx)
    agree(pair, torch.randn(1, B, I))
    assert calls == [True] * 4


def test_weights_that_change(pair, calls):
    x, hx = torch.randn(1, B, I), state()
    agree(pair, x, hx)
    for layer in pair:
        layer.weight_hh_l0.mul_(0.5)
    agree(pair, x, hx)
    for layer in pair:
        layer.bias_ih_l0 = nn.Parameter(torch.ones(4 * H))
    agree(pair, x, hx)
    pair[1].load_state_dict(pair[0].state_dict())
    agree(pair, x, hx)
    assert calls == [False] * 3


def test_shapes_layouts_and_dtypes_that_change(pair):
    agree(pair, torch.randn(1, B, I), state())
    agree(pair, torch.randn(2, B, I), state())
    agree(pair, torch.randn(1, B, 2 * I)[..., ::2], state())
    agree(pair, torch.randn(1, B, I), tuple(t.transpose(1, 2).contiguous().mT for t in state()))
    agree(pair, torch.randn(I).expand(1, B, I), state())
    agree(pair, torch.randn(1, 1, I), state(1))
    agree(pair, torch.randn(4, I))
    for layer in pair:
        layer.double()
    agree(pair, torch.randn(1, B, I).double())


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("steps", [1, 3])
def test_batch_first(steps, batch):
    torch.manual_seed(0)
    peer, own = nn.LSTM(I, H, batch_first=True), fastlstm.LSTM(I, H, batch_first=True)
    own.load_state_dict(peer.state_dict())
    with torch.no_grad():
        for _ in range(3):
            agree((peer, own), torch.randn(batch, steps, I), state(batch))


def test_wrong_arguments_are_still_refused(pair):
    _, own = pair
    own(torch.randn(1, B, I), state())
    with pytest.raises(RuntimeError):
        own(torch.randn(1, B, I + 1), state())
    with pytest.raises(RuntimeError):
        own(torch.randn(1, B, I), state(B + 1))
    own.backend = "nosuch"
    with pytest.raises(KernelError):
        own(torch.randn(1, B, I), state())


def test_gradients_come_back_with_grad_mode(pair):
    _, own = pair
    x = torch.randn(1, B, I)
    own(x)
    with torch.enable_grad():
        own(x)[0].sum().backward()
    assert own.weight_hh_l0.grad is not None


def test_autocast_is_heeded(pair):
    _, own = pair
    x = torch.randn(1, B, I)
    assert own(x)[0].dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert own(x)[0].dtype == torch.bfloat16


def test_copies_and_pickles_start_anew(pair):
    peer, own = pair
    x = torch.randn(1, B, I)
    own(x)
    for other in (copy.deepcopy(own), copy.copy(own), pickle.loads(pickle.dumps(own))):
        agree((peer, other), x)
        agree((peer, other), x)
    own.weight_hh_l0.add_(1)
    twin = copy.deepcopy(own)
    peer.load_state_dict(own.state_dict())
    agree((peer, twin), x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_holds_no_constant(pair):
    _, own = pair
    x = torch.randn(1, B, I)
    own(x)
    traced = torch.jit.trace(own, x)
    other = torch.randn(1, B, I)
    torch.testing.assert_close(traced(other)[0], own(other)[0])


def test_outputs_are_fresh_every_time(pair):
    _, own = pair
    x = torch.randn(1, B, I)
    own(x)
    first, (h, _) = own(x)
    kept = first.clone(), h.clone()
    own(torch.randn(1, B, I))
    assert torch.equal(first, kept[0])
    assert torch.equal(h, kept[1])
