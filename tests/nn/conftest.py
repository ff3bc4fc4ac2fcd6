"""Shared by the model tests: poisoned memory and a small model."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fastlstm.config import ModelConfig
from fastlstm.nn.initialization import initialize
from fastlstm.nn.language_model import LanguageModel


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Fresh memory is NaN, so that reading what nobody wrote fails."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def make_model() -> Callable[..., LanguageModel]:
    """Builds an initialised model, V=20 E=8 H=16 L=2 unless told otherwise."""

    def make(seed: int = 0, **changes: Any) -> LanguageModel:
        fields = {"vocab_size": 20, "embed_size": 8, "rnn_size": 16, "num_layers": 2, **changes}
        model = LanguageModel(ModelConfig(**fields))
        initialize(model, None, seed)
        return model

    return make
