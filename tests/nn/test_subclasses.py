"""Subclasses of `nn.LSTM` after `accelerate`: results, classes, copies, tracers, the way back."""

import contextlib
import copy
import gc
import pickle
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fastlstm
from fastlstm.nn import lstm, subclasses
from fastlstm.nn.subclasses import accelerated
from fastlstm.ops import native_call

T, B, I, H = 6, 3, 5, 7  # noqa: E741


class Lengths(ABC, nn.RNNBase):
    """The form of the layers of a known library: an abstract class above GRU and LSTM."""

    @abstractmethod
    def kept(self, state, is_empty): ...

    def forward(self, x, hx=None, lengths=None):
        if lengths is None:
            return super().forward(x, hx=hx)
        packed = pack_padded_sequence(x, lengths.clamp(min=1), enforce_sorted=False)
        y, state = super().forward(packed, hx=hx)
        return pad_packed_sequence(y)[0], self.kept(state, (lengths == 0)[None, :, None])


class LengthsLSTM(Lengths, nn.LSTM):
    def kept(self, state, is_empty):
        return tuple(t.masked_fill(is_empty, 0) for t in state)


class Scaled(nn.LSTM):
    """Has parameters, a constructor and slots of its own."""

    __slots__ = ("note",)

    def __init__(self, *args, scale=2.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale = nn.Parameter(torch.full((), scale))
        self.note = "given"

    def forward(self, x, hx=None):
        y, state = super().forward(self.scale * x, hx)
        return self.scale * y, state


class Plain(nn.LSTM):
    def twice(self):
        return 2 * self.hidden_size


KINDS = (LengthsLSTM, Scaled, Plain)


def changed(layer, change=fastlstm.accelerate):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return change(layer)


@pytest.fixture
def calls(monkeypatch):
    """Counts the calls of the native kernels."""
    seen = []
    real = native_call.forward
    monkeypatch.setattr(native_call, "forward", lambda *a, **k: seen.append(1) or real(*a, **k))
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients_are_the_same_on_the_kernels(kind, calls):
    torch.manual_seed(0)
    layer = kind(I, H, 2, bidirectional=True)
    twin = changed(copy.deepcopy(layer))
    x, kwargs = torch.randn(T, B, I), {}
    if kind is LengthsLSTM:
        kwargs = {"lengths": torch.tensor([T, 0, 2])}
    for each, count in ((layer, 0), (twin, 2)):  # one call of a layer
        y, (h, c) = each(x, **kwargs)
        (y.sum() + (h * c).sum()).backward()
        assert len(calls) == count
    want, got = (m(x, **kwargs) for m in (layer, twin))
    torch.testing.assert_close(got, want)
    grads = ({n: p.grad for n, p in m.named_parameters()} for m in (layer, twin))
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_class_stays_in_name_and_comes_back(kind):
    layer, other = (changed(kind(I, H)) for _ in range(2))
    assert isinstance(layer, kind)
    assert isinstance(layer, fastlstm.LSTM)
    assert type(layer) is type(other) is not kind
    assert (type(layer).__name__, type(layer).__module__) == (kind.__name__, kind.__module__)
    assert str(layer) == f"{kind.__name__}({I}, {H})"
    layer.strict, layer.backend, layer.max_activation_bytes = True, "native", 100
    layer(torch.randn(T, B, I))
    changed(layer, fastlstm.restore)
    assert type(layer) is kind
    assert layer.__dict__.keys() == kind(I, H).__dict__.keys()
    assert type(changed(layer)) is type(other)


def test_its_own_attributes_and_constructor_work():
    layer = changed(Scaled(I, H))
    assert layer.note == "given"
    built = type(layer)(I, H, scale=3.0)
    assert built.scale.item() == 3.0
    assert changed(Plain(I, H)).twice() == 2 * H


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, *(
    lambda layer, protocol=protocol: pickle.loads(pickle.dumps(layer, protocol))
    for protocol in (0, 2, 5)
)])  # fmt: skip
def test_copies_and_pickles(copied):
    layer, x = changed(LengthsLSTM(I, H)), torch.randn(T, B, I)
    layer.strict = True
    twin = copied(layer)
    assert type(twin) is type(layer)
    assert twin.strict
    torch.testing.assert_close(twin(x)[0], layer(x)[0])
    assert type(fastlstm.restore(twin)) is LengthsLSTM
    assert type(layer) is not LengthsLSTM


def test_state_dicts_fit_both():
    layer, other = changed(Scaled(I, H)), Scaled(I, H)
    assert list(layer.state_dict()) == list(other.state_dict())
    other.load_state_dict(layer.state_dict())
    x = torch.randn(T, B, I)
    torch.testing.assert_close(other(x)[0], layer(x)[0])


def test_strict_refuses_what_torch_computes():
    layer = Scaled(I, H, dtype=torch.float64)
    with pytest.warns(UserWarning, match="replaced, but torch computes"):
        fastlstm.accelerate(layer)
    layer(torch.randn(T, B, I, dtype=torch.float64))
    layer.strict = True
    with pytest.raises(fastlstm.KernelError, match="would run on torch's own"):
        layer(torch.randn(T, B, I, dtype=torch.float64))


def test_explain_says_what_runs_and_what_would():
    layer = Scaled(I, H)
    (before,) = fastlstm.explain(layer)
    (after,) = fastlstm.explain(changed(layer))
    assert (before.backend, after.backend) == ("torch", "native")
    assert before.why.startswith("accelerate makes it native, ")


def test_a_frozen_layer_trusts_the_count():
    layer = fastlstm.freeze(changed(Plain(I, H)))
    x = torch.randn(1, 1, I)
    with torch.no_grad():
        first = layer(x)[0]
        layer.weight_ih_l0.data.view(-1)[0] += 1
        torch.testing.assert_close(layer(x)[0], first, rtol=0, atol=0)
        assert not torch.equal(fastlstm.thaw(layer)(x)[0], first)


def test_a_class_that_no_layer_has_is_forgotten():
    class Local(nn.LSTM):
        pass

    made = weakref.ref(accelerated(Local))
    gc.collect()
    assert made() is None


def test_threads_make_one_class(monkeypatch):
    both = threading.Barrier(2)

    class Slow(weakref.WeakValueDictionary):
        def setdefault(self, key, default):
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.2)
            self[key] = default
            return default

    monkeypatch.setattr(subclasses, "_ACCELERATED", Slow())
    with ThreadPoolExecutor(2) as pool:
        layers = list(pool.map(changed, (Plain(I, H), Plain(I, H))))
    assert all(type(changed(layer, fastlstm.restore)) is Plain for layer in layers)


class Own(fastlstm.LSTM):
    def forward(self, x, hx=None):
        return super().forward(-x, hx)


class Torchs(nn.LSTM):
    def forward(self, x, hx=None):
        return super().forward(-x, hx)


def can_compile(layer):
    """Whether torch compiles its own layer without `allow_rnn`; 2.15 does not compile `Torchs`."""
    torch._dynamo.reset()
    try:
        torch.compile(layer, backend="eager")(torch.randn(T, B, I))
    except torch._dynamo.exc.InternalTorchDynamoError:
        return False
    return True


@pytest.mark.parametrize(
    ("make", "torchs"), [(lambda: changed(Scaled(I, H)), Scaled), (lambda: Own(I, H), Torchs)]
)
@pytest.mark.parametrize("allow_rnn", [True, False])
def test_a_compiled_subclass_runs_its_forward_pass_once(make, torchs, allow_rnn):
    import torch._dynamo

    if not allow_rnn and not can_compile(torchs(I, H)):
        pytest.skip("this torch cannot compile such a subclass of nn.LSTM without allow_rnn")
    layer, x = make(), torch.randn(T, B, I)
    torch._dynamo.reset()
    with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=allow_rnn):
        got = torch.compile(layer, backend="eager", fullgraph=allow_rnn)(x)[0]
    torch.testing.assert_close(got, layer(x)[0])
    torch._dynamo.reset()


@pytest.mark.parametrize("make", [lambda: changed(Scaled(I, H)), lambda: Own(I, H)])
def test_a_call_outside_of_a_trace_runs_the_forward_pass_once(make, monkeypatch):
    layer, x = make(), torch.randn(T, B, I)
    want = layer(x)[0]
    answers = iter([True, False])
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: next(answers, False))
    torch.testing.assert_close(layer(x)[0], want)


def test_fx_refuses_a_subclass_with_a_forward_pass_as_torch_does():
    for kind in (Scaled, lambda *sizes: changed(Scaled(*sizes))):
        with pytest.raises(torch.fx.proxy.TraceError, match="control flow"):
            torch.fx.symbolic_trace(nn.Sequential(kind(I, H)))
    model, x = nn.Sequential(changed(Plain(I, H))), torch.randn(T, B, I)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x)[0], model(x)[0])


def normed(kind):
    return parametrizations.weight_norm(kind(I, H), "weight_hh_l0")


@pytest.mark.parametrize("kind", [nn.LSTM, Scaled])
def test_a_parametrized_layer_runs_on_the_kernels_and_comes_back(kind, calls):
    torch.manual_seed(0)
    layer, x = normed(kind), torch.randn(T, B, I)
    twin = copy.deepcopy(layer)
    assert type(twin) is type(layer)  # torch shares the class that it makes
    changed(twin)
    assert type(twin).__bases__ == (accelerated(kind),)
    for each, count in ((layer, 0), (twin, 1)):
        each(x)[0].sum().backward()
        assert len(calls) == count
    torch.testing.assert_close(
        twin.parametrizations.weight_hh_l0.original1.grad,
        layer.parametrizations.weight_hh_l0.original1.grad,
    )
    torch.testing.assert_close(changed(copy.deepcopy(twin), fastlstm.restore)(x)[0], layer(x)[0])
    with pytest.raises(RuntimeError, match="only supported through state_dict"):
        pickle.dumps(twin)
    changed(twin, fastlstm.restore)
    copy.deepcopy(twin)
    assert type(twin).__bases__ == (kind,)
    assert type(twin).__name__ == f"Parametrized{kind.__name__}"
    assert type(parametrize.remove_parametrizations(twin, "weight_hh_l0")) is kind


@pytest.mark.parametrize("kind", [nn.LSTM, Scaled])
def test_parametrizations_are_added_and_removed_after_accelerate(kind):
    layer, x = changed(normed(kind)), torch.randn(T, B, I)
    neighbour = normed(kind)
    parametrizations.orthogonal(layer, "weight_ih_l0")
    want = layer(x)[0]
    for name in ("weight_ih_l0", "weight_hh_l0"):
        parametrize.remove_parametrizations(layer, name)
    assert type(layer) is accelerated(kind)
    torch.testing.assert_close(layer(x)[0], want)
    neighbour(x)
    assert type(fastlstm.restore(layer)) is kind


def test_a_layer_parametrized_by_ours_is_restored_too():
    layer, x = normed(fastlstm.LSTM), torch.randn(T, B, I)
    want = layer(x)[0]
    torch.testing.assert_close(fastlstm.restore(layer)(x)[0], want)
    assert type(layer).__bases__ == (nn.LSTM,)
    assert not isinstance(layer, lstm.LSTM)
