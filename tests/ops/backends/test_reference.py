"""The reference backend announces itself as slow."""

import torch

from fastlstm.ops.backends.reference import ReferenceBackend
from fastlstm.ops.call import LSTMCall


def test_the_reference_runs_every_call_slowly():
    call = LSTMCall(T=1, B=1, I=1, H=1, dtype=torch.float64, device="meta", requires_grad=False)
    assert ReferenceBackend().supports(call) is None
    assert not ReferenceBackend().describe(call).is_fast
