"""Graphs of sequence models give what the estimators give, in ONNX Runtime and in onnx."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from fastlstm import SequenceClassifier, SequenceRegressor
from fastlstm.errors import ConfigError
from fastlstm.exchange.litert_format import LitertRunner, write_litert
from fastlstm.exchange.onnx_format import write_onnx
from fastlstm.exchange.sequence_source import SequenceSource, sequence_graph
from fastlstm.exchange.torch_format import TorchRunner, write_torch
from fastlstm.runs.weight_formats import as_floats, in_format
from fastlstm.sequence.answers import Labels, Numbers
from fastlstm.sequence.config import SequenceConfig
from fastlstm.sequence.files import StoredSequenceModel
from fastlstm.sequence.model import NetworkConfig, SequenceNetwork
from onnx_results import results_of

C, K = 3, 4


def stored_model(answers, seed=0, **options):
    """A model with random weights and scales."""
    torch.manual_seed(seed)
    config = NetworkConfig(
        num_columns=C, num_outputs=K, hidden_size=8, embed_size=6, **options
    )  # fmt: skip
    network = SequenceNetwork(config).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(2)
    mean = torch.randn(C, dtype=torch.float64) * 20
    given = SequenceConfig()
    std = torch.rand(C, dtype=torch.float64) + 0.5
    return StoredSequenceModel(given, given, network, mean, std, answers, "")


def numbers():
    return Numbers(np.array([5.0, -3.0, 0.0, 7.0]), np.array([2.0, 0.1, 1.0, 0.0]), False)


def labels():
    return Labels(np.array(["a", "b", "c", "d"]))


def sequences(stored, lengths, T):
    """Inputs of the graph; padding holds NaN and other numbers, which count nothing."""
    rng = np.random.default_rng(T)
    mean, std = stored.mean.numpy(), stored.std.numpy()
    values = (mean + std * rng.normal(size=(len(lengths), T, C))).astype(np.float32)
    if stored.network.config.has_missing:
        values[rng.random(values.shape) < 0.3] = np.nan
    for number, length in enumerate(lengths):
        values[number, length:] = np.nan if number % 2 else 1e6
    return {"values": values, "lengths": np.array(lengths, np.int32)}


def expected_of(stored, inputs):
    """What the estimator predicts for each sequence by itself."""
    is_labels = isinstance(stored.answers, Labels)
    model: Any = SequenceClassifier() if is_labels else SequenceRegressor()
    model._take(stored)
    X = [v[:n] for v, n in zip(inputs["values"], inputs["lengths"].tolist(), strict=True)]
    if not is_labels:
        return {"answers": model.predict(X)}
    names = model.predict(X).tolist()
    places = [model.classes_.tolist().index(name) for name in names]
    return {"probabilities": model.predict_proba(X), "label": np.array(places)}


def weights_of(stored):
    return {name: p.detach().numpy() for name, p in stored.network.named_parameters()}


def check(stored, weights, path):
    data = write_onnx(sequence_graph(stored, weights))
    for lengths, T in (([1], 1), ([7, 1, 4], 7), ([9, 3], 12)):
        inputs = sequences(stored, lengths, T)
        expected = expected_of(stored, inputs)
        for results in results_of(data, inputs, path):
            assert results.keys() == expected.keys()
            for name, due in expected.items():
                assert results[name].shape == due.shape
                assert abs(results[name] - due).max() < 1e-5, name


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("has_missing", [False, True])
@pytest.mark.parametrize("kind", [numbers, labels])
def test_a_graph_gives_what_an_estimator_gives(bidirectional, pooling, has_missing, kind, tmp_path):
    stored = stored_model(
        kind(), bidirectional=bidirectional, pooling=pooling, has_missing=has_missing,
        num_layers=1 + has_missing,
    )  # fmt: skip
    check(stored, weights_of(stored), tmp_path)


@pytest.mark.parametrize("to", ["torch", "litert"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_other_targets_give_the_same(pooling, to, tmp_path):
    """Both ways and two layers; LiteRT with a fixed length."""
    stored = stored_model(
        numbers(), bidirectional=True, pooling=pooling, has_missing=True, num_layers=2
    )
    file, T = tmp_path / "model", 7
    length = T if to == "litert" else None
    graph = sequence_graph(stored, weights_of(stored), length)
    file.write_bytes(write_litert(graph) if to == "litert" else write_torch(graph))
    runner: Any = LitertRunner(file) if to == "litert" else TorchRunner(file)
    for lengths in ([7, 1, 4], [2], [3, 7]):
        inputs = sequences(stored, lengths, T)
        results = runner.run(inputs)
        for name, due in expected_of(stored, inputs).items():
            assert abs(results[name] - due).max() < 1e-5


def test_int8_weights(tmp_path):
    stored = stored_model(numbers(), bidirectional=True, num_layers=2)
    weights = in_format(weights_of(stored), "int8")
    state = {name: torch.from_numpy(w) for name, w in as_floats(weights).items()}
    stored.network.load_state_dict(state)
    check(stored, weights, tmp_path)


def test_the_first_of_equal_scores_is_the_label(tmp_path):
    stored = stored_model(labels())
    with torch.no_grad():
        stored.network.head.weight.zero_()
        stored.network.head.bias.copy_(torch.tensor([0.0, 1.0, 2.0, 2.0]))
    data = write_onnx(sequence_graph(stored, weights_of(stored)))
    for results in results_of(data, sequences(stored, [2, 3], 3), tmp_path):
        assert results["label"].tolist() == [2, 2]


def test_classes_are_in_the_metadata_and_axes_have_names():
    graph = sequence_graph(stored_model(labels()), weights_of(stored_model(labels())))
    assert json.loads(graph.metadata["classes"]) == ["a", "b", "c", "d"]
    shapes = {value.name: value.shape for value in (*graph.inputs, *graph.outputs)}
    assert shapes == {
        "values": ("B", "T", C), "lengths": ("B",), "probabilities": ("B", K), "label": ("B",),
    }  # fmt: skip


@pytest.mark.parametrize("named", ["column 1 of the sequences", "answer 1 of each sequence"])
def test_a_scale_that_needs_float64_is_refused_by_name(named):
    stored = stored_model(answers := numbers())
    answers.mean[3] = 1e9  # a constant
    (stored.mean if "column" in named else answers.mean)[1] = 1e9
    with pytest.raises(ConfigError, match=f"{named} is so large beside its range"):
        sequence_graph(stored, weights_of(stored))


def test_the_inputs_of_the_check_stay_within_float32():
    stored = stored_model(numbers())
    stored.std[:] = 2e38
    for case in SequenceSource(stored, "fp32").cases():
        assert np.isfinite(case["values"]).all()
