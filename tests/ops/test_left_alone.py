"""Which recurrent modules run on no kernel here, and what is said of them."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from fastlstm.ops.left_alone import left_alone, recurrent_modules


class Own(nn.LSTM):
    def forward(self, x):
        return nn.LSTM.forward(self, x)


class OwnGRU(nn.GRU):
    pass


def clashing():
    layer = nn.LSTM(3, 4)
    layer.norms = []
    return layer


LEFT = {
    "subclass": (lambda: Own(3, 4), "forward pass of Own", "does not call super().forward()"),
    "clash": (clashing, "nn.LSTM", "its own norms would clash"),
    "gru": (lambda: nn.GRU(3, 4), "nn.GRU", "LSTMs only"),
    "gru subclass": (lambda: OwnGRU(3, 4), "OwnGRU", "LSTMs only"),
    "rnn": (lambda: nn.RNN(3, 4), "nn.RNN", "LSTMs only"),
    "gru cell": (lambda: nn.GRUCell(3, 4), "nn.GRUCell", "LSTMs only"),
    "cell": (lambda: nn.LSTMCell(3, 4), "nn.LSTMCell", "one step per call"),
}


@pytest.mark.parametrize("case", LEFT)
def test_modules_left_alone_with_reasons(case):
    make, runs, why = LEFT[case]
    found = left_alone(make())
    assert found.runs == runs
    assert why in found.why


@pytest.mark.filterwarnings("ignore")
def test_quantized_and_scripted_layers_are_named_once():
    quantize = torch.ao.quantization.quantize_dynamic
    model = nn.ModuleDict({"quantized": quantize(nn.Sequential(nn.LSTM(3, 4)), {nn.LSTM})})
    model["scripted"] = torch.jit.script(nn.LSTM(3, 4))
    model["quantizable"] = torch.ao.nn.quantizable.LSTM(3, 4)
    model["plain"] = nn.LSTM(3, 4)
    found = {path: left for path, _, left in recurrent_modules(model)}
    assert list(found) == ["quantized.0", "scripted", "quantizable", "plain"]
    assert "quantized weights" in found["quantized.0"].why
    assert found["scripted"].runs == "TorchScript LSTM"
    assert found["plain"] is None


@pytest.mark.filterwarnings("ignore")
def test_nested_and_neighbouring_modules_are_found():
    own = Own(3, 4)
    own.inner = nn.LSTM(3, 4)
    model = nn.ModuleDict({"gru": nn.GRU(3, 4), "gru2": nn.LSTM(3, 4), "own": own})
    assert [path for path, _, _ in recurrent_modules(model)] == ["gru", "gru2", "own", "own.inner"]
    quantizable = torch.ao.nn.quantizable.LSTM(3, 4)
    assert [path for path, _, _ in recurrent_modules(quantizable)] == [""]


@pytest.mark.filterwarnings("ignore")
def test_scripted_and_quantized_modules_of_other_kinds_are_not_named():
    linear = torch.ao.nn.quantized.dynamic.Linear(3, 4)
    assert left_alone(linear) is None
    assert left_alone(torch.jit.script(nn.Linear(3, 4))) is None


def test_a_parametrized_layer_is_judged_by_its_own_class():
    for kind, is_left in ((nn.LSTM, False), (Own, True), (type("Mine", (Own,), {}), True)):
        layer = parametrizations.weight_norm(kind(3, 4), "weight_hh_l0")
        assert (left_alone(layer) is not None) == is_left
