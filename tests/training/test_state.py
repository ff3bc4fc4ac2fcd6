"""What a run counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastlstm.errors import Stopped
from fastlstm.forecast.model.categorical import CategoryEmbedding
from fastlstm.training import state
from fastlstm.training.state import Progress, TrainingState


def test_a_part_that_is_stopped_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(state.time, "perf_counter", lambda: now_s[0])
    progress = Progress()
    with progress.counted("judging"):
        now_s[0] += 2.0

    @progress.counted("judging")
    def stopped() -> None:
        now_s[0] += 3.0
        raise Stopped("stopped while judging")

    with pytest.raises(Stopped):
        stopped()
    assert progress.spent == {"judging": 5.0}


def test_what_a_model_keeps_beside_its_weights_is_stored_and_put_back() -> None:
    """Without it a resumed forecaster took the categories it had read for unknown ones."""

    def made(*codes: int) -> TrainingState:
        model = CategoryEmbedding(3, 2)
        model(torch.tensor(codes))
        optimizers: Any = SimpleNamespace(tensors=dict, load=lambda tensors: None)
        return TrainingState(model, optimizers, None)

    tensors, meta = made(0, 2).capture({"epoch": 0, "index": 0})
    fresh = made(1)
    fresh.restore(tensors, meta)
    assert fresh.model.is_trained.tolist() == [True, False, True, False]
    del tensors["model"]["is_trained"]  # a checkpoint of a version that stored the weights only
    fresh.restore(tensors, meta)
    assert fresh.model.is_trained.all()
