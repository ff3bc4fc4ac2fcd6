"""`LSTM.run`: one layer in one direction, as models are made of it; and `weight_hook`."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import fastlstm
from fastlstm.errors import KernelError, ShapeError, UsageError
from fastlstm.nn.dropout import WeightDrop
from native_run import ALL_OPTIONS

T, B, I, H, V = 6, 3, 5, 7, 11  # noqa: E741
OPTIONS = {"torch's cell": {}, "layer norm": {"layer_norm": True}, "all": ALL_OPTIONS}


def inputs():
    return torch.randn(T, B, I), torch.randn(B, H), torch.randn(B, H)


@pytest.mark.isa
@pytest.mark.parametrize("lengths", [None, [6, 2, 4]], ids=["whole", "lengths"])
@pytest.mark.parametrize("options", OPTIONS)
def test_run_equals_a_call_of_the_layer(options, lengths):
    layer, (x, h, c) = fastlstm.LSTM(I, H, **OPTIONS[options]), inputs()
    torch.manual_seed(3)
    want, (h_want, c_want) = layer(x, (h[None], c[None]), lengths=lengths)
    torch.manual_seed(3)
    got = layer.run(x, h, c, lengths=lengths)
    for one, two in zip(got, (want, h_want[0], c_want[0]), strict=True):
        assert torch.equal(one, two)


@pytest.mark.isa
@pytest.mark.parametrize("num_steps", [1, 6], ids=["few tokens", "many tokens"])
@pytest.mark.parametrize("options", OPTIONS)
def test_tokens_are_rows_of_the_embedding(options, num_steps):
    layer = fastlstm.LSTM(I, H, **OPTIONS[options])
    _, h, c = inputs()
    embedding = torch.randn(V, I, requires_grad=True)
    tokens = torch.randint(V, (num_steps, B))
    found = []
    for given in ((tokens, embedding), (embedding[tokens], None)):
        torch.manual_seed(3)
        out = layer.run(given[0], h, c, embedding=given[1])
        grads = torch.autograd.grad(out.y.square().sum(), [embedding, *layer.parameters()])
        found.append([*out, *grads])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_the_state_keeps_its_dtype():
    layer, (x, h, c) = fastlstm.LSTM(I, H, zoneout=0.1), inputs()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer.run(x, h, c)
    assert [t.dtype for t in out] == [torch.bfloat16, torch.float32, torch.float32]


@pytest.mark.parametrize("options", ["torch's cell", "layer norm"])
def test_arguments_that_do_not_fit_are_named(options):
    layer, (x, h, c) = fastlstm.LSTM(I, H, **OPTIONS[options]), inputs()
    with pytest.raises(ShapeError, match=r"h0 has shape \(3, 6\)"):
        layer.run(x, h[:, 1:], c)
    with pytest.raises(ShapeError, match="tokens run from 0 to 11"):
        layer.run(torch.arange(12)[:, None], h[:1], c[:1], embedding=torch.randn(V, I))
    with pytest.raises(UsageError, match=r"one layer in one direction, this is fastlstm\.LSTM"):
        fastlstm.LSTM(I, H, 2).run(x, h, c)


def test_a_slow_path_is_refused_by_strict_and_named():
    layer = fastlstm.LSTM(I, H, zoneout=0.1).double()
    x, h, c = (t.double() for t in inputs())
    layer.run(x, h, c)
    layer.strict = True
    with pytest.raises(KernelError, match="with zoneout would run on a slow path"):
        layer.run(x, h, c)
    plain = fastlstm.LSTM(I, H).double()
    assert plain.run(x, h, c, lengths=[1, 2, 3]).y.dtype == torch.float64
    plain.strict = True
    with pytest.raises(KernelError, match="with lengths would run on a slow path"):
        plain.run(x, h, c, lengths=[1, 2, 3])


@pytest.mark.parametrize(
    "fields", [{}, {"dtype": torch.float64}, {"zoneout": 0.1}], ids=["ours", "torch's", "options"]
)
def test_a_hook_sees_every_weight_wherever_it_runs(fields):
    layer = fastlstm.LSTM(I, H, 2, **fields)
    twin, seen = copy.deepcopy(layer), []

    def halved(name, tensor):
        seen.append(name)
        return tensor / 2

    layer.weight_hook = halved
    with torch.no_grad():
        for name, p in twin.named_parameters():
            p.copy_(p / 2 if name in layer._flat_weights_names else p)
    x = torch.randn(T, B, I, dtype=layer.weight_ih_l0.dtype)
    layer.train(False)
    assert torch.equal(layer(x)[0], twin.train(False)(x)[0])
    assert seen == layer._flat_weights_names
    layer.weight_hook = None
    assert not torch.equal(layer(x)[0], twin(x)[0])


def test_a_hook_on_torchs_own_path_leaves_the_layer_alone():
    """In float64 torch runs the layer: twice the weights, once per call, whoever else calls."""
    layer, x = fastlstm.LSTM(3, 4).double(), torch.randn(5, 2, 3, dtype=torch.float64)
    plain = torch.nn.LSTM(3, 4).double()
    plain.load_state_dict({name: 2 * tensor for name, tensor in layer.state_dict().items()})
    calls: list[str] = []

    def twice(name, weight):
        calls.append(name)
        return 2 * weight

    before = list(layer._flat_weights)
    layer.weight_hook = twice
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda _: layer(x)[0], range(20)))
    for y in outputs:
        torch.testing.assert_close(y, plain(x)[0], rtol=0, atol=0)
    assert len(calls) == 20 * 4
    calls.clear()
    layer(x, lengths=[5, 3])
    assert len(calls) == 4
    assert all(a is b for a, b in zip(before, layer._flat_weights, strict=True))


def test_a_hook_stays_with_other_parameters():
    layer, x = fastlstm.LSTM(3, 4).double(), torch.randn(5, 2, 3, dtype=torch.float64)
    layer.weight_hook = lambda _, weight: weight
    others = {name: 2 * tensor.detach() for name, tensor in layer.named_parameters()}

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x)[0] - self.layer(x)[0]

    given = {f"layer.{name}": tensor for name, tensor in others.items()}
    assert not torch.func.functional_call(Twice(), given, (x,)).any()


def test_a_hook_may_follow_a_module_and_go():
    layer = fastlstm.LSTM(3, 4)
    layer.weight_hook = WeightDrop(0.5)
    layer.weight_hook = None
    layer.weight_hook = lambda _, weight: weight
    layer.weight_hook = WeightDrop(0.5)
    assert dict(layer.named_children()).keys() == {"weight_hook"}
    layer.weight_hook = None
    assert layer.weight_hook is None


def test_arguments_are_checked_before_anything_is_drawn():
    layer = fastlstm.LSTM(3, 4, recurrent_dropout=0.5)
    state, generator = torch.zeros(2, 4), torch.get_rng_state()
    with pytest.raises(ShapeError, match="x has shape"):
        layer.run(torch.zeros(3), state, state, lengths=[1])
    assert torch.equal(generator, torch.get_rng_state())


def test_an_empty_batch_gives_every_parameter_a_gradient():
    layer = fastlstm.LSTM(3, 4, layer_norm=True)
    y, _, _ = layer.run(torch.zeros(0, 2, 3), torch.zeros(2, 4), torch.zeros(2, 4))
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
