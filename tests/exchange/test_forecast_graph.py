"""Graphs of forecasters give what `WindowForecaster` gives, in ONNX Runtime and in onnx."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray

from fastlstm.errors import ConfigError
from fastlstm.exchange.forecast_graph import forecast_graph
from fastlstm.exchange.onnx_format import write_onnx
from fastlstm.forecast.calibration import LEVELS, Calibration
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.splits import Scaler
from fastlstm.forecast.data.timeline import Frequency
from fastlstm.forecast.files import StoredForecaster
from fastlstm.forecast.model.config import ForecasterConfig
from fastlstm.forecast.model.network import ForecastNetwork
from fastlstm.forecast.model.outputs import NegativeBinomial, StudentT
from fastlstm.forecast.table_schema import TableSchema
from fastlstm.forecast.window_forecaster import WindowForecaster
from fastlstm.runs.weight_formats import as_floats, in_format
from onnx_results import results_of

ETTH1 = Path(__file__).parents[3] / "shared/data/ETTh1.csv"
"""Beside a checkout, where there is one."""
SIZES: dict[str, Any] = {
    "input_size": 12, "horizon": 7, "patch": 3, "hidden_size": 8, "embed_size": 6,
}  # fmt: skip
LEVELS_ASKED = (0.005, 0.007, 0.07, 0.5, 0.8, 0.95, 0.992, 0.995)
"""Calibrated ones and others between."""


def stored_forecaster(seed: int = 0, scale: float = 3.0, **options: Any) -> StoredForecaster:
    """A forecaster with random weights, scales and residuals, some of them infinite."""
    config = ForecasterConfig(**{**SIZES, **options})
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    network = ForecastNetwork(config).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(1.5)
    for module in network.modules():
        if hasattr(module, "is_trained"):
            module.is_trained[:2] = True
    num = config.num_targets + config.num_past + config.num_future
    mean, std = 50 * rng.normal(size=num), scale * rng.uniform(0.5, 2, num)
    names = [place for place, _ in config.categories]
    is_counts = config.output == "negative_binomial"
    plain = [*names, *(range(config.num_targets) if is_counts else ())]
    mean[plain], std[plain] = 0, 1
    static = np.stack([rng.normal(size=config.num_static), rng.uniform(1, 2, config.num_static)], 1)
    static[[place for place, _ in config.static_categories]] = 0, 1
    residuals = rng.normal(size=(len(LEVELS), config.horizon, config.num_targets))
    residuals[0], residuals[-1], residuals[-2, ::2] = -np.inf, np.inf, np.inf
    columns = tuple(f"c{k}" for k in range(num))
    statics = tuple(f"s{k}" for k in range(config.num_static))
    categories = {columns[place]: list(range(size)) for place, size in config.categories}
    schema = TableSchema(columns, Frequency(1, "rows"), None, categories, config.has_missing)
    given = ForecastConfig(horizon=config.horizon, static=statics)
    calibration = Calibration(torch.from_numpy(residuals).float())
    return StoredForecaster(
        given, given, network, Scaler(mean, std), calibration, static, schema, ""
    )


def inputs_of(stored: StoredForecaster, B: int, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Random windows; of what may be missing a part is, of one window everything."""
    config, rng = stored.network.config, np.random.default_rng(seed)
    mean, std = stored.scaler.mean, stored.scaler.std
    length = config.input_size + config.horizon
    values = mean + std * rng.normal(size=(B, length, len(mean)))
    if config.output == "negative_binomial":
        counts = rng.poisson(5, size=(B, length, config.num_targets))
        values[..., : config.num_targets] = counts
    statics = stored.static_scale[:, 0] + rng.normal(size=(B, config.num_static))
    for rows, pairs in ((values, config.categories), (statics, config.static_categories)):
        for place, size in pairs:
            rows[..., place] = rng.integers(0, size + 1, rows.shape[:-1])
    if config.has_missing:
        values[rng.random(values.shape) < 0.3] = np.nan
        values[0, : config.input_size // 2] = np.nan
        values[-1, : config.input_size, 0] = np.nan
    statics[rng.random(statics.shape) < 0.3] = np.nan
    F, L = config.num_future, config.input_size
    inputs = {"past": values[:, :L]}
    if F:
        inputs["future"] = values[:, L:, -F:]
    if config.num_static:
        inputs["static"] = statics
    return {name: array.astype(np.float32) for name, array in inputs.items()}


def expected_of(
    stored: StoredForecaster, inputs: Mapping[str, NDArray[Any]], levels: tuple[float, ...]
) -> dict[str, NDArray[Any]]:
    """What the source gives."""
    model = WindowForecaster(stored, "model")
    forecasts = model.run(inputs["past"], inputs.get("future"), inputs.get("static"))
    expected: dict[str, NDArray[Any]] = {"forecast": forecasts.values()}
    output, parameters = stored.network.output, forecasts.parameters
    if levels:
        expected["quantiles"] = forecasts.quantiles(levels)
    if isinstance(output, StudentT):
        degrees, _, scale = output.read(parameters)
        std = stored.scaler.std[: scale.shape[-1]]
        expected |= {"degrees_of_freedom": degrees.numpy(), "scale": scale.numpy() * std}
    if isinstance(output, NegativeBinomial):
        expected["dispersion"] = parameters[..., 1].numpy()
    return expected


def error_of(stored: StoredForecaster, result: NDArray[Any], expected: NDArray[Any]) -> float:
    """Largest difference in deviations of the column."""
    assert result.shape == expected.shape
    std = stored.scaler.std[: stored.network.config.num_targets]
    std = std if result.ndim == 3 else std[:, None]
    is_same = (result == expected) | (np.isnan(result) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        return float(np.where(is_same, 0, abs(result - expected) / std).max())


def weights_of(stored: StoredForecaster) -> dict[str, Any]:
    """The weights of its network by name."""
    return {name: p.detach().numpy() for name, p in stored.network.named_parameters()}


def check(stored: StoredForecaster, path: Path, levels: tuple[float, ...] = ()) -> None:
    """Compares the written file with its source, at two numbers of windows."""
    data = write_onnx(forecast_graph(stored, weights_of(stored), levels))
    for B in (1, 5):
        inputs = inputs_of(stored, B, seed=B)
        expected = expected_of(stored, inputs, levels)
        for results in results_of(data, inputs, path):
            assert results.keys() == expected.keys()
            for name, due in expected.items():
                assert error_of(stored, results[name], due) < 1e-5, name


CHOICES: dict[str, tuple[Any, ...]] = {
    "normalize": ("last", "standard", "none"),
    "decoder": ("direct", "autoregressive"),
    "channels": ("shared", "joint"),
    "has_missing": (False, True),
    "bidirectional": (False, True),
    "stateful": (False, False, True),
    "output": ("point", "quantiles", "student_t", "negative_binomial"),
    "num_targets": (1, 3),
    "num_past": (0, 2),
    "num_future": (0, 2),
    "num_static": (0, 2),
    "num_layers": (1, 2),
    "categories": (False, True),
    "patch": (1, 3, 4),
}


def drawn(seed: int) -> dict[str, Any]:
    """A random configuration that exists."""
    rng = np.random.default_rng(seed)
    options = {name: values[rng.integers(len(values))] for name, values in CHOICES.items()}
    first = options["num_targets"]
    has_names = options.pop("categories")
    places = [first] * (options["num_past"] > 0)
    places += [first + options["num_past"] + 1] * (options["num_future"] > 0)
    if has_names:
        options["categories"] = tuple((place, 4) for place in places)
        options["static_categories"] = ((1, 3),) if options["num_static"] else ()
    if options["bidirectional"]:
        options["decoder"] = "direct"
    if options["stateful"]:
        options |= {"decoder": "direct", "bidirectional": False}
        options["normalize"] = "last" if options["normalize"] == "standard" else "none"
        options["output"] = "point" if options["output"][0] == "n" else options["output"]
    return options


@pytest.mark.parametrize("seed", range(24))
def test_a_graph_gives_what_its_source_gives(seed: int, tmp_path: Path) -> None:
    stored = stored_forecaster(seed, **drawn(seed))
    levels = LEVELS_ASKED if stored.network.config.output in ("point", "quantiles") else ()
    check(stored, tmp_path, levels)


def test_every_choice_is_drawn() -> None:
    configurations = [{"categories": (), **drawn(seed)} for seed in range(24)]
    for name, values in CHOICES.items():
        chosen = {c[name] != () if name == "categories" else c[name] for c in configurations}
        assert chosen == set(values)


@pytest.mark.parametrize("is_stateful", [False, True])
@pytest.mark.parametrize("patch", [1, 3])
def test_the_last_present_value_is_subtracted(
    is_stateful: bool, patch: int, tmp_path: Path
) -> None:
    stored = stored_forecaster(
        stateful=is_stateful, patch=patch, num_targets=2, has_missing=True, normalize="last"
    )
    check(stored, tmp_path)


@pytest.mark.parametrize("weight_format", ["fp16", "int8"])
def test_weights_stay_in_their_format(weight_format: str, tmp_path: Path) -> None:
    stored = stored_forecaster(
        bidirectional=True, num_layers=2, num_past=1, num_future=1, categories=((1, 4), (2, 3)),
        num_static=1,
    )  # fmt: skip
    weights = in_format(weights_of(stored), weight_format)
    state = {name: torch.from_numpy(w) for name, w in as_floats(weights).items()}
    stored.network.load_state_dict(state, strict=False)
    data = write_onnx(forecast_graph(stored, weights, LEVELS_ASKED))
    dtype = {"fp16": onnx.TensorProto.FLOAT16, "int8": onnx.TensorProto.INT8}[weight_format]
    arrays = {a.name: a.data_type for a in onnx.load_from_string(data).graph.initializer}
    matrices = [n for n, kind in arrays.items() if kind == dtype]
    assert {n.split(".")[0] for n in matrices} >= {"lstm", "embed", "head", "cell_ih", "known"}
    inputs = inputs_of(stored, 3)
    expected = expected_of(stored, inputs, LEVELS_ASKED)
    for results in results_of(data, inputs, tmp_path):
        for name, due in expected.items():
            assert error_of(stored, results[name], due) < 1e-5


def test_a_missing_target_of_a_model_without_missing_values_is_seen(tmp_path: Path) -> None:
    for channels, rest in (("shared", False), ("joint", True)):
        stored = stored_forecaster(num_targets=2, num_past=1, channels=channels)
        inputs = inputs_of(stored, 2)
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


def test_unknown_names_are_numbers_outside_the_known_ones(tmp_path: Path) -> None:
    stored = stored_forecaster(num_past=1, categories=((1, 4),))
    data = write_onnx(forecast_graph(stored, weights_of(stored)))
    inputs = inputs_of(stored, 4)
    inputs["past"][:, :, 1] = np.array([4, np.nan, 1e9, -7])[:, None]
    inputs["past"][:, :, 0] = inputs["past"][0, :, 0]
    for results in results_of(data, inputs, tmp_path):
        assert np.isfinite(results["forecast"]).all()
        assert (results["forecast"] == results["forecast"][:1]).all()


def test_columns_far_from_zero_lose_no_digits(tmp_path: Path) -> None:
    stored = stored_forecaster(num_targets=1, num_past=1, num_static=1, normalize="none")
    stored.scaler.mean[1], stored.scaler.std[1] = 40_000.123, 5.0
    stored.static_scale[0] = 40_000.123, 5.0
    check(stored, tmp_path)
    stored.scaler.mean[0], stored.scaler.std[0] = 40_000.123, 5.0
    inputs = inputs_of(stored, 3)
    results = results_of(write_onnx(forecast_graph(stored, weights_of(stored))), inputs, tmp_path)
    due = expected_of(stored, inputs, ())["forecast"]
    last_digit = np.spacing(np.float32(40_000)) / 5
    for result in results:
        assert error_of(stored, result["forecast"], due) <= 1.01 * last_digit


def test_what_cannot_be_exported_is_named() -> None:
    stored = stored_forecaster(num_past=1)
    stored.scaler.mean[1], stored.scaler.std[1] = 1e9, 1.0
    with pytest.raises(ConfigError, match="'c1' is so large beside its range that float32"):
        forecast_graph(stored, weights_of(stored))
    for output in ("student_t", "negative_binomial"):
        stored = stored_forecaster(output=output)
        with pytest.raises(ConfigError, match=f"output='{output}' has no quantiles"):
            forecast_graph(stored, weights_of(stored), (0.5,))
    with pytest.raises(ConfigError, match="outside"):
        forecast_graph(stored_forecaster(), {}, (0.001,))


def test_the_graph_says_what_it_reads() -> None:
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
def test_etth1(has_missing: bool, tmp_path: Path) -> None:
    """All seven columns, on the last windows of the table."""
    table = ETTH1
    if not table.exists():
        pytest.skip("there is no ETTh1.csv")
    rows = np.loadtxt(table, delimiter=",", skiprows=1, usecols=range(1, 8))
    stored = stored_forecaster(
        num_targets=7, input_size=48, horizon=24, patch=12, hidden_size=16,
        has_missing=has_missing, output="quantiles",
    )  # fmt: skip
    stored.scaler.mean[:], stored.scaler.std[:] = rows.mean(0), rows.std(0)
    windows = np.stack([rows[-48 - 24 * k :][:48] for k in range(8)]).astype(np.float32)
    if has_missing:
        windows[np.random.default_rng(0).random(windows.shape) < 0.3] = np.nan
    levels = (0.025, 0.1, 0.5, 0.9, 0.975)
    data = write_onnx(forecast_graph(stored, weights_of(stored), levels))
    expected = expected_of(stored, {"past": windows}, levels)
    for results in results_of(data, {"past": windows}, tmp_path):
        for name, due in expected.items():
            assert error_of(stored, results[name], due) < 1e-5
