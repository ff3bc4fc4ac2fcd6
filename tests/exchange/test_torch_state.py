import pytest
import safetensors.torch
import torch
from torch import nn

import fastlstm
from fastlstm.errors import FormatError


class TextModel(nn.Module):
    def __init__(self, V=17, E=8, H=12, num_layers=2, both=False, names=("embed", "rnn", "fc")):
        super().__init__()
        torch.manual_seed(0)
        ways = 2 if both else 1
        self.names = names
        self.add_module(names[0], nn.Embedding(V, E))
        self.add_module(names[1], nn.LSTM(E, H, num_layers, bidirectional=both, batch_first=True))
        self.add_module(names[2], nn.Linear(ways * H, V))

    def forward(self, x):
        embed, rnn, fc = (getattr(self, name) for name in self.names)
        return fc(rnn(embed(x))[0])


TOKENS = torch.arange(33).view(3, 11) % 17


@pytest.mark.parametrize("both", [False, True])
def test_safetensors_and_pt_compute_the_same(both, tmp_path):
    model = TextModel(both=both)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "m.safetensors")
    torch.save({"epoch": 3, "model_state_dict": model.state_dict()}, tmp_path / "m.pt")
    for name in ("m.safetensors", "m.pt"):
        module = fastlstm.import_module(tmp_path / name)
        assert torch.allclose(module(TOKENS), model(TOKENS), atol=1e-5)
        assert "state_dict" in module.notes[0]


def saved(state, tmp_path):
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file(state, path)
    return path


def test_two_matrices_of_one_shape_are_told_apart_by_bias_or_name(tmp_path):
    model = TextModel(E=12)
    path = saved(model.state_dict(), tmp_path)
    assert torch.allclose(fastlstm.import_module(path)(TOKENS), model(TOKENS), atol=1e-5)
    state = {n: t for n, t in model.state_dict().items() if n != "fc.bias"}
    model.fc.bias.data.zero_()
    path = saved(state, tmp_path)  # "embed" names it
    assert torch.allclose(fastlstm.import_module(path)(TOKENS), model(TOKENS), atol=1e-5)
    path = saved({n.replace("embed", "first"): t for n, t in state.items()}, tmp_path)
    with pytest.raises(FormatError, match=r"'fc.weight' and 'first.weight' fit in several orders"):
        fastlstm.import_module(path)


def test_numbered_modules_are_taken_in_their_order(tmp_path):
    torch.manual_seed(0)
    lstms = nn.ModuleList(nn.LSTM(6, 6) for _ in range(11))
    module = fastlstm.import_module(saved(lstms.state_dict(), tmp_path))
    x = torch.randn(2, 5, 6)
    y = x.transpose(0, 1)
    for lstm in lstms:
        y, _ = lstm(y)
    assert torch.allclose(module(x), y.transpose(0, 1), atol=1e-5)


INF = torch.full((48,), torch.inf)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: {"other.weight": torch.zeros(3, 4), **s}, "'other.weight' .* belongs to no"),
        (lambda s: {n: t for n, t in s.items() if "hh_l1" not in n}, "lacks weight_ih or"),
        (lambda s: {**s, "rnn.weight_hr_l0": torch.zeros(2, 2)}, "projection"),
        (lambda s: {**s, "fc2.weight": torch.zeros(5, 12)}, "both fit as the output layer"),
        (lambda s: {**s, "rnn.bias_ih_l1": torch.zeros(5)}, r"bias_ih_l1' has the shape \(5,\)"),
        (lambda s: {**s, "rnn.bias_ih_l1": torch.full((48,), torch.nan)}, "NaN or Inf"),
        (lambda s: {**s, "rnn.bias_ih_l1": INF, "rnn.bias_hh_l1": -INF}, "NaN or Inf"),
        (lambda s: {"a.weight": torch.zeros(3, 4)}, "no state_dict with an LSTM"),
    ],
)  # fmt: skip
def test_ambiguous_and_incomplete_states_are_named(change, said, tmp_path):
    state = change(TextModel().state_dict())
    with pytest.raises(FormatError, match=said) as error:
        fastlstm.import_module(saved(state, tmp_path))
    assert "\n" not in str(error.value)


def test_lstms_that_fit_in_two_orders_are_named(tmp_path):
    pair = nn.ModuleDict({"one": nn.LSTM(6, 6), "two": nn.LSTM(6, 6)})
    with pytest.raises(FormatError, match="'one', 'two' fit in several orders"):
        fastlstm.import_module(saved(pair.state_dict(), tmp_path))


@pytest.mark.usefixtures("converts_here")
def test_tied_weights_are_counted_once(tmp_path):
    model = TextModel(V=500, E=12)
    model.fc.weight = model.embed.weight
    torch.save(model.state_dict(), tmp_path / "m.pt")
    module = fastlstm.import_module(tmp_path / "m.pt")
    assert torch.allclose(module(TOKENS), model(TOKENS), atol=1e-5)
