"""Small calls prepared once: the same results and gradients whatever changes in between."""

import copy
import pickle
from contextlib import suppress

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

import fastlstm
from fastlstm.errors import KernelError, ShapeError
from fastlstm.nn.prepared import PreparedCall
from fastlstm.ops import packed_weights
from fastlstm.ops.call import LSTMWeights
from fastlstm.system import hardware

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


def agree(pair, x, hx=None, **limits):
    (want, want_state), (got, got_state) = (layer(x, hx) for layer in pair)
    for a, b in zip((got, *got_state), (want, *want_state), strict=True):
        torch.testing.assert_close(a, b, **limits)


@pytest.fixture
def calls(monkeypatch):
    """How often a prepared call was tried, and how often it answered."""
    found = []
    call = PreparedCall.call

    def counted(self, *args):
        out = call(self, *args)
        found.append(out is not None)
        return out

    monkeypatch.setattr(PreparedCall, "call", counted)
    return found


def prepare(pair, x, hx=None):
    agree(pair, x, hx)
    agree(pair, x, hx)
    assert pair[1]._prepared is not None


def test_steps_are_prepared_from_the_third_on(pair, calls):
    hx = state()
    for _ in range(5):
        agree(pair, torch.randn(1, B, I), hx)
    agree(pair, torch.randn(1, B, I))
    assert calls == [True] * 4


def test_alternating_shapes_prepare_nothing(pair, calls):
    for n in (1, 2, 1, 2):
        agree(pair, torch.randn(n, B, I))
    assert pair[1]._prepared is None
    assert calls == []


def test_the_memory_of_a_packed_weight_is_not_reused(pair):
    _, own = pair
    twin = fastlstm.LSTM(I, H)
    twin.weight_hh_l0 = own.weight_hh_l0
    prepare(pair, torch.randn(1, B, I))
    agree(pair, torch.randn(1, B, I))
    memory = StorageWeakRef(own.weight_hh_l0.untyped_storage())
    own.weight_hh_l0.data = torch.randn(4 * H, H)
    twin(torch.randn(70, B, I))  # packs the new values: those packed first are let go
    assert not memory.expired()


@pytest.mark.parametrize("default", ["bfloat16", "float64", "meta"])
def test_defaults_of_torch_change_nothing(pair, default):
    x, hx = torch.randn(1, B, I), state()
    want = pair[0](x, hx)
    try:
        if default == "meta":
            torch.set_default_device(default)
        else:
            torch.set_default_dtype(getattr(torch, default))
        for _ in range(3):
            y, (h, c) = pair[1](x, hx)
            assert y.dtype == h.dtype == c.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    for a, b in zip((y, h, c), (want[0], *want[1]), strict=True):
        torch.testing.assert_close(a, b)


def test_fake_tensors_hold_no_memory():
    with FakeTensorMode(), torch.no_grad():
        layer = fastlstm.LSTM(I, H)
        for _ in range(3):
            assert layer(torch.randn(1, B, I))[0].shape == (1, B, H)
        assert layer._prepared is None


def test_the_order_of_axes_may_change(pair):
    x = torch.randn(2, 1, I)
    prepare(pair, x)
    for layer in pair:
        layer.batch_first = True
    agree(pair, x)


def test_forward_derivatives_are_not_dropped(pair):
    x = torch.randn(1, B, I)
    prepare(pair, x)
    with fwAD.dual_level():
        dual = fwAD.make_dual(x, torch.ones_like(x))
        if not hardware.has_onednn():  # torch's own cells have a rule
            assert fwAD.unpack_dual(pair[1](dual)[0]).tangent is not None
            return
        with pytest.raises(NotImplementedError, match="forward AD with"):
            pair[1](dual)


def gradients(layer, x, hx):
    """Gradients of a layer's parameters, its input and its state, by way of all that it returns."""
    leaves = [x, *hx, *layer.parameters()]
    for t in leaves:
        t.grad = None
        t.requires_grad_()
    with torch.enable_grad():
        y, (h, c) = layer(x, hx)
        (y.square().sum() + 2 * h.sum() + c.square().sum()).backward()
    return [t.grad.clone() for t in leaves]


@pytest.mark.parametrize(("batch_first", "batch"), [(False, B), (True, B), (True, 1)])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_of_a_prepared_call_are_torchs(calls, batch_first, batch, bias):
    torch.manual_seed(0)
    peer, own = (
        kind(I, H, bias=bias, batch_first=batch_first) for kind in (nn.LSTM, fastlstm.LSTM)
    )
    own.load_state_dict(peer.state_dict())
    for _ in range(4):
        x, hx = torch.randn((batch, 2, I) if batch_first else (2, batch, I)), state(batch)
        for got, want in zip(gradients(own, x, hx), gradients(peer, x, hx), strict=True):
            torch.testing.assert_close(got, want)
        with torch.no_grad():  # an optimizer
            for p, q in zip(own.parameters(), peer.parameters(), strict=True):
                q.copy_(p.mul_(0.9))
    assert calls == [True, True]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_training_and_generation_share_a_prepared_call(pair, calls):
    x = torch.randn(1, B, I)
    prepare(pair, x)
    for _ in range(3):
        gradients(pair[1], x, state())
        agree(pair, x)
        for layer in pair:
            layer.weight_hh_l0.mul_(0.5)
    assert pair[1]._prepared is not None
    assert calls[0]


def test_weights_of_another_shape_end_a_prepared_call(pair):
    _, own = pair
    x = torch.randn(1, B, I)
    prepare(pair, x)
    own.weight_ih_l0.data = torch.randn(4 * H, I - 1)
    with torch.enable_grad(), pytest.raises(ShapeError, match="weight_ih_l0"):
        own(x)
    prepared = PreparedCall(own, [LSTMWeights(*own._flat_weights)], torch.randn(1, B, I))
    own.weight_ih_l0.data = torch.randn(4 * H, I - 2)
    assert prepared.call(own, x, None) is None


def test_training_after_inference_mode(pair):
    """Autograd saves no tensor of inference mode."""
    x = torch.randn(1, B, I)
    with torch.inference_mode():
        for _ in range(3):
            pair[1](x)
    with torch.enable_grad():
        pair[1](x)[0].sum().backward()
    assert pair[1].weight_ih_l0.grad is not None


def test_training_lets_packed_weights_go(pair):
    prepare(pair, torch.randn(1, B, I))
    agree(pair, torch.randn(1, B, I))
    memory = StorageWeakRef(pair[1].weight_hh_l0.untyped_storage())
    pair[1].weight_hh_l0.data = torch.randn(4 * H, H)
    for _ in range(2):
        gradients(pair[1], torch.randn(1, B, I), state())
    assert memory.expired()


class Subclass(torch.Tensor):
    """A tensor of another class."""


def test_weights_of_another_class_end_a_prepared_call(pair, calls):
    prepare(pair, torch.randn(1, B, I))
    pair[1]._flat_weights[0] = pair[1].weight_ih_l0.data.as_subclass(Subclass)
    pair[1]._parameters["weight_ih_l0"] = pair[1]._flat_weights[0]
    prepared = pair[1]._prepared
    assert prepared.call(pair[1], torch.randn(1, B, I), None) is None


@pytest.mark.parametrize(("name", "value"), [("bias", False), ("batch_first", True)])
def test_attributes_set_later_are_read(name, value, calls):
    torch.manual_seed(0)
    own, x = fastlstm.LSTM(I, H), torch.randn(1, 1, I)
    fresh = copy.deepcopy(own)
    with torch.no_grad():
        for _ in range(3):
            own(x)
        assert calls == [True]
        for layer in (own, fresh):
            setattr(layer, name, value)
        assert torch.equal(own(x)[0], fresh(x)[0])


def test_a_size_set_later_is_checked(pair):
    x = torch.randn(1, B, I)
    prepare(pair, x)
    pair[1].hidden_size = H + 1
    with pytest.raises(ShapeError, match="weight_ih_l0 has shape"):
        pair[1](x)


class Halved(fastlstm.LSTM):
    def flat_weights(self):
        return [w / 2 for w in super().flat_weights()]


def test_a_subclass_keeps_its_own_steps():
    own, x = Halved(I, H), torch.randn(1, B, I)
    first = own(x)[0]
    for _ in range(3):
        assert torch.equal(own(x)[0], first)


@pytest.mark.parametrize("calls_before", [0, 2])
def test_a_state_can_be_detached_in_place(calls_before):
    own, x = fastlstm.LSTM(I, H), torch.randn(1, B, I)
    for _ in range(calls_before + 1):
        _, hx = own(x)
    for t in hx:
        t.detach_()
    own(x, hx)[0].sum().backward()


def test_autocast_rounds_no_cell_in_float32(pair, calls):
    x = torch.randn(1, B, I)
    hx = torch.randn(1, B, H).bfloat16(), 5 * torch.randn(1, B, H)
    found = [under_autocast(pair[1], x, hx) for _ in range(4)]
    assert calls == [True, True]
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


def test_a_limit_of_activations_ends_a_prepared_call_of_training(pair, calls):
    x = torch.randn(200, B, I)
    prepare(pair, x)
    pair[1].max_activation_bytes = 1
    with torch.enable_grad():
        y = pair[1](x)[0]
    assert "Checkpointed" in type(y.grad_fn).__name__
    assert calls == []
    assert pair[1]._prepared is None


def test_shapes_layouts_and_dtypes_that_change(pair):
    others = (
        (torch.randn(2, B, I), state()),
        (torch.randn(1, B, 2 * I)[..., ::2], state()),
        (torch.randn(1, B, I), tuple(t.transpose(1, 2).contiguous().mT for t in state())),
        (torch.randn(I).expand(1, B, I), state()),
        (torch.randn(1, 1, I), state(1)),
        (torch.randn(4, I), None),
    )
    for x, hx in others:
        prepare(pair, torch.randn(1, B, I), state())
        agree(pair, x, hx)
    for layer in pair:
        layer.double()
    agree(pair, torch.randn(1, B, I).double())


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("is_bf16", [False, True])
def test_batch_first(steps, batch, is_bf16, calls):
    torch.manual_seed(0)
    peer, own = nn.LSTM(I, H, batch_first=True), fastlstm.LSTM(I, H, batch_first=True)
    own.load_state_dict(peer.state_dict())
    limits = {"rtol": 0, "atol": 0.03} if is_bf16 else {}  # a unit of bf16 near 4
    dtype = torch.bfloat16 if is_bf16 else torch.float32

    def expected(x, hx):  # torch has no LSTM in bf16 on a CPU without AVX-512
        with torch.autocast("cpu", enabled=False):
            y, last = peer(x, hx)
        return y.to(dtype), tuple(t.to(dtype) for t in last)

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
        for _ in range(4):
            agree((expected, own), torch.randn(batch, steps, I), state(batch), **limits)
    assert calls == [True, True]


def test_wrong_arguments_are_still_refused(pair):
    _, own = pair
    prepare(pair, torch.randn(1, B, I), state())
    with pytest.raises(RuntimeError):
        own(torch.randn(1, B, I + 1), state())
    with pytest.raises(RuntimeError):
        own(torch.randn(1, B, I), state(B + 1))
    for batches in ((B, B + 1), (B + 1, B)):
        prepare(pair, torch.randn(1, B, I), state())
        with pytest.raises(RuntimeError):
            own(torch.randn(1, B, I), tuple(torch.randn(1, n, H) for n in batches))
    own.backend = "nosuch"
    with pytest.raises(KernelError):
        own(torch.randn(1, B, I), state())


def test_copies_and_pickles_start_anew(pair):
    peer, own = pair
    x = torch.randn(1, B, I)
    prepare(pair, x)
    for other in (copy.deepcopy(own), copy.copy(own), pickle.loads(pickle.dumps(own))):
        agree((peer, other), x)
        agree((peer, other), x)
    prepare(pair, x)
    own.weight_hh_l0.add_(1)
    twin = copy.deepcopy(own)
    peer.load_state_dict(own.state_dict())
    agree((peer, twin), x)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_trace_holds_no_constant(pair):
    _, own = pair
    x = torch.randn(1, B, I)
    prepare(pair, x)
    traced = torch.jit.trace(own, x)
    other = torch.randn(1, B, I)
    torch.testing.assert_close(traced(other)[0], own(other)[0])


def test_outputs_are_fresh_every_time(pair):
    _, own = pair
    x = torch.randn(1, B, I)
    prepare(pair, x)
    first, (h, _) = own(x)
    kept = first.clone(), h.clone()
    own(torch.randn(1, B, I))
    assert torch.equal(first, kept[0])
    assert torch.equal(h, kept[1])


def under_autocast(layer, x, hx=None, dtype=torch.bfloat16):
    with torch.autocast("cpu", dtype):
        y, (h, c) = layer(x, hx)
    return y, h, c


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
def test_bfloat16_steps_are_prepared_and_the_same(pair, calls, given):
    own, x = pair[1], torch.randn(1, B, I, dtype=given)
    found = [under_autocast(own, x, state) for state in [None] * 4]
    assert calls == [True, True]
    for again in found[1:]:
        assert all(map(torch.equal, again, found[0]))
        assert [t.dtype for t in again] == [torch.bfloat16] * 3
    hx = tuple(found[0][1:])
    ready = under_autocast(own, x, hx)
    assert calls == [True] * 3
    own._prepared = None
    assert all(map(torch.equal, ready, under_autocast(own, x, hx)))


def test_autocast_that_comes_and_goes_changes_the_dtype(pair, calls):
    own, x = pair[1], torch.randn(1, B, I)
    prepare(pair, x)
    assert under_autocast(own, x)[0].dtype == torch.bfloat16
    assert own._prepared.dtype == torch.bfloat16
    if has_float16 := torch_computes_float16(x):
        assert under_autocast(own, x, dtype=torch.float16)[0].dtype == torch.float16
        assert under_autocast(own, x)[0].dtype == torch.bfloat16
    assert own(x)[0].dtype == torch.float32
    assert calls == [False] * (3 if has_float16 else 2)


def torch_computes_float16(x):
    """oneDNN has a float16 LSTM for CPUs with AVX512-FP16 alone, and torch's has nothing else."""
    try:
        under_autocast(nn.LSTM(I, H), x, dtype=torch.float16)
    except RuntimeError:
        return False
    return True


def test_float16_calls_are_never_prepared(pair, calls):
    if not torch_computes_float16(torch.randn(1, B, I)):
        pytest.skip("torch has no float16 LSTM on this CPU, and we leave float16 to it")
    for _ in range(3):
        under_autocast(pair[1], torch.randn(1, B, I), dtype=torch.float16)
    assert pair[1]._prepared is None
    assert calls == []


def test_a_call_prepared_in_bfloat16_answers_none_in_float16(pair, calls):
    own, x = pair[1], torch.randn(1, B, I)
    for _ in range(3):
        under_autocast(own, x)
    with suppress(RuntimeError):  # torch computes float16 on some CPUs only
        under_autocast(own, x, dtype=torch.float16)
    assert calls == [True, False]


def test_bfloat16_without_autocast_is_refused_as_by_torch(pair):
    own, x = pair[1], torch.randn(1, B, I, dtype=torch.bfloat16)
    for _ in range(3):
        under_autocast(own, x)
    with pytest.raises(ValueError, match="does not match weight dtype"):
        own(x)


def test_bfloat16_steps_pack_their_weights_once(pair, monkeypatch):
    packed = []
    pack = packed_weights._pack
    monkeypatch.setattr(packed_weights, "_pack", lambda *a: packed.append(1) or pack(*a))
    for _ in range(5):
        under_autocast(pair[1], torch.randn(1, B, I))
    assert len(packed) == 1


@pytest.mark.parametrize("rows", [B, 70], ids=["ready", "packed"])
@pytest.mark.parametrize("samples_before_step", [False, True])
def test_steps_of_a_fused_optimizer_are_detected(rows, samples_before_step):
    torch.manual_seed(0)
    own, x = fastlstm.LSTM(I, H), torch.randn(1, rows, I)
    optimizer = torch.optim.AdamW(own.parameters(), lr=0.1, fused=True)
    for _ in range(3):
        for _ in range(3):
            with torch.no_grad():
                y = own(x)[0]
        same = nn.LSTM(I, H)
        same.load_state_dict(own.state_dict())
        torch.testing.assert_close(y, same(x)[0].detach(), atol=1e-6, rtol=1e-5)
        own(x)[0].square().sum().backward()
        if samples_before_step:
            with torch.no_grad():
                own(x)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("is_bf16", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_layers(batch_first, is_bf16, bias, calls):
    """As torch's; in bf16, which rounds alike only here, as a copy that is not prepared."""
    torch.manual_seed(0)
    fields = {"num_layers": 3, "bias": bias, "batch_first": batch_first}
    peer, own = nn.LSTM(I, H, **fields), fastlstm.LSTM(I, H, **fields)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
        for k in range(6):
            if is_bf16:
                peer = copy.deepcopy(own)
                peer._last_shape = None
            else:
                peer.load_state_dict(own.state_dict())
            x, hx = (
                torch.randn(4, B, I),
                tuple(torch.randn(3, 4 if batch_first else B, H) for _ in "hc"),
            )
            with torch.no_grad():
                agree((peer, own), x, hx)
            for got, want in zip(gradients(own, x, hx), gradients(peer, x, hx), strict=True):
                torch.testing.assert_close(got, want)
            with torch.no_grad():  # one layer changes
                own._parameters[f"weight_hh_l{k % 3}"].data.mul_(0.9)
    assert calls == [True] * 10


def test_dropout_between_layers_is_not_prepared(calls):
    layer, x = fastlstm.LSTM(I, H, num_layers=2, dropout=0.5), torch.randn(4, B, I)
    assert not any(torch.equal(layer(x)[0], layer(x)[0]) for _ in range(3))
    assert calls == []
    layer.eval()
    assert all(torch.equal(layer(x)[0], layer(x)[0]) for _ in range(3))
    assert calls == [True] * 5
    layer.train()
    assert not torch.equal(layer(x)[0], layer(x)[0])
