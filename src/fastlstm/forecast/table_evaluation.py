"""The errors of a forecaster on a part of a table, in blocks of windows that anyone may compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fastlstm.forecast.backtest import backtest, windows_at_once
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.error_measures import QuantileScores, Scores
from fastlstm.forecast.data.naive import seasonal_error
from fastlstm.forecast.data.scaled_windows import ScaledWindows
from fastlstm.forecast.data.splits import Split
from fastlstm.forecast.data.window_index import WindowIndex
from fastlstm.forecast.evaluation import INTERVALS, figures_of
from fastlstm.forecast.files import StoredForecaster

FORECASTS = ("forecaster", "naive", "seasonal_naive")


class EvaluationSums:
    """Sums over windows, which add up to the same figures in any order.

    Args:
        quantiles: levels, for the pinball loss of each.
    """

    def __init__(self, quantiles: Sequence[float] = ()) -> None:
        self.scores: Mapping[str, Scores] = {name: Scores() for name in FORECASTS}
        self.quantiles = QuantileScores(quantiles, INTERVALS)

    def figures(self) -> dict[str, dict[str, float]]:
        """Returns what `Forecaster.backtest` returns."""
        return figures_of(self.scores, self.quantiles)

    def to_json(self) -> dict[str, Any]:
        """Returns the sums as JSON values."""
        scores = {name: score.to_json() for name, score in self.scores.items()}
        return {"scores": scores, "quantiles": self.quantiles.to_json()}

    def add_json(self, values: Mapping[str, Any]) -> None:
        """Adds what `to_json` of another with the same quantiles returned."""
        for name, score in self.scores.items():
            score.add_json(values["scores"][name])
        self.quantiles.add_json(values["quantiles"])


class TableEvaluation:
    """An evaluation: forecasts from every origin of a part of a table.

    Args:
        stored: the forecaster.
        dataset: the table.
        inputs: its scaled windows.
        split: its parts.
        windows: those of the part to evaluate.
        season: steps of the seasonal naive forecast and of mase.
        quantiles: levels, for the pinball loss of each.
        is_scaled: report errors in standard deviations of the training rows.

    Attributes:
        dataset: as given.
        num_blocks: blocks of windows, each computed in one pass of the network.
        season: as given.
    """

    def __init__(
        self,
        stored: StoredForecaster,
        dataset: SeriesDataset,
        inputs: ScaledWindows,
        split: Split,
        windows: WindowIndex,
        season: int,
        quantiles: Sequence[float] = (),
        is_scaled: bool = False,
    ) -> None:
        self.dataset = dataset
        self._stored, self._inputs, self._split, self._windows = stored, inputs, split, windows
        self.season, self._quantiles, self._is_scaled = season, tuple(quantiles), is_scaled
        sums = EvaluationSums(quantiles)
        self._size = windows_at_once(stored.network.config, sums.quantiles)
        self.num_blocks = -(-len(windows) // self._size)

    def sums(self, first: int = 0, end: int | None = None) -> EvaluationSums:
        """Returns the sums of the blocks ``first .. end - 1``; default all."""
        sums = EvaluationSums(self._quantiles)
        last = len(self._windows) if end is None else min(end * self._size, len(self._windows))
        if first * self._size >= last:
            return sums
        rows, segments = self._windows.locate(np.arange(first * self._size, last))
        table, num_targets = self._inputs.table, self._stored.network.config.num_targets
        low, high = table.segments.series[segments[[0, -1]]].tolist()
        ends = self._split.train_ends
        naive_error = seasonal_error(table, ends, num_targets, self.season, (low, high))
        sums.scores = backtest(
            self._stored, self._inputs, rows, self.season, sums.quantiles, naive_error,
            self._is_scaled,
        )  # fmt: skip
        return sums
