"""Arguments, checks and tolerances of the operator tests: one metric, one table."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from decoding import ISAS
from fastlstm.ops.call import LSTMWeights
from fastlstm.ops.reference import lstm_reference
from fastlstm.system import hardware

NAMES = ("x", "h0", "c0", "w_ih", "w_hh", "b_ih", "b_hh")

# (what, dtype): relative RMS error, largest absolute error over the reference's largest value.
TOLERANCES: dict[tuple[str, torch.dtype], tuple[float, float]] = {
    # one rounding of the sums, in whatever order
    ("value", torch.float64): (1e-13, 1e-12),
    ("gradient", torch.float64): (1e-12, 1e-11),
    # 2^-24 times the root of the summed terms, and fast exponentials good to a few ulp
    ("value", torch.float32): (2e-6, 1e-5),
    ("gradient", torch.float32): (2e-6, 2e-5),
    # operands are rounded to 8 bits (2^-9 each); the worst is H=1, where nothing averages out
    ("value", torch.bfloat16): (1.2e-2, 2e-2),
    # and dgates are rounded to 8 bits once more before each product
    ("gradient", torch.bfloat16): (1.2e-2, 3e-2),
    # operands are rounded to 11 bits, and so are c and every intermediate of the per-step loop
    ("value", torch.float16): (2e-3, 5e-3),
    ("gradient", torch.float16): (4e-3, 1e-2),
}


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """Fresh memory is NaN, so that reading what nobody wrote fails."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch):
    """The kernels of one instruction set; with it a test needs no mark `isa`."""
    info = dataclasses.replace(hardware.cpu(), isa=request.param, bf16_isa=request.param)
    monkeypatch.setattr(hardware, "cpu", lambda: info)
    return request.param


@dataclass
class Arguments:
    """Tensors of one call, by name; `None` for a bias that is absent."""

    tensors: dict[str, torch.Tensor | None]
    dy: torch.Tensor
    dh: torch.Tensor
    dc: torch.Tensor

    def list(self):
        return [self.tensors[name] for name in NAMES]

    def copy(self, dtype, grads=NAMES):
        """The same values as leaves in `dtype`, rounded through it, strides kept."""
        copies: dict[str, torch.Tensor | None] = {}
        for name, value in self.tensors.items():
            if value is None:
                copies[name] = None
                continue
            leaf = torch.empty_strided(value.shape, value.stride(), dtype=dtype)
            copies[name] = leaf.copy_(value).requires_grad_(name in grads)
        return Arguments(copies, self.dy, self.dh, self.dc)


def make_arguments(
    T,
    B,
    I,  # noqa: E741
    H,
    *,
    bias=True,
    seed=0,
):
    rng = torch.Generator().manual_seed(seed)

    def uniform(*shape, scale):
        return (torch.rand(shape, generator=rng, dtype=torch.float64) * 2 - 1) * scale

    tensors: dict[str, torch.Tensor | None] = {
        "x": uniform(T, B, I, scale=1.7),
        "h0": uniform(B, H, scale=0.7),
        "c0": uniform(B, H, scale=1.5),
        "w_ih": uniform(4 * H, I, scale=1.5 * I**-0.5),
        "w_hh": uniform(4 * H, H, scale=1.5 * H**-0.5),
        "b_ih": uniform(4 * H, scale=0.5) if bias else None,
        "b_hh": uniform(4 * H, scale=0.5) if bias else None,
    }
    return Arguments(
        tensors, uniform(T, B, H, scale=1.0), uniform(B, H, scale=1.0), uniform(B, H, scale=1.0)
    )


def backpropagate(args, outputs):
    """Backward of a sum that weighs every output, the final states included."""
    weights = (args.dy, args.dh, args.dc)
    pairs = zip(outputs, weights, strict=True)
    torch.stack([(out.double() * weight).sum() for out, weight in pairs]).sum().backward()


def reference_result(args, dtype, grads):
    """Outputs, states and gradients in float64 of the arguments as `dtype` stores them."""
    exact = args.copy(dtype, ()).copy(torch.float64, grads)
    x, h0, c0, *weights = exact.list()
    outputs = lstm_reference(x, h0, c0, LSTMWeights(*weights))
    found = dict(zip(("y", "hT", "cT"), outputs, strict=True))
    if grads:
        backpropagate(exact, outputs)
    for name in grads:
        value = exact.tensors[name]
        if value is not None:
            assert value.grad is not None
            found[f"d{name}"] = value.grad
    return {name: value.detach() for name, value in found.items()}


def assert_close(name, got, want, dtype, times=1.0):
    """The one metric: relative RMS and largest error, within `times` the `TOLERANCES`."""
    limits = TOLERANCES["gradient" if name.startswith("d") else "value", dtype]
    rms_limit, max_limit = (times * limit for limit in limits)
    assert got.shape == want.shape, f"{name}: {tuple(got.shape)} is not {tuple(want.shape)}"
    error = got.detach().double() - want
    rms = float(error.pow(2).mean().sqrt() / want.pow(2).mean().sqrt())
    largest = float(error.abs().max() / want.abs().max())
    good = rms <= rms_limit and largest <= max_limit  # False for NaN
    assert good, (
        f"{name} in {dtype}: rms {rms:.2e} > {rms_limit}, or max {largest:.2e} > {max_limit}"
    )


def events_of(function):
    """Names of the operators that ran."""
    with profile(activities=[ProfilerActivity.CPU]) as record:
        function()
    return {event.key for event in record.key_averages()}


@dataclass(frozen=True)
class Toolbox:
    names = NAMES
    make = staticmethod(make_arguments)
    reference = staticmethod(reference_result)
    backpropagate = staticmethod(backpropagate)
    assert_close = staticmethod(assert_close)
    events = staticmethod(events_of)
    subsets = tuple(
        itertools.chain(
            [(name,) for name in NAMES], [("x", "w_hh"), ("h0", "c0"), ("b_ih", "b_hh")]
        )
    )


@pytest.fixture
def without_onednn():
    """As `torch.backends.mkldnn.flags(enabled=False)`, which warns on a CPU-only torch."""
    yield from _switched(False)


@pytest.fixture
def with_onednn():
    """Switches oneDNN on in torch, where --no-onednn has switched it off."""
    yield from _switched(True)


def _switched(enabled):
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(enabled)
    yield
    torch._C._set_mkldnn_enabled(before)


@pytest.fixture
def ops():
    """Arguments, reference, checks and profiler of the operator tests."""
    return Toolbox()
