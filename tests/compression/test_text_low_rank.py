"""An output matrix of low rank: the nearest one, stored, trained on, combined."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fastlstm
from fastlstm.compression.report import CompressReport
from fastlstm.compression.text import output_to_shrink, with_output_rank
from fastlstm.errors import ConfigError
from fastlstm.runs.weight_formats import QuantizedMatrix, as_floats, quantize, rounded
from fastlstm.text.config import ModelConfig
from fastlstm.text.stored_model import load_stored_model, parameter_shapes

Compress = Callable[..., CompressReport]
CONFIG = ModelConfig(vocab_size=30, embed_size=4, rnn_size=16)


def random_weights(config):
    rng = np.random.default_rng(0)
    shapes = parameter_shapes(config).items()
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes}


def product(weights):
    floats = as_floats(weights)
    return floats["output.weight"].astype("f8") @ floats["projection.weight"].astype("f8")


def config_of(run):
    return load_stored_model(run).model_config


@pytest.mark.parametrize("rank", [1, 5, 15])
def test_the_nearest_matrix_of_a_rank(rank):
    weights = random_weights(CONFIG)
    small, config = with_output_rank(weights, CONFIG, rank)
    assert {name: w.shape for name, w in small.items()} == parameter_shapes(config)
    s = np.linalg.svd(weights["output.weight"].astype("f8"), compute_uv=False)
    distance = np.linalg.norm(product(small) - weights["output.weight"])
    assert distance == pytest.approx(np.sqrt((s[rank:] ** 2).sum()), rel=1e-6)
    for w in (small["output.weight"], small["projection.weight"].T):  # both have the scale sqrt(S)
        np.testing.assert_allclose(w.T @ w, np.diag(s[:rank]), atol=1e-4)
    assert all(small[name] is w for name, w in weights.items() if name != "output.weight")
    smaller, _ = with_output_rank(small, config, rank - 1) if rank > 1 else (small, config)
    kept = np.linalg.svd(product(smaller), compute_uv=False)[: max(1, rank - 1)]
    np.testing.assert_allclose(kept, s[: max(1, rank - 1)], rtol=1e-5)


def test_a_quantized_matrix_is_read_as_floats():
    weights = random_weights(CONFIG)
    codes = {n: quantize(w, "int8") if w.ndim == 2 else w for n, w in weights.items()}
    small, _ = with_output_rank(codes, CONFIG, 6)
    want, _ = with_output_rank(rounded(weights, "int8"), CONFIG, 6)
    assert isinstance(small["layers.0.weight_hh_l0"], QuantizedMatrix)
    np.testing.assert_array_equal(small["output.weight"], want["output.weight"])


@pytest.mark.parametrize("to", ["fp32", "int8"])
def test_without_training(source, compressed, tmp_path, to):
    report = compressed(output_rank=6, to=to)
    before, after = load_stored_model(source), load_stored_model(tmp_path / "out")
    want, config = with_output_rank(before.weights, before.model_config, 6)
    assert after.model_config == config
    for name, w in as_floats(after.weights).items():
        np.testing.assert_array_equal(w, rounded(want, to)[name], name)
    rank = f"output of rank 6 instead of {before.model_config.rnn_size}"
    assert report.methods == [rank, "int8, rounded to the nearest"][: 1 + (to == "int8")]
    assert "an output of low rank loses less with training: give a budget" in report.notes
    assert report.training is None
    assert report.result.num_parameters < report.source.num_parameters
    assert report.result.quality is not None
    assert len(fastlstm.LM.load(tmp_path / "out").generate("a", max_tokens=5, seed=0)) > 0


def test_with_training_the_source_is_the_teacher(source, compressed, tmp_path):
    report = compressed(output_rank=6, to="int8", steps=4)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["compression"]["teacher"]["path"] == str(source)
    assert config["model"]["output_rank"] == config["train"]["output_rank"] == 6
    rate = json.loads((source / "config.json").read_text())["train"]["learning_rate"]
    assert config["train"]["dropout"] == 0
    assert config["train"]["learning_rate"] == pytest.approx(0.3 * rate)
    assert report.methods == [
        "output of rank 6 instead of 32", f"distilled from {source}",
        "int8, trained with its rounding",
    ]  # fmt: skip
    stored = load_stored_model(source)
    untrained, _ = with_output_rank(stored.weights, stored.model_config, 6)
    apart = product(load_stored_model(tmp_path / "out").weights) - product(untrained)
    assert 0 < np.linalg.norm(apart) < 0.3 * np.linalg.norm(product(untrained)), "it starts there"
    compressed("alone", output_rank=6, steps=4, alpha=0.0)
    assert not json.loads((tmp_path / "alone/config.json").read_text())["compression"]["teacher"]


@pytest.mark.parametrize(
    "options",
    [{"prune": 0.5, "structured": "units"}, {"prune": 0.5, "structured": "blocks", "to": "int8"}],
)
def test_combined(source, compressed, tmp_path, options):
    compressed(**{"output_rank": 6, "steps": 8, "schedule": None, **options})
    stored = load_stored_model(tmp_path / "out")
    H = 16 if options.get("structured") == "units" else 32
    assert (stored.model_config.rnn_size, stored.model_config.output_rank) == (H, 6)
    projection = as_floats(stored.weights)["projection.weight"]
    assert projection.shape == (6, H)
    if "to" not in options:
        assert (projection != 0).all(), "it is not pruned"


def test_a_second_compression_may_lower_the_rank(source, compressed, tmp_path):
    quiet: dict[str, Any] = {"observers": (), "threads": 1, "tensorboard": False}
    compressed(output_rank=8)
    fastlstm.compress(tmp_path / "out", out=tmp_path / "less", output_rank=5, **quiet)
    assert config_of(tmp_path / "less").output_rank == 5
    fastlstm.compress(tmp_path / "out", out=tmp_path / "int8", to="int8", steps=3, **quiet)
    assert config_of(tmp_path / "int8").output_rank == 8
    with pytest.raises(ConfigError, match="`output_rank` is 8, expected less than 8, the rank"):
        fastlstm.compress(tmp_path / "out", out=tmp_path / "same", output_rank=8, **quiet)
    with pytest.raises(ConfigError, match="`output_rank` is 8, expected less than 8"):
        fastlstm.compress(tmp_path / "out", out=tmp_path / "x", rnn_size=8, steps=3, **quiet)


def test_a_student_may_have_an_output_of_low_rank(compressed, tmp_path):
    compressed(rnn_size=16, output_rank=4, steps=3)
    config = config_of(tmp_path / "out")
    assert (config.rnn_size, config.output_rank) == (16, 4)


@pytest.mark.parametrize(
    ("rows", "columns", "other", "changes", "want"),
    [
        (400, 200, 719_999, {}, 200),
        (400, 200, 720_000, {}, None),
        (399, 200, 0, {}, None),
        (400, 200, 0, {"tie_weights": True}, None),
        (400, 200, 0, {"output_rank": 64}, None),
    ],
)
def test_a_lower_rank_is_tried_for_a_large_output(rows, columns, other, changes, want):
    config = ModelConfig(vocab_size=rows, embed_size=200, rnn_size=200, **changes)
    weights = {"output.weight": np.zeros((rows, columns)), "other": np.zeros(other)}
    assert output_to_shrink(weights, config) == want


def test_tied_weights_are_refused():
    config = ModelConfig(vocab_size=30, embed_size=16, rnn_size=16, tie_weights=True)
    with pytest.raises(ConfigError, match=r"\(tied weights\), which keeps its rank"):
        with_output_rank(random_weights(config), config, 3)
    with pytest.raises(ConfigError, match="`output_rank` is 16, expected less than 16, the rank"):
        with_output_rank(random_weights(CONFIG), CONFIG, 16)
