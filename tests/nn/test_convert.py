"""`accelerate` and `restore`, `freeze` and `thaw`: what changes, what stays, what is said."""

import copy
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import fastlstm
from fastlstm.errors import UsageError, kind_of_value
from fastlstm.nn import lstm
from fastlstm.nn.dropout import WeightDrop

I, H = 5, 7  # noqa: E741


class Own(nn.LSTM):
    def forward(self, x, hx=None):
        return nn.LSTM.forward(self, -x, hx)


def must_not_run(*args, **kwargs):
    raise AssertionError("the wrong LSTM ran")


def test_accelerate_keeps_the_objects():
    model = nn.Sequential(nn.LSTM(I, H), nn.ModuleList([nn.LSTM(I, H), Own(I, H), nn.GRU(I, H)]))
    seen = []
    model[0].register_forward_hook(lambda module, args, out: seen.append(module))
    layers, parameters = list(model.modules()), list(model.parameters())
    model.eval()
    with pytest.warns(UserWarning, match="accelerate left to torch") as said:
        assert fastlstm.accelerate(model) is model
    assert all(a is b for a, b in zip(layers, model.modules(), strict=True))
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert [type(m) for m in (model[0], *model[1])] == [fastlstm.LSTM, fastlstm.LSTM, Own, nn.GRU]
    assert not model[0].training
    model[0](torch.zeros(3, 2, I))
    assert seen == [layers[1]]
    (message,) = (str(warning.message) for warning in said)
    assert "'1.1' (forward pass of Own: Own.forward does not call super().forward()" in message
    assert "; '1.2' (nn.GRU: the kernels compute LSTMs only)" in message
    fastlstm.accelerate(model[0])
    assert type(model[0]) is fastlstm.LSTM


def test_accelerate_of_a_model_without_lstm():
    with pytest.warns(UserWarning, match="found no nn.LSTM in Linear"):
        fastlstm.accelerate(nn.Linear(2, 2))


def test_accelerate_hands_the_budget_on():
    for budget in (7, 0):
        model = fastlstm.accelerate(nn.Sequential(nn.LSTM(3, 4)), max_activation_bytes=budget)
        assert model[0].max_activation_bytes == budget


def test_accelerate_changes_no_layer_that_is_ours_already():
    class Mine(fastlstm.LSTM):
        pass

    model = nn.Sequential(fastlstm.LSTM(I, H, max_activation_bytes=7), Mine(H, H), nn.LSTM(H, H))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fastlstm.accelerate(model, max_activation_bytes=100)
    assert [type(m) for m in model] == [fastlstm.LSTM, Mine, fastlstm.LSTM]
    assert [m.max_activation_bytes for m in model] == [7, None, 100]


def test_accelerate_names_the_layers_that_torch_computes():
    model = nn.Sequential(nn.LSTM(I, H).double(), nn.LSTM(I, H, proj_size=3), nn.LSTM(I, H))
    with pytest.warns(UserWarning, match="accelerate replaced, but torch computes: '0' ") as said:
        fastlstm.accelerate(model)
    (message,) = (str(warning.message) for warning in said)
    assert "'0' (native: these kernels compute in float32 and bf16" in message
    assert "; '1' (no kernel here projects its output, proj_size=3)" in message
    assert "'2'" not in message


def test_a_single_module_that_is_left_alone_has_a_name():
    with pytest.warns(UserWarning, match=r"left to torch: the model \(nn\.GRU: "):
        fastlstm.accelerate(nn.GRU(I, H))


@pytest.mark.usefixtures("fast_kernels")
def test_restore_keeps_the_objects(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LSTM(I, H, 2, bidirectional=True, dtype=torch.bfloat16)).eval()
    layer = model[0]
    layer.bias_hh_l0.requires_grad_(False)
    seen = []
    layer.register_forward_hook(lambda module, args, out: seen.append(module))
    before = {**layer.__dict__}
    parameters = list(model.named_parameters())
    fastlstm.accelerate(model, max_activation_bytes=1000)
    layer.strict, layer.backend = True, "native"
    with torch.no_grad():
        for _ in range(3):
            layer(torch.randn(1, 1, I, dtype=torch.bfloat16))
    assert fastlstm.restore(model) is model
    assert model[0] is layer
    assert type(layer) is nn.LSTM
    assert layer.__dict__.keys() == before.keys()
    for (name, a), (other, b) in zip(parameters, model.named_parameters(), strict=True):
        assert name == other
        assert a is b
    assert not layer.training
    assert not layer.bias_hh_l0.requires_grad
    assert layer.weight_ih_l0.dtype == torch.bfloat16
    monkeypatch.setattr(lstm.LSTM, "_run_layers", must_not_run)
    layer(torch.randn(3, 2, I, dtype=torch.bfloat16))
    assert seen == [layer] * 4


def test_a_restored_layer_computes_with_the_weights_it_has_now():
    layer, twin = fastlstm.LSTM(I, H), fastlstm.LSTM(I, H)
    x = torch.randn(4, 3, I)
    layer(x)
    others = {n: nn.Parameter(p * 2) for n, p in layer.named_parameters()}
    for each in (layer, twin):  # past nn.LSTM.__setattr__, as torch's own tools do
        each._parameters.update(others)
    torch.testing.assert_close(fastlstm.restore(layer)(x)[0], twin(x)[0])


def test_a_restored_layer_is_scripted_with_the_weights_it_has_now():
    layer = fastlstm.LSTM(I, H)
    layer._parameters["weight_hh_l0"] = nn.Parameter(torch.zeros(4 * H, H))
    x = torch.randn(4, 3, I)
    restored = fastlstm.restore(nn.Sequential(layer))
    torch.testing.assert_close(torch.jit.script(restored)(x)[0], restored(x)[0])


def test_a_restored_layer_keeps_what_was_written_to_the_flat_list():
    layer, x = fastlstm.LSTM(I, H), torch.randn(4, 3, I)
    layer._flat_weights[0] = torch.ones(4 * H, I)
    want = layer(x)[0]
    torch.testing.assert_close(fastlstm.restore(layer)(x)[0], want)


def test_options_set_back_leave_no_attribute():
    layer = fastlstm.LSTM(I, H, zoneout=0.1)
    layer.zoneout = 0.0
    assert fastlstm.restore(layer).__dict__.keys() == nn.LSTM(I, H).__dict__.keys()


def given(**attributes):
    layer = fastlstm.LSTM(I, H)
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


REFUSED = {
    "layer norm": (lambda: fastlstm.LSTM(I, H, layer_norm=True), "no layer_norm=True"),
    "zoneout": (lambda: fastlstm.LSTM(I, H, zoneout=0.1), r"no zoneout=\(0.1, 0.1\)"),
    "activation": (lambda: fastlstm.LSTM(I, H, activation="relu"), "no activation='relu'"),
    "weight hook": (lambda: given(weight_hook=WeightDrop(0.5)), "no weight_hook"),
    "part of a model": (lambda: given(is_drop_in=False), r"its model calls run\(\)"),
    "subclass": (lambda: type("Mine", (fastlstm.LSTM,), {})(I, H), "Mine is a subclass"),
    "parametrized subclass": (
        lambda: parametrizations.weight_norm(
            type("Mine", (fastlstm.LSTM,), {})(I, H), "weight_hh_l0"
        ),
        "Mine is a subclass",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_restore_refuses_by_name_and_changes_nothing(case):
    make, reason = REFUSED[case]
    model = nn.ModuleDict({"first": fastlstm.LSTM(I, H), "second": make()})
    with pytest.raises(UsageError, match=rf"second \(.*{reason}") as caught:
        fastlstm.restore(model)
    assert "first (" not in str(caught.value)
    assert type(model["first"]) is fastlstm.LSTM


def test_restore_leaves_other_modules_alone():
    model = nn.Sequential(nn.LSTM(I, H), nn.GRU(I, H))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fastlstm.restore(model)
    assert [type(m) for m in model] == [nn.LSTM, nn.GRU]


def test_a_restored_model_needs_no_fastlstm(tmp_path):
    layer = fastlstm.restore(fastlstm.LSTM(I, H))
    (tmp_path / "layer.pickle").write_bytes(pickle.dumps(copy.deepcopy(layer)))
    code = (
        "import pickle, sys; sys.modules['fastlstm'] = None;"
        f"print(pickle.load(open({str(tmp_path / 'layer.pickle')!r}, 'rb')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "LSTM(5, 7)\n"


def one_value(layer):
    layer.weight_hh_l0.data.view(-1)[3] += 1


def test_a_frozen_layer_sees_what_torch_counts_only():
    torch.manual_seed(0)
    model = nn.Sequential(fastlstm.LSTM(I, H))
    layer, x, hx = model[0], torch.randn(1, 1, I), (torch.ones(1, 1, H), torch.ones(1, 1, H))

    def now():
        layer_of_torch = fastlstm.restore(copy.deepcopy(layer))
        with torch.no_grad():
            got = [layer(x, hx)[0] for _ in range(3)][-1]
            return torch.allclose(got, layer_of_torch(x, hx)[0], atol=1e-6)

    assert now()
    one_value(layer)
    assert fastlstm.freeze(model) is model
    assert now()
    one_value(layer)
    assert not now()
    layer.load_state_dict({name: p * 2 for name, p in layer.state_dict().items()})
    assert now()
    for fused in (False, True):
        parameter = layer.weight_hh_l0
        parameter.grad = torch.ones_like(parameter)
        torch.optim.Adam([parameter], lr=0.1, fused=fused).step()
        assert now()
    layer.weight_hh_l0 = nn.Parameter(layer.weight_hh_l0.detach() * 2)
    assert now()
    one_value(layer)
    assert now()  # a new parameter is not frozen


@pytest.mark.parametrize("how", ["thaw", "training", "restore", "copy"])
def test_calls_that_thaw(how):
    torch.manual_seed(0)
    layer = fastlstm.freeze(fastlstm.LSTM(I, H))
    x, hx = torch.randn(1, 1, I), (torch.ones(1, 1, H), torch.ones(1, 1, H))
    with torch.no_grad():
        for _ in range(3):
            layer(x, hx)
    if how == "thaw":
        assert fastlstm.thaw(layer) is layer
    elif how == "training":
        layer(x, hx)[0].sum().backward()
    elif how == "restore":
        fastlstm.accelerate(fastlstm.restore(layer))
    else:
        layer = copy.deepcopy(layer)
    with torch.no_grad():
        before = [layer(x, hx)[0] for _ in range(3)][-1]
        one_value(layer)
        after = layer(x, hx)[0]
        assert not torch.equal(before, after)
        torch.testing.assert_close(after, fastlstm.restore(layer)(x, hx)[0])


def test_freezing_changes_nothing_else():
    layer = fastlstm.freeze(fastlstm.LSTM(I, H))
    assert all(p.requires_grad for p in layer.parameters())
    assert vars(layer).keys() == vars(fastlstm.LSTM(I, H)).keys()
    with pytest.raises(UsageError, match=r"no fastlstm\.LSTM in Sequential; call fastlstm\.acc"):
        fastlstm.freeze(nn.Sequential(nn.LSTM(I, H)))
    fastlstm.thaw(nn.Sequential(nn.LSTM(I, H)))


def test_a_printed_model_tells_the_two_apart():
    model = nn.Sequential(nn.LSTM(I, H))
    assert "(0): LSTM(5, 7)" in str(model)
    assert "(0): fastlstm.LSTM(5, 7)" in str(fastlstm.accelerate(model))
    model[0].strict, model[0].max_activation_bytes, model[0].backend = True, 100, "native"
    assert "(5, 7, max_activation_bytes=100, backend='native', strict=True)" in str(model)
    model[0].max_activation_bytes = 0
    assert "(5, 7, max_activation_bytes=0, backend='native', strict=True)" in str(model)
    assert "(0): LSTM(5, 7)" in str(fastlstm.restore(model))


def test_a_subclass_prints_its_own_name():
    assert str(type("Mine", (fastlstm.LSTM,), {})(I, H)) == "Mine(5, 7)"


CONVERSIONS = [fastlstm.accelerate, fastlstm.restore, fastlstm.freeze, fastlstm.thaw]


@pytest.mark.parametrize("convert", CONVERSIONS)
@pytest.mark.parametrize("thing", [None, "model", nn.LSTM])
def test_other_objects_are_refused(convert, thing):
    with pytest.raises(UsageError, match=f"the model is {kind_of_value(thing)}, expected an nn"):
        convert(thing)
