"""torch's own sample inputs for `nn.LSTM`, as its `test_modules.py` runs them, both ways."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only

import fastlstm

pytest.importorskip("expecttest", reason="torch.testing._internal needs expecttest")

pytestmark = pytest.mark.filterwarnings("ignore:accelerate replaced, but torch computes")


@functools.cache
def torchs_own():
    """Returns torch's `ModuleInfo` of `nn.LSTM` and its `noncontiguous_like`.

    Imported when asked for: that takes seconds. It would freeze torch's flags for all tests of
    this process.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends, "disable_global_flags", lambda: None)
        from torch.testing._internal.common_modules import module_db
        from torch.testing._internal.common_utils import noncontiguous_like

    (info,) = (info for info in module_db if info.module_cls is nn.LSTM)
    return info, noncontiguous_like


def accelerated(*args, **kwargs):
    return fastlstm.accelerate(nn.LSTM(*args, **kwargs))


WAYS = {"class": fastlstm.LSTM, "accelerate": accelerated}


def samples(*, training, dtype=torch.float32):
    info, _ = torchs_own()
    torch.manual_seed(0)
    found = info.module_inputs_func(
        info, device="cpu", dtype=dtype, requires_grad=True, training=training
    )
    return [sample for sample in found if sample.forward_input is not None]


def pair(make, sample, *, training):
    """Returns torch's layer and ours, of the same weights."""
    args = sample.constructor_input.args
    kwargs = {**sample.constructor_input.kwargs, "dtype": sample.forward_input.args[0].dtype}
    theirs, ours = nn.LSTM(*args, **kwargs), make(*args, **kwargs)
    ours.load_state_dict(theirs.state_dict())
    assert type(ours) is fastlstm.LSTM
    return theirs.train(training), ours.train(training)


def result(layer, sample, change=lambda t: t):
    """Returns outputs and gradients of parameters and inputs, all in one list."""
    given = (sample.forward_input.args, sample.forward_input.kwargs)
    copied = tree_map_only(torch.Tensor, lambda t: change(t.detach()).requires_grad_(), given)
    leaves = [t for t in tree_flatten(copied)[0] if isinstance(t, torch.Tensor)]
    torch.manual_seed(1)
    outputs = tree_flatten(layer(*copied[0], **copied[1]))[0]
    layer.zero_grad()
    sum(y.square().sum() for y in outputs).backward()
    return [*outputs, *(t.grad for t in leaves), *(p.grad for p in layer.parameters())]


def assert_same(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.fixture(params=[False, True], ids=["eval", "train"])
def training(request):
    return request.param


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_forward_and_gradients(way, dtype, training):
    found = samples(training=training, dtype=dtype)
    _, noncontiguous_like = torchs_own()
    assert len(found) > 4
    for sample in found:
        theirs, ours = pair(WAYS[way], sample, training=training)
        want = result(theirs, sample)
        assert_same(result(ours, sample), want)
        assert_same(result(ours, sample, change=noncontiguous_like), want)
        if sample.reference_fn is not None:
            args, kwargs = sample.forward_input.args, sample.forward_input.kwargs
            outputs = tree_flatten(ours(*args, **kwargs))[0]
            reference = sample.reference_fn(theirs, *args, **kwargs)
            assert_same(outputs, tree_flatten(reference)[0])


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("way", WAYS)
def test_copies_pickles_and_conversions(way, training):
    for sample in samples(training=training):
        _, ours = pair(WAYS[way], sample, training=training)
        want = result(ours, sample)
        assert_same(result(copy.deepcopy(ours), sample), want)
        assert_same(result(pickle.loads(pickle.dumps(ours)), sample), want)
        assert_same(result(ours.double().float(), sample), want)
        assert_same(result(fastlstm.restore(ours), sample), want)
