"""Shared by the tests of layers: poisoned memory, and torch's own layer in bf16."""

import pytest
import torch

from fastlstm.nn.lstm import LSTM
from fastlstm.ops.backends.onednn import hidden_from
from fastlstm.ops.call import compute_dtype


@pytest.fixture(autouse=True)
def _poisoned_memory(poisoned_memory):
    """Fresh memory is NaN in every test here."""


@pytest.fixture
def only_ours(monkeypatch):
    """Makes torch's forward pass fail when `fastlstm.LSTM` falls back to it."""

    def must_not_run(*args, **kwargs):
        raise AssertionError("torch's own LSTM ran")

    monkeypatch.setattr(LSTM, "_torch", must_not_run)


@pytest.fixture
def peer_in_bf16(monkeypatch):
    """Has `nn.LSTM` compute in bf16 on every CPU; it raises where oneDNN has no bf16 LSTM.

    Its loop over the steps gives float32 under autocast, oneDNN bf16; unequal lengths are always
    that loop's.
    """
    lstm = torch._VF.lstm  # type: ignore[attr-defined]

    def run(x, *args):
        dtype = compute_dtype(x)
        with hidden_from(dtype, x.device.type):
            out = lstm(x, *args)
        sizes = args[0] if isinstance(args[0], torch.Tensor) else x.new_zeros(1)
        return out if len(sizes.unique()) > 1 else tuple(t.to(dtype) for t in out)

    monkeypatch.setattr(torch._VF, "lstm", run)
