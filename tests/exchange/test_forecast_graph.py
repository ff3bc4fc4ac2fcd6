"""Forecasters as graphs give what `WindowForecaster` gives, in ONNX Runtime and onnx's evaluator."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from fastlstm.errors import ConfigError
from fastlstm.exchange.forecast_graph import forecast_graph
from fastlstm.exchange.onnx_format import OnnxRunner, write_onnx
from fastlstm.forecast.calibration import LEVELS, Calibration
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.splits import Scaler
from fastlstm.forecast.data.timeline import Frequency
from fastlstm.forecast.files import StoredForecaster
from fastlstm.forecast.model.config import ForecasterConfig
from fastlstm.forecast.model.network import ForecastNetwork
from fastlstm.forecast.table_schema import TableSchema
from fastlstm.forecast.window_forecaster import WindowForecaster
from fastlstm.runs.weight_formats import as_floats, in_format

SIZES: dict[str, Any] = {
    "input_size": 12, "horizon": 7, "patch": 3, "hidden_size": 8, "embed_size": 6,
}  # fmt: skip
LEVELS_ASKED = (0.005, 0.07, 0.5, 0.8, 0.95, 0.995)
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
    frequency = Frequency.from_json({"count": 1, "unit": "hour"}) if False else None
    schema = TableSchema(columns, frequency, None, categories, config.has_missing)  # type: ignore
    options = ForecastConfig(horizon=config.horizon, static=statics)
    calibration = Calibration(torch.from_numpy(residuals).float())
    return StoredForecaster(
        options, options, network, Scaler(mean, std), calibration, static, schema, ""
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
    expected = {"forecast": forecasts.values()}
    if levels:
        expected["quantiles"] = forecasts.quantiles(levels)
    return expected


def results_of(data: bytes, inputs: Mapping[str, NDArray[Any]], path: Path) -> list[dict[str, Any]]:
    """What ONNX Runtime and onnx's reference evaluator give."""
    file = path / "model.onnx"
    file.write_bytes(data)
    model = onnx.load_from_string(data)
    names = [output.name for output in model.graph.output]
    reference = ReferenceEvaluator(model).run(None, dict(inputs))
    return [OnnxRunner(file).run(inputs), dict(zip(names, reference, strict=True))]


def error_of(stored: StoredForecaster, result: NDArray[Any], expected: NDArray[Any]) -> float:
    """Largest difference in deviations of the column."""
    assert result.shape == expected.shape
    std = stored.scaler.std[: stored.network.config.num_targets]
    std = std if result.ndim == 3 else std[:, None]
    is_same = (result == expected) | (np.isnan(result) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        return float(np.where(is_same, 0, abs(result - expected) / std).max())


def check(stored: StoredForecaster, path: Path, levels: tuple[float, ...] = ()) -> None:
    """Compares the written file with its source, at two numbers of windows."""
    weights = {name: p.detach().numpy() for name, p in stored.network.named_parameters()}
    data = write_onnx(forecast_graph(stored, weights, levels))
    for B in (1, 5):
        inputs = inputs_of(stored, B, seed=B)
        expected = expected_of(stored, inputs, levels)
        for results in results_of(data, inputs, path):
            assert results.keys() >= expected.keys()
            for name, due in expected.items():
                assert error_of(stored, results[name], due) < 1e-5, name


SWEEP = list(
    itertools.product(("last", "standard", "none"), ("direct", "autoregressive"), (False, True))
)


@pytest.mark.parametrize(("normalize", "decoder", "has_missing"), SWEEP)
def test_points(normalize: str, decoder: str, has_missing: bool, tmp_path: Path) -> None:
    options = {"normalize": normalize, "decoder": decoder, "has_missing": has_missing}
    check(stored_forecaster(num_targets=2, **options), tmp_path)
