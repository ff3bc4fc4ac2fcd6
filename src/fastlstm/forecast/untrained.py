"""A forecaster before training: every choice made, initial weights, the scaler of its table."""

from __future__ import annotations

import dataclasses

import torch

from fastlstm.forecast.calibration import Calibration
from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.data.dataset import SeriesDataset
from fastlstm.forecast.data.series_scale import SeriesScale
from fastlstm.forecast.data.splits import Scaler, Split, fit_scaler
from fastlstm.forecast.files import StoredForecaster
from fastlstm.forecast.model.network import ForecastNetwork
from fastlstm.forecast.plan import LEARNING_RATES, choose_architecture
from fastlstm.forecast.table_schema import TableSchema, static_scale


def untrained_forecaster(
    config: ForecastConfig, given: ForecastConfig, dataset: SeriesDataset, split: Split
) -> StoredForecaster:
    """Returns a forecaster with every choice made and initial weights."""
    sizes = choose_architecture(config, dataset, split)
    if config.learning_rate is None:
        config = dataclasses.replace(config, learning_rate=LEARNING_RATES[config.optimizer])
    config = dataclasses.replace(config, input_size=sizes.input_size, patch=sizes.patch)
    torch.default_generator.manual_seed(config.seed)
    network = ForecastNetwork(sizes)
    network.lstm.strict = config.strict_kernels
    scaler, series = fitted_scaler(config, dataset, split), None
    if len(dataset.series) > 1 and not network.output.counts:
        of_all = scaler.mean[: sizes.num_targets], scaler.std[: sizes.num_targets]
        series = SeriesScale.fit(dataset.table, dataset.series, split.train_ends, of_all)
    return StoredForecaster(
        config, given, network, scaler, Calibration.none(sizes),
        static_scale(dataset), TableSchema.of(dataset, sizes.has_missing), dataset.key,
        series=series,
    )  # fmt: skip


def fitted_scaler(config: ForecastConfig, dataset: SeriesDataset, split: Split) -> Scaler:
    """Returns the scaler of a table's training rows."""
    columns, roles = dataset.table.columns, dataset.roles
    unscaled = [columns.index(name) for name in roles.categorical if name in columns]
    if config.output == "negative_binomial":
        unscaled += range(len(roles.target))
    return fit_scaler(dataset.table, split.train_ends, unscaled)
