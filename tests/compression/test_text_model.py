"""Two text models measured beside each other, and how sparse ones are stored."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from fastlstm.compression import text
from fastlstm.compression.text import (
    TextModel,
    compare_quality,
    compare_speed,
    encode_model,
    max_scored,
    missing_features,
)
from fastlstm.errors import DataError
from fastlstm.text.config import ModelConfig
from fastlstm.text.data.tokenizer import CharTokenizer
from fastlstm.text.files import build_model
from fastlstm.text.model import LanguageModel, initialize

TOKENIZER = CharTokenizer("\n abcdefghijklmnopqr")
CONFIG = ModelConfig(vocab_size=20, embed_size=16, rnn_size=32)
IDS = np.random.default_rng(0).integers(0, 20, 5000).astype(np.uint8)


def weights_of(config=CONFIG, seed=0):
    model = LanguageModel(config)
    initialize(model, None, seed)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=rng), alpha=0.2)
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


def in_format(weights, to, config=CONFIG):
    return TextModel.of_file(encode_model(weights, to), Path("run"), config, to)


def test_equal_models_do_not_differ():
    model = in_format(weights_of(), "fp32")
    quality, change, outputs = compare_quality(model, model, TOKENIZER, IDS, "a text")
    assert quality[0] == quality[1]
    assert (change.difference, change.low, change.high) == (0.0, 0.0, 0.0)
    assert (change.num_scored, change.scored_on) == (5000 - 1, "a text")
    assert (outputs.largest, outputs.rms, outputs.agreement) == (0.0, 0.0, 1.0)


def test_logits_are_compared_with_the_stored_weights():
    weights = weights_of()
    source, result = in_format(weights, "fp32"), in_format(weights, "int4")
    _, change, outputs = compare_quality(source, result, TOKENIZER, IDS[:2048], "a text")
    tokens = torch.from_numpy(IDS[:2048].astype(np.int64).reshape(16, 128).T.copy())
    logits = [build_model(m.floats, CONFIG).eval()(tokens)[0].detach() for m in (source, result)]
    difference = logits[1] - logits[0]
    difference -= difference.mean(2, keepdim=True)
    assert outputs.num_compared == 2048
    assert outputs.largest == pytest.approx(difference.abs().max().item(), rel=1e-4)
    assert outputs.rms == pytest.approx(difference.square().mean().sqrt().item(), rel=1e-4)
    assert outputs.agreement is not None
    assert 0.5 < outputs.agreement < 1.0
    assert change.low < change.difference < change.high


def test_a_constant_in_all_logits_changes_nothing():
    weights = weights_of()
    moved = {**weights, "output.bias": weights["output.bias"] + np.float32(3.0)}
    models = in_format(weights, "fp32"), in_format(moved, "fp32")
    _, change, outputs = compare_quality(*models, TOKENIZER, IDS, "a text")
    assert abs(change.difference) < 1e-6
    assert outputs.largest < 1e-4


def test_long_texts_are_scored_in_part(monkeypatch):
    monkeypatch.setattr(text, "MAX_SCORED", 1000)
    model = in_format(weights_of(), "fp32")
    change = compare_quality(model, model, TOKENIZER, IDS, "a text")[1]
    assert change.num_scored == 1000
    with pytest.raises(DataError, match="has 1 token"):
        compare_quality(model, model, TOKENIZER, IDS[:1], "a text")


def test_cells_without_native_decoder():
    config = ModelConfig(vocab_size=20, embed_size=8, rnn_size=8, layer_norm=True)
    model = in_format(weights_of(config), "int8", config)
    with pytest.warns(UserWarning, match="text is written on torch"):
        assert model.decoder.isa == "torch"
    assert max_scored(config) == text.MAX_SCORED // 50
    change = compare_quality(model, model, TOKENIZER, IDS[:200], "a text")[1]
    assert change.difference == 0.0
    assert missing_features(model) == [
        "the native decoder has no layer norm: text is written on torch, in fp32"
    ]


@pytest.mark.parametrize(("share", "is_sparse"), [(0.0, False), (0.2, False), (0.5, True)])
@pytest.mark.parametrize("to", ["fp32", "fp16", "int8"])
def test_matrices_with_many_blocks_of_zeros_are_stored_without_them(to, share, is_sparse):
    weights = weights_of()
    matrix = weights["layers.0.weight_hh_l0"].reshape(8, 16, 8, 4)
    for block in range(round(share * 64)):
        matrix[block // 8, :, block % 8] = 0.0
    stored = safetensors.numpy.load(encode_model(weights, to))
    assert ("layers.0.weight_hh_l0.blocks" in stored) == is_sparse
    assert ("layers.0.weight_hh_l0" in stored) != is_sparse
    model = in_format(weights, to)
    figures = model.figures({}, None)
    zeros = round(share * 64) * 64
    assert figures.num_parameters - figures.num_nonzero == pytest.approx(zeros, abs=60)
    # int4 has no such form: it is stored whole
    assert "layers.0.weight_hh_l0" in safetensors.numpy.load(encode_model(weights, "int4"))


def test_speed_is_in_characters():
    model = in_format(weights_of(), "fp32")
    one, two = compare_speed(model, model, 4.0)
    assert set(one) == set(two) == {1, 64}
    assert min(*one.values(), *two.values()) > 100


def test_what_this_cpu_lacks(on_cpu):
    weights = weights_of()
    on_cpu("avx2")
    assert missing_features(in_format(weights, "fp32")) == []
    assert missing_features(in_format(weights, "int4")) == [
        "has no products of bytes (VNNI, on Arm dotprod), with which int4 is fastest"
    ]
