"""torch's backend: what it supports and what it refuses."""

import pytest
import torch

from fastlstm.ops.backends.aten import DTYPES, AtenBackend
from fastlstm.ops.call import LSTMCall


def make_call(**changes):
    fields = {"T": 8, "B": 4, "I": 16, "H": 32, "dtype": torch.float32, "device": "cpu"}
    return LSTMCall(**{**fields, "requires_grad": True, **changes})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_supports_torchs_devices_and_dtypes(dtype, device):
    assert AtenBackend().supports(make_call(dtype=dtype, device=device)) is None


def test_refuses_the_rest_with_a_reason():
    backend = AtenBackend()
    assert backend.supports(make_call(device="mps")) == "torch has no LSTM kernel for device mps"
    assert (
        backend.supports(make_call(dtype=torch.int8)) == "torch has no LSTM kernel for torch.int8"
    )


def test_a_fast_kernel_is_never_announced_together_with_a_refusal():
    for dtype in DTYPES:
        for requires_grad in (True, False):
            kernel = AtenBackend().describe(make_call(dtype=dtype, requires_grad=requires_grad))
            if kernel.name == "ATen per-step loop":
                assert not kernel.is_fast
                assert kernel.why.startswith("because ")
