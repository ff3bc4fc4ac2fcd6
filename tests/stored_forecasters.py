"""Forecasters with random weights, and what they forecast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastlstm.forecast.calibration import LEVELS, Calibration
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.splits import Scaler
from fastlstm.forecast.data.timeline import Frequency, Timeline
from fastlstm.forecast.files import StoredForecaster
from fastlstm.forecast.model.network import FIXED, ForecasterConfig, ForecastNetwork
from fastlstm.forecast.model.outputs import NegativeBinomial, StudentT
from fastlstm.forecast.table_schema import TableSchema
from fastlstm.forecast.window_forecaster import WindowForecaster

ETTH1 = Path(__file__).parents[2] / "shared/data/ETTh1.csv"
"""Beside a checkout, where there is one."""
SIZES: dict[str, Any] = {
    "input_size": 12, "horizon": 7, "patch": 3, "hidden_size": 8, "embed_size": 6,
}  # fmt: skip
LEVELS_ASKED = (0.005, 0.007, 0.07, 0.5, 0.8, 0.95, 0.992, 0.995)
"""Calibrated ones and others between."""


def stored_forecaster(seed=0, scale=3.0, **options):
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
    for name, buffer in network.named_buffers():
        if name.startswith(FIXED) and buffer.is_floating_point():
            buffer.copy_(torch.randn_like(buffer) / buffer.shape[-1])
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
    timeline = Timeline(Frequency(1, "rows"), None, None, config.has_missing)
    schema = TableSchema(columns, timeline, categories)
    given = ForecastConfig(horizon=config.horizon, static=statics)
    calibration = Calibration(torch.from_numpy(residuals).float())
    return StoredForecaster(
        given, given, network, Scaler(mean, std), calibration, static, schema, ""
    )


def expected_of(stored, inputs, levels):
    """What the source gives."""
    model = WindowForecaster(stored, "model")
    parts = [inputs[name] for name in ("static", "series") if name in inputs]
    statics = np.column_stack(parts) if parts else None
    forecasts = model.run(inputs["past"], inputs.get("future"), statics)
    found = forecasts.arrays(levels)
    names = ("forecast", "quantiles") if levels else ("forecast",)
    expected: dict[str, NDArray[Any]] = {name: found[name] for name in names}
    output, parameters = stored.network.output, forecasts.parameters
    if isinstance(output, StudentT):
        degrees, _, scale = output.read(parameters)
        std = stored.scaler.std[: scale.shape[-1]]
        expected |= {"degrees_of_freedom": degrees.numpy(), "scale": scale.numpy() * std}
    if isinstance(output, NegativeBinomial):
        expected["dispersion"] = parameters[..., 1].numpy()
    return expected


def error_of(stored, result, expected):
    """Largest difference in deviations of the column."""
    assert result.shape == expected.shape
    std = stored.scaler.std[: stored.network.config.num_targets]
    std = std if result.ndim == 3 else std[:, None]
    is_same = (result == expected) | (np.isnan(result) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        return float(np.where(is_same, 0, abs(result - expected) / std).max())


def weights_of(stored):
    """The weights of its network by name."""
    return {name: p.detach().numpy() for name, p in stored.network.named_parameters()}


CHOICES: dict[str, tuple[Any, ...]] = {
    "normalize": ("last", "standard", "none"),
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
    "linear": (False, True),
    "effects": (False, True),
}


def drawn(seed):
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
    if options["stateful"]:
        options["bidirectional"] = False
        options["normalize"] = "last" if options["normalize"] == "standard" else "none"
        options["output"] = "point" if options["output"][0] == "n" else options["output"]
    options["linear"] &= not options["stateful"] and options["output"] != "negative_binomial"
    options["effects"] &= options["linear"] and options["num_future"] > 0
    return options
