"""When torch's own `nn.LSTM` runs a layer, and how it runs lengths."""

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

import fastlstm
from fastlstm.errors import KernelError
from fastlstm.ops.left_alone import active_transform
from fastlstm.system import hardware

T, B, I, H = 6, 3, 5, 7  # noqa: E741
X = torch.zeros(T, B, I)


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "bf16"])
@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
def test_without_bf16_in_onednn_torchs_own_runs_its_loop(monkeypatch, is_packed, autocast):
    """torch asks oneDNN all the same, and raises "could not create a primitive descriptor"."""
    monkeypatch.setattr(hardware, "has_bf16_products", lambda: False)
    before, seen, lstm = torch._C._get_mkldnn_enabled(), [], torch._VF.lstm

    def watched(*args):
        seen.append(torch._C._get_mkldnn_enabled())
        return lstm(*args)

    monkeypatch.setattr(torch._VF, "lstm", watched)
    layer, x = fastlstm.LSTM(I, H, proj_size=2), X if autocast else X.bfloat16()
    layer = layer if autocast else layer.bfloat16()
    given = pack_padded_sequence(x, [6, 5, 2]) if is_packed else x
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        layer(given)
    assert (seen, torch._C._get_mkldnn_enabled()) == ([False], before)


@pytest.mark.isa
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_bf16_runs_on_torchs_own():
    layer, x = fastlstm.LSTM(I, H, proj_size=2), torch.randn(T, B, I)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = layer(x)
    y.float().sum().backward()
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y.float(), layer(x)[0], rtol=0.05, atol=0.05)


def test_transforms_are_seen_while_they_are_active():
    seen = []

    def look(x):
        seen.append(active_transform())
        return x.sum()

    look(X)
    torch.func.grad(look)(X)
    torch.func.vmap(look)(X)
    torch.func.jvp(look, (X,), (X,))
    transform = "torch.func transforms torch's operators only"
    assert seen == [None, transform, transform, transform]
    layer = fastlstm.LSTM(I, H, zoneout=0.1)
    left = []
    torch.func.grad(lambda x: left.append(layer._is_left_to_reference()) or x.sum())(X)
    assert (left, layer._is_left_to_reference()) == ([True], False)
    layer.strict = True
    with pytest.raises(KernelError, match=r"with zoneout would run on the reference, .* strict$"):
        torch.func.grad(lambda x: layer._is_left_to_reference() or x.sum())(X)
