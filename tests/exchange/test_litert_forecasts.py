"""Forecasters as LiteRT files give what `WindowForecaster` gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from exchange.test_forecast_graph import (
    ETTH1,
    LEVELS_ASKED,
    drawn,
    error_of,
    expected_of,
    inputs_of,
    stored_forecaster,
    weights_of,
)
from fastlstm.exchange.forecast_graph import forecast_graph
from fastlstm.exchange.litert_format import LitertRunner, write_litert
from fastlstm.forecast.files import StoredForecaster
from fastlstm.runs.weight_formats import as_floats, in_format


def runner_of(
    path: Path, stored: StoredForecaster, weights: Any, levels: tuple[float, ...]
) -> LitertRunner:
    file = path / "model.tflite"
    file.write_bytes(write_litert(forecast_graph(stored, weights, levels)))
    return LitertRunner(file)


@pytest.mark.parametrize("seed", range(24))
def test_a_forecaster_gives_what_its_source_gives(seed: int, tmp_path: Path) -> None:
    stored = stored_forecaster(seed, **drawn(seed))
    levels = LEVELS_ASKED if stored.network.config.output in ("point", "quantiles") else ()
    runner = runner_of(tmp_path, stored, weights_of(stored), levels)
    for B in (1, 5, 1):
        inputs = inputs_of(stored, B, seed=B)
        results, expected = runner.run(inputs), expected_of(stored, inputs, levels)
        assert results.keys() == expected.keys()
        for name, due in expected.items():
            assert error_of(stored, results[name], due) < 1e-5, name


@pytest.mark.parametrize(("weight_format", "limit"), [("fp16", 1e-5), ("int8", 0.02)])
def test_weights_in_their_format(weight_format: str, limit: float, tmp_path: Path) -> None:
    stored = stored_forecaster(
        bidirectional=True, num_layers=2, num_past=1, num_future=1, categories=((1, 4), (2, 3)),
        num_static=1,
    )  # fmt: skip
    weights = in_format(weights_of(stored), weight_format)
    state = {name: torch.from_numpy(w) for name, w in as_floats(weights).items()}
    stored.network.load_state_dict(state, strict=False)
    inputs = inputs_of(stored, 64)
    results = runner_of(tmp_path, stored, weights, ()).run(inputs)
    due = expected_of(stored, inputs, ())["forecast"]
    assert error_of(stored, results["forecast"], due) < limit


@pytest.mark.parametrize("has_missing", [False, True])
def test_etth1(has_missing: bool, tmp_path: Path) -> None:
    """All seven columns, on the last windows of the table, 30 patches each."""
    table = ETTH1
    if not table.exists():
        pytest.skip("there is no ETTh1.csv")
    rows = np.loadtxt(table, delimiter=",", skiprows=1, usecols=range(1, 8))
    stored = stored_forecaster(
        num_targets=7, input_size=360, horizon=24, patch=12, hidden_size=16,
        has_missing=has_missing, output="quantiles",
    )  # fmt: skip
    stored.scaler.mean[:], stored.scaler.std[:] = rows.mean(0), rows.std(0)
    windows = np.stack([rows[-360 - 24 * k :][:360] for k in range(8)]).astype(np.float32)
    if has_missing:
        windows[np.random.default_rng(0).random(windows.shape) < 0.3] = np.nan
    levels = (0.025, 0.1, 0.5, 0.9, 0.975)
    results = runner_of(tmp_path, stored, weights_of(stored), levels).run({"past": windows})
    for name, due in expected_of(stored, {"past": windows}, levels).items():
        assert error_of(stored, results[name], due) < 1e-5
