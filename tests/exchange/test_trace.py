"""Code of torch that runs on traced values becomes a graph."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from fastlstm.exchange.forecast_graph import forecast_graph, random_windows
from fastlstm.exchange.litert_format import LitertRunner, write_litert
from fastlstm.exchange.onnx_format import write_onnx
from fastlstm.exchange.trace import Tracer, Unwritable
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


def test_an_lstm_is_unchanged_after_a_recording():
    module, x = LSTM(2, 3), torch.randn(4, 1, 2)
    before = module(x)[0]
    weights = {n: p.detach().numpy() for n, p in module.named_parameters()}
    g = Tracer("model", nn.ModuleDict({"lstm": module}), weights)
    with pytest.raises(Unwritable), g.recording():
        torch.fft.fft(g.traced_input("x", ("T", "B", 2)))
    assert torch.equal(module(x)[0], before)


def test_a_window_of_an_unknown_series_is_scaled_by_itself(tmp_path):
    plain = stored_forecaster(num_targets=2, num_past=1, has_missing=True, output="quantiles")
    own = SeriesScale(("a", "b"), np.zeros((2, 2)), np.ones((2, 2)))
    stored = dataclasses.replace(plain, series=own)
    levels, inputs = (0.1, 0.5), random_windows(stored, 3)
    due = expected_of(stored, inputs, levels)
    assert error_of(stored, expected_of(plain, inputs, levels)["forecast"], due["forecast"]) > 0.1
    graph = forecast_graph(stored, weights_of(stored), levels)
    (tmp_path / "model.tflite").write_bytes(write_litert(graph))
    found = [*results_of(write_onnx(graph), inputs, tmp_path)]
    for results in (*found, LitertRunner(tmp_path / "model.tflite").run(inputs)):
        for name, expected in due.items():
            assert error_of(stored, results[name], expected) < 1e-5
