"""Code of torch that runs on traced values becomes a graph."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from torch import nn

from fastlstm.exchange.forecast_graph import forecast_graph, random_windows
from fastlstm.exchange.litert_format import LitertRunner, write_litert
from fastlstm.exchange.onnx_format import write_onnx
from fastlstm.exchange.trace import Traced, Tracer, Unwritable
from fastlstm.forecast.data.scaled_windows import SeriesScale
from fastlstm.nn.lstm import LSTM
from onnx_results import results_of
from stored_forecasters import error_of, expected_of, stored_forecaster, weights_of


def tracer():
    return Tracer("model", nn.Linear(1, 1), {})


def kinds(g):
    return [node.kind for node in g.finished().nodes]


def test_an_operation_is_written_once_and_only_if_an_output_needs_it():
    g = tracer()
    x = g.traced_input("x", ("B", 4, 2))
    torch.exp(x[:, :3])
    y = torch.where(x.isnan(), x.nan_to_num(1.0), torch.sqrt(x)) + x.nan_to_num(1.0)
    g.output("y", y.value)
    assert sorted(kinds(g)) == sorted(
        ["is_nan", "not", "weight", "where", "sqrt", "where", "add", "identity"]
    )


def test_a_slice_of_joined_values_reads_the_values():
    g = tracer()
    x, y = (g.traced_input(name, ("B", 4, 2)) for name in "xy")
    part = torch.cat([x, y], 1)[:, 4:, 1:]
    g.output("part", part.value)
    assert kinds(g) == ["slice", "identity"]
    assert g.finished().nodes[0].inputs == (y.value,)


def test_a_clamp_keeps_nan_without_the_maximum_of_a_runtime(tmp_path):
    g = tracer()
    x = g.traced_input("x", ("B", 2))
    g.output("y", x.clamp(-1.0, 1.0).value)
    assert not {"maximum", "minimum"} & {*kinds(g)}
    values = np.array([[-np.inf, -0.5], [2.0, np.nan]], np.float32)
    for results in results_of(write_onnx(g.finished()), {"x": values}, tmp_path):
        np.testing.assert_array_equal(results["y"], [[-1.0, -0.5], [1.0, np.nan]])


def test_a_state_of_zeros_needs_no_is_nan_of_a_runtime(tmp_path):
    module = LSTM(2, 3)
    weights = {n: p.detach().numpy() for n, p in module.named_parameters()}
    g = Tracer("model", module, weights)
    x = g.traced_input("x", ("T", "B", 2))
    with g.recording():
        g.output("y", module(x)[0].value)
    assert "is_nan" not in kinds(g)
    values = torch.tensor([3.0, -2.0]).expand(2, 1, 2)
    due = module(values)[0].detach().numpy()
    for results in results_of(write_onnx(g.finished()), {"x": values.numpy()}, tmp_path):
        np.testing.assert_allclose(results["y"], due, atol=1e-6)


def test_whole_numbers_are_compared_with_numbers(tmp_path):
    g = tracer()
    x = Traced(g.input("x", ("B",), "int32"))
    g.output("y", torch.where(x == 2, torch.where(x < 0, x, x), (x > 2).long()).value)
    for results in results_of(write_onnx(g.finished()), {"x": np.int32([-1, 2, 3])}, tmp_path):
        assert results["y"].tolist() == [0, 2, 1]


def test_an_lstm_is_unchanged_after_a_recording():
    module, x = LSTM(2, 3), torch.randn(4, 1, 2)
    before = module(x)[0]
    weights = {n: p.detach().numpy() for n, p in module.named_parameters()}
    g = Tracer("model", nn.ModuleDict({"lstm": module}), weights)
    with pytest.raises(Unwritable), g.recording():
        torch.fft.fft(g.traced_input("x", ("T", "B", 2)))
    assert torch.equal(module(x)[0], before)


def test_a_window_is_scaled_by_its_series_and_by_itself_if_that_is_unknown(tmp_path):
    plain = stored_forecaster(num_targets=2, num_past=1, has_missing=True, output="quantiles")
    mean = plain.scaler.mean[:2]
    own = SeriesScale(("a", "b"), np.stack([mean, mean + 1]), np.array([[1.0, 2.0], [3.0, 4.0]]))
    noise = dataclasses.replace(plain.calibration, noise=torch.tensor([[0.5, 1.0], [2.0, 3.0]]))
    stored = dataclasses.replace(plain, series=own, calibration=noise)
    levels, inputs = (0.1, 0.5), {**random_windows(stored, 3), "series": np.int32([1, -1, 0])}
    due = expected_of(stored, inputs, levels)
    unknown = expected_of(stored, {**inputs, "series": np.int32([-1, -1, -1])}, levels)
    for name, expected in due.items():
        is_same = np.isclose(unknown[name], expected, equal_nan=True).reshape(3, -1).all(1)
        assert is_same.tolist() == [False, True, False]
    graph = forecast_graph(stored, weights_of(stored), levels)
    assert json.loads(graph.metadata["series"]) == ["a", "b"]
    (tmp_path / "model.tflite").write_bytes(write_litert(graph))
    found = [*results_of(write_onnx(graph), inputs, tmp_path)]
    for results in (*found, LitertRunner(tmp_path / "model.tflite").run(inputs)):
        for name, expected in due.items():
            assert error_of(stored, results[name], expected) < 1e-5
