"""Graphs of forecasters give what `WindowForecaster` gives, in ONNX Runtime, onnx and LiteRT."""

import json

import numpy as np
import onnx
import pytest
import torch

from fastlstm.errors import ConfigError
from fastlstm.exchange.forecast_graph import forecast_graph, random_windows
from fastlstm.exchange.litert_format import LitertRunner, write_litert
from fastlstm.exchange.onnx_format import write_onnx
from fastlstm.runs.weight_formats import as_floats, in_format
from onnx_results import results_of
from stored_forecasters import (
    CHOICES,
    ETTH1,
    LEVELS_ASKED,
    drawn,
    error_of,
    expected_of,
    stored_forecaster,
    weights_of,
)


def litert(graph, path):
    file = path / "model.tflite"
    file.write_bytes(write_litert(graph))
    return LitertRunner(file)


def check(stored, path, levels=(), windows=()):
    """Compares the written files with their source, at two numbers of windows."""
    graph = forecast_graph(stored, weights_of(stored), levels)
    data, lite = write_onnx(graph), litert(graph, path)
    for inputs in windows or [random_windows(stored, B) for B in (1, 5, 1)]:
        expected = expected_of(stored, inputs, levels)
        for results in [*results_of(data, inputs, path), lite.run(inputs)]:
            assert results.keys() == expected.keys()
            for name, due in expected.items():
                assert error_of(stored, results[name], due) < 1e-5, name


@pytest.mark.parametrize("seed", range(24))
def test_a_graph_gives_what_its_source_gives(seed, tmp_path):
    stored = stored_forecaster(seed, **drawn(seed))
    levels = LEVELS_ASKED if stored.network.config.output in ("point", "quantiles") else ()
    check(stored, tmp_path, levels)


def test_every_choice_is_drawn():
    configurations = [{"categories": (), **drawn(seed)} for seed in range(24)]
    for name, values in CHOICES.items():
        chosen = {c[name] != () if name == "categories" else c[name] for c in configurations}
        assert chosen == set(values)


@pytest.mark.parametrize("is_stateful", [False, True])
@pytest.mark.parametrize("patch", [1, 3])
def test_the_last_present_value_is_subtracted(is_stateful, patch, tmp_path):
    stored = stored_forecaster(
        stateful=is_stateful, patch=patch, num_targets=2, has_missing=True, normalize="last"
    )
    check(stored, tmp_path)


@pytest.mark.parametrize("weight_format", ["fp16", "int8"])
def test_weights_stay_in_their_format(weight_format, tmp_path):
    stored = stored_forecaster(
        bidirectional=True, num_layers=2, num_past=1, num_future=1, categories=((1, 4), (2, 3)),
        num_static=1,
    )  # fmt: skip
    weights = in_format(weights_of(stored), weight_format)
    state = {name: torch.from_numpy(w) for name, w in as_floats(weights).items()}
    stored.network.load_state_dict(state, strict=False)
    graph = forecast_graph(stored, weights, LEVELS_ASKED)
    data = write_onnx(graph)
    dtype = {"fp16": onnx.TensorProto.FLOAT16, "int8": onnx.TensorProto.INT8}[weight_format]
    arrays = {a.name: a.data_type for a in onnx.load_from_string(data).graph.initializer}
    matrices = [n for n, kind in arrays.items() if kind == dtype]
    assert {n.split(".")[0] for n in matrices} >= {"lstm", "embed", "head", "cell_ih", "known"}
    inputs = random_windows(stored, 64)
    expected = expected_of(stored, inputs, LEVELS_ASKED)
    for results in results_of(data, inputs, tmp_path):
        for name, due in expected.items():
            assert error_of(stored, results[name], due) < 1e-5
    found = litert(graph, tmp_path).run(inputs)["forecast"]
    limit = 0.02 if weight_format == "int8" else 1e-5  # whose kernels round inputs, too
    assert error_of(stored, found, expected["forecast"]) < limit


def test_a_missing_target_of_a_model_without_missing_values_is_seen(tmp_path):
    for channels, rest in (("shared", False), ("joint", True)):
        stored = stored_forecaster(num_targets=2, num_past=1, channels=channels)
        inputs = random_windows(stored, 2)
        inputs["past"][1, 4, 0] = np.nan
        inputs["past"][0, 4, 2] = np.nan  # of a covariate
        data = write_onnx(forecast_graph(stored, weights_of(stored), (0.1, 0.5)))
        for results in results_of(data, inputs, tmp_path):
            for name, due in expected_of(stored, inputs, (0.1, 0.5)).items():
                is_nan = np.isnan(results[name])
                assert np.array_equal(is_nan, np.isnan(due))
                assert not is_nan[0].any()
                assert is_nan[1, :, 0].all()
                assert (is_nan[1, :, 1] == rest).all()


def test_unknown_names_are_numbers_outside_the_known_ones(tmp_path):
    stored = stored_forecaster(num_past=1, categories=((1, 4),))
    data = write_onnx(forecast_graph(stored, weights_of(stored)))
    inputs = random_windows(stored, 4)
    inputs["past"][:, :, 1] = np.array([4, np.nan, 1e9, -7])[:, None]
    inputs["past"][:, :, 0] = inputs["past"][0, :, 0]
    for results in results_of(data, inputs, tmp_path):
        assert np.isfinite(results["forecast"]).all()
        assert (results["forecast"] == results["forecast"][:1]).all()


def test_columns_far_from_zero_lose_no_digits(tmp_path):
    stored = stored_forecaster(num_targets=1, num_past=1, num_static=1, normalize="none")
    stored.scaler.mean[1], stored.scaler.std[1] = 40_000.123, 5.0
    stored.static_scale[0] = 40_000.123, 5.0
    check(stored, tmp_path)
    stored.scaler.mean[0], stored.scaler.std[0] = 40_000.123, 5.0
    inputs = random_windows(stored, 3)
    results = results_of(write_onnx(forecast_graph(stored, weights_of(stored))), inputs, tmp_path)
    due = expected_of(stored, inputs, ())["forecast"]
    last_digit = np.spacing(np.float32(40_000)) / 5
    for result in results:
        assert error_of(stored, result["forecast"], due) <= 1.01 * last_digit


def test_models_that_cannot_be_exported_are_named():
    stored = stored_forecaster(num_past=1)
    stored.scaler.mean[1], stored.scaler.std[1] = 1e9, 1.0
    with pytest.raises(ConfigError, match="'c1' is so large beside its range that float32"):
        forecast_graph(stored, weights_of(stored))
    for output in ("student_t", "negative_binomial"):
        stored = stored_forecaster(output=output)
        with pytest.raises(ConfigError, match=f"`output='{output}'` has no quantiles"):
            forecast_graph(stored, weights_of(stored), (0.5,))
    with pytest.raises(ConfigError, match="outside"):
        forecast_graph(stored_forecaster(), {}, (0.001,))


def test_the_graph_says_what_it_reads():
    stored = stored_forecaster(
        num_targets=2, num_past=1, num_future=1, num_static=1, categories=((3, 2),)
    )
    graph = forecast_graph(stored, weights_of(stored), (0.1,))
    shapes = {value.name: value.shape for value in (*graph.inputs, *graph.outputs)}
    assert shapes == {
        "past": ("B", 12, 4), "future": ("B", 7, 1), "static": ("B", 1),
        "forecast": ("B", 7, 2), "quantiles": ("B", 7, 2, 1),
    }  # fmt: skip
    texts = {name: json.loads(graph.metadata[name]) for name in ("targets", "future", "levels")}
    assert texts == {"targets": ["c0", "c1"], "future": ["c3"], "levels": [0.1]}
    assert json.loads(graph.metadata["categories"]) == {"c3": [0, 1]}


@pytest.mark.parametrize("has_missing", [False, True])
def test_etth1(has_missing, tmp_path):
    """All seven columns, on the last windows of the table, 30 patches each."""
    if not ETTH1.exists():
        pytest.skip("there is no ETTh1.csv")
    rows = np.loadtxt(ETTH1, delimiter=",", skiprows=1, usecols=range(1, 8))
    stored = stored_forecaster(
        num_targets=7, input_size=360, horizon=24, patch=12, hidden_size=16,
        has_missing=has_missing, output="quantiles",
    )  # fmt: skip
    stored.scaler.mean[:], stored.scaler.std[:] = rows.mean(0), rows.std(0)
    windows = np.stack([rows[-360 - 24 * k :][:360] for k in range(8)]).astype(np.float32)
    if has_missing:
        windows[np.random.default_rng(0).random(windows.shape) < 0.3] = np.nan
    check(stored, tmp_path, (0.025, 0.1, 0.5, 0.9, 0.975), [{"past": windows}])


@pytest.mark.parametrize(
    "options",
    [
        {"linear": True, "num_future": 1},
        {"has_missing": True, "num_targets": 2},
        {"output": "quantiles"},
    ],
)
def test_logarithms_are_written(options, tmp_path):
    stored = stored_forecaster(normalize="log", **options)
    stored.scaler.mean[: stored.network.config.num_targets] = 0.0
    check(stored, tmp_path, LEVELS_ASKED)
