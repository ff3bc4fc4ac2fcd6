"""Forecasters as LiteRT files give what `WindowForecaster` gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fastlstm.exchange.forecast_graph import forecast_graph, random_windows
from fastlstm.exchange.litert_format import LitertRunner, write_litert
from fastlstm.forecast.files import StoredForecaster
from fastlstm.runs.weight_formats import as_floats, in_format
from stored_forecasters import (
    LEVELS_ASKED,
    drawn,
    error_of,
    expected_of,
    stored_forecaster,
    weights_of,
)


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
        inputs = random_windows(stored, B)
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
    inputs = random_windows(stored, 64)
    results = runner_of(tmp_path, stored, weights, ()).run(inputs)
    due = expected_of(stored, inputs, ())["forecast"]
    assert error_of(stored, results["forecast"], due) < limit
