"""SavedModels, where TensorFlow is installed; without it one line names the command."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fastlstm
from exchange.test_export import CELLS, expected, inputs
from exchange.test_export_kinds import forecaster_run  # noqa: F401
from fastlstm.errors import MissingExtraError
from fastlstm.exchange import saved_model_format

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"num_layers": 2},
    "residual, norm": {"num_layers": 2, "residual": True, "output_norm": True},
    "layer norm, zoneout": {"layer_norm": True, "zoneout": 0.2},
    **CELLS,
}


def needs_tensorflow():
    return pytest.importorskip("tensorflow")


def called(path, **arrays):
    """Returns what the signature gives, by TensorFlow alone."""
    tf = needs_tensorflow()
    loaded = tf.saved_model.load(str(path))
    outputs = loaded.signatures["serving_default"](**{n: tf.constant(a) for n, a in arrays.items()})
    return {name: value.numpy() for name, value in outputs.items()}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_text_model_by_its_signature(text_run, tmp_path, name):
    needs_tensorflow()
    run = text_run(**OPTIONS[name])
    report = fastlstm.export(run, to="saved-model", out=tmp_path / "out")
    assert report.proof.runtime.startswith("tensorflow ")
    for T, B in ((1, 1), (7, 3), (20, 5)):
        tokens, h, c = inputs(run, T, B)
        got = called(tmp_path / "out" / "1", tokens=tokens, h=h, c=c)
        own = dict(zip(("logits", "h_out", "c_out"), expected(run, tokens, h, c), strict=True))
        assert got.keys() == own.keys()
        for key, value in own.items():
            np.testing.assert_allclose(got[key], value, atol=1e-4)


@pytest.mark.parametrize("weights", ["fp16", "int8"])
def test_weights_stay_in_their_format(text_run, tmp_path, weights):
    needs_tensorflow()
    run = text_run(rnn_size=128)
    sizes = {}
    for form in ("fp32", weights):
        report = fastlstm.export(run, to="saved-model", out=tmp_path / form, weights=form)
        files = (tmp_path / form / "1" / "variables").iterdir()
        sizes[form] = sum(file.stat().st_size for file in files)
        assert report.weights == form
    assert sizes[weights] < 0.65 * sizes["fp32"]


def test_a_forecaster(forecaster_run, tmp_path):  # noqa: F811
    needs_tensorflow()
    out = tmp_path / "out"
    report = fastlstm.export(forecaster_run, to="saved-model", out=out, quantiles=(0.1, 0.5))
    for B in (1, 3, 8):
        past, future = np.zeros((B, 12, 3), np.float32), np.zeros((B, 7, 1), np.float32)
        got = called(out / "1", past=past, future=future)
        assert {name: array.shape for name, array in got.items()} == {
            "forecast": (B, 7, 2), "quantiles": (B, 7, 2, 2)
        }  # fmt: skip
    assert report.proof.max_error < 1e-5


def test_a_module_of_both_directions_with_lengths(tmp_path):
    needs_tensorflow()
    torch.manual_seed(0)
    module = fastlstm.LSTM(3, 4, bidirectional=True, batch_first=True)
    example = {"input": torch.zeros(2, 5, 3), "lengths": torch.tensor([5, 2])}
    report = fastlstm.export(module, example, to="saved-model", out=tmp_path / "out")
    assert report.proof.is_good


def test_a_softmax_module(tmp_path):
    needs_tensorflow()
    module = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3), nn.Softmax(-1))
    out = tmp_path / "out"
    fastlstm.export(module, torch.zeros(2, 5, dtype=torch.long), to="saved-model", out=out)
    (name,) = called(out / "1", input=np.zeros((2, 5), np.int32))
    assert name == "output"


def test_without_tensorflow(text_run, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorflow", None)
    saved_model_format._tensorflow.cache_clear()
    with pytest.raises(MissingExtraError) as error:
        fastlstm.export(text_run(), to="saved-model", out=tmp_path / "out")
    saved_model_format._tensorflow.cache_clear()
    said = "--to saved-model needs tensorflow: pip install 'fastlstm[tensorflow]'"
    assert str(error.value) == said
    assert not (tmp_path / "out").exists()
