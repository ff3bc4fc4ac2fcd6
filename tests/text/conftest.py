"""Small models and tokenizers for the tests of texts."""

import dataclasses

import pytest
import torch

from decoding import KERNELS
from fastlstm.runs.run_directory import RunDirectory
from fastlstm.system import hardware
from fastlstm.text.config import ModelConfig
from fastlstm.text.decoder import BYTE_PRODUCTS
from fastlstm.text.model import LanguageModel, initialize


@pytest.fixture(params=KERNELS)
def isa(request, monkeypatch):
    """Kernels of one instruction set; a CPU without VNNI multiplies by other means."""
    name, features = request.param, hardware.cpu().features
    if name.endswith(" without vnni"):
        name = name.removesuffix(" without vnni")
        if BYTE_PRODUCTS[name] not in features:
            pytest.skip(f"{name} without VNNI: the same kernels, or none on this CPU")
        features -= {BYTE_PRODUCTS[name]}
    info = dataclasses.replace(hardware.cpu(), isa=name, bf16_isa=name, features=features)
    monkeypatch.setattr(hardware, "cpu", lambda: info)
    return str(request.param)


@pytest.fixture
def run(tmp_path):
    """An empty run directory."""
    found = RunDirectory(tmp_path / "run")
    found.create()
    return found


@pytest.fixture
def make_model():
    """Builds an initialised model, V=20 E=8 H=16 L=2 unless told otherwise."""

    def make(seed=0, **changes):
        fields = {"vocab_size": 20, "embed_size": 8, "rnn_size": 16, "num_layers": 2, **changes}
        model = LanguageModel(ModelConfig(**fields))
        initialize(model, None, seed)
        return model

    return make


@pytest.fixture
def random_model():
    """Builds an initialised model in evaluation mode, every parameter random."""

    def make(**changes):
        fields = {"vocab_size": 20, "embed_size": 8, "rnn_size": 16, "num_layers": 1, **changes}
        model = LanguageModel(ModelConfig(**fields))
        initialize(model, None, 0)
        rng = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=rng), alpha=0.2)
        return model.eval()

    return make
