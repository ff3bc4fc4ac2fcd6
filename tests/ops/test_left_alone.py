"""Which recurrent modules run on no kernel here, and what is said of them."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from fastlstm.ops.left_alone import left_alone, recurrent_modules


class Own(nn.LSTM):
    pass


class OwnGRU(nn.GRU):
    pass


def parametrized():
    return parametrizations.weight_norm(nn.LSTM(3, 4), "weight_hh_l0")


LEFT = {
    "subclass": (lambda: Own(3, 4), "forward pass of Own", "is a subclass of nn.LSTM"),
    "parametrized": (parametrized, "nn.LSTM, parametrized", "weight_hh_l0 is parametrized"),
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


def test_a_parametrized_subclass_is_a_subclass():
    class Mine(Own):
        pass

    for kind in (Own, Mine):
        layer = parametrizations.weight_norm(kind(3, 4), "weight_hh_l0")
        assert "is a subclass of nn.LSTM" in left_alone(layer).why
