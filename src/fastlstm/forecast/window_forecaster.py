"""Forecasts of windows of numbers, without a table; the server and exported models use it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastlstm.forecast.data.names import canonical
from fastlstm.forecast.data.scaled_windows import CONSTANT
from fastlstm.forecast.files import StoredForecaster, read_forecaster
from fastlstm.forecast.model.outputs import NegativeBinomial, StudentT
from fastlstm.system.fields import Device
from fastlstm.system.hardware import check_device

Floats = NDArray[np.floating]

_LEAST_STEPS = 1024
"""Least number of float32 values within a column's standard deviation."""


@dataclass(frozen=True)
class InputColumns:
    """A group of input columns.

    Attributes:
        names: columns in the network's order.
        codes: for each categorical column, the number of every known value.
    """

    names: tuple[str, ...]
    codes: Mapping[str, Mapping[str, int]]

    @property
    def numbers(self) -> tuple[str, ...]:
        """Columns of numbers."""
        return tuple(name for name in self.names if name not in self.codes)

    @property
    def categorical(self) -> tuple[str, ...]:
        """Columns of names."""
        return tuple(name for name in self.names if name in self.codes)


class WindowForecaster:
    """Forecasts windows in the table's units.

    Attributes:
        name: name of its directory.
        input_size: L, rows of a window.
        horizon: h, steps ahead.
        targets: C names.
        past: columns of the input rows: targets, past and future covariates.
        static: columns with one value per series.
        series: the column of series, with the names known at fit; empty if there is one series.
        note: line about the format of the weights, or None.
        may_miss: values of past and future may be NaN; static values may always be NaN.
        frequency: step of the rows, such as "1 hour".
        dtype: dtype of inputs and outputs: float32, or float64 if float32 would lose digits of a
            column that is large compared with its range.
    """

    dtype: np.dtype[np.floating]

    def __init__(self, stored: StoredForecaster, name: str) -> None:
        self.name, self.stored = name, stored
        config = stored.network.config
        self.input_size, self.horizon = config.input_size, config.horizon
        self.may_miss, self.frequency = config.has_missing, str(stored.schema.timeline.frequency)
        columns = stored.schema.columns
        self.targets = columns[: config.num_targets]
        self.past = self._columns(columns)
        self.future = self._columns(columns[len(columns) - config.num_future :])
        self.static = self._columns(stored.config.static)
        known = () if stored.series is None else stored.series.names
        codes = {name: number for number, name in enumerate(known)}
        column = stored.config.series or "unique_id"
        self.series = InputColumns((column,) if known else (), {column: codes} if known else {})
        self.dtype = np.dtype(np.float32)
        if float64_columns(stored):
            self.dtype = np.dtype(np.float64)
        self.note = None if stored.compression is None else stored.compression.note

    def _columns(self, names: tuple[str, ...]) -> InputColumns:
        known = self.stored.schema.categories
        codes = {
            name: {canonical(value): number for number, value in enumerate(known[name])}
            for name in names
            if name in known
        }
        return InputColumns(names, codes)

    @torch.no_grad()
    def run(
        self, past: Floats, future: Floats | None = None, statics: Floats | None = None
    ) -> WindowForecasts:
        """Forecasts the h steps after each window.

        Args:
            past: shape ``(B, L, columns)``, in the table's units, of `dtype`; names as numbers.
            future: shape ``(B, h, future columns)``, or None.
            statics: shape ``(B, S)``, or None; with several series the last column may be the
                number of the series, NaN if unknown at fit.
        """
        num_static, places = self.stored.network.config.num_static, None
        if statics is not None and statics.shape[1] > num_static:
            places = torch.from_numpy(np.nan_to_num(statics[:, -1], nan=-1).astype(np.int64))
            statics = statics[:, :-1] if num_static else None
        ahead, static = (None if v is None else torch.from_numpy(v) for v in (future, statics))
        return self.forecasts(torch.from_numpy(past), ahead, static, places)

    def forecasts(
        self,
        past: Tensor,
        future: Tensor | None = None,
        statics: Tensor | None = None,
        places: Tensor | None = None,
    ) -> WindowForecasts:
        """Computes `run` with functions that `exchange.trace` can export; `places` are the numbers
        of the series, -1 if unknown.

        If the model has no missing values, a missing target makes its own forecast NaN; with joint
        channels it makes the forecasts of all targets NaN.
        """
        stored, config = self.stored, self.stored.network.config
        scales = stored.scaler.mean, stored.scaler.std
        center, unit = (torch.from_numpy(scale)[None, None] for scale in scales)
        C, F = config.num_targets, config.num_future
        mean, std = center[0, :, :C], unit[0, :, :C]
        if stored.series is not None:
            mean, std = stored.series.of_windows(past[..., :C].double(), places)
        targets = ((past[..., :C].double() - mean[:, None]) / std[:, None]).float()
        unknown = None
        if not config.has_missing:
            unknown = (targets * 0.0).sum(1, keepdim=True)
            unknown = unknown.sum(-1, keepdim=True) if config.channels == "joint" else unknown
            targets = targets.nan_to_num(0.0)
        covariates = ((past[..., C:].double() - center[..., C:]) / unit[..., C:]).float()
        values = torch.cat([targets, covariates], -1)
        shape = past.shape[0], self.horizon, past.shape[2] - (0 if future is None else F)
        ahead = values.new_full(shape, math.nan)
        if future is not None:
            first = past.shape[2] - F
            known = ((future.double() - center[..., first:]) / unit[..., first:]).float()
            ahead = torch.cat([ahead, known], -1)
        values, static = torch.cat([values, ahead], 1), None
        if statics is not None:
            middle, deviation = torch.from_numpy(stored.static_scale).T
            static = ((statics.double() - middle) / deviation).float()
        parameters = stored.network.answers(values, static)
        if unknown is not None:
            parameters = parameters + unknown[..., None]
        width = stored.calibration.width(values, config, places)
        return WindowForecasts(stored, parameters, width, self.dtype, mean, std)


@dataclass(frozen=True)
class WindowForecasts:
    """Forecasts of B windows.

    Attributes:
        parameters: network output, shape ``(B, h, C, num_parameters)``.
        width: unit of each window's errors, ``(B, C)``, scaled; see `Calibration.width`.
        mean: level of the targets, shape ``(B, C)`` or ``(1, C)``, float64.
        std: spread of the targets, same shape.
    """

    stored: StoredForecaster
    parameters: Tensor
    width: Tensor
    dtype: np.dtype[np.floating]
    mean: Tensor
    std: Tensor

    def part(self, first: int, count: int) -> WindowForecasts:
        """Returns the forecasts of `count` windows from `first` on."""
        rows = slice(first, first + count)
        mean, std = (s if len(s) == 1 else s[rows] for s in (self.mean, self.std))
        return WindowForecasts(
            self.stored, self.parameters[rows], self.width[rows], self.dtype, mean, std
        )

    def arrays(self, levels: Sequence[float] = ()) -> dict[str, Floats]:
        """Returns `outputs` in `dtype`: `forecast` ``(B, h, C)``, `quantiles` ``(B, h, C, Q)`` ….
        Raises ConfigError: a level outside the calibrated range."""
        with np.errstate(over="ignore"):
            return {
                name: found.numpy().astype(self.dtype)
                for name, found in self.outputs(levels).items()
            }

    def outputs(self, levels: Sequence[float] = ()) -> dict[str, Tensor]:
        """Returns the outputs of an exported forecaster: `forecast`, `quantiles` if there are
        levels, and the parameters of a distribution."""
        output, parameters = self.stored.network.output, self.parameters
        mean, std = self.mean[:, None], self.std[:, None]
        found = {"forecast": output.center(parameters).double() * std + mean}
        if isinstance(output, StudentT):
            degrees, _, scale = output.read(parameters)
            found |= {"degrees_of_freedom": degrees, "scale": scale.double() * std}
        if isinstance(output, NegativeBinomial):
            found["dispersion"] = parameters[..., 1]
        if len(levels):
            scaled = self.stored.calibration.quantiles(output, parameters, self.width, levels)
            scaled = self.stored.network.bounded(scaled)
            found["quantiles"] = scaled.double() * std[..., None] + mean[..., None]
        return found


def float64_columns(stored: StoredForecaster) -> list[str]:
    """Returns the columns so large compared with their range that float32 loses digits."""
    columns = np.stack([stored.scaler.mean, stored.scaler.std], 1)
    mean, std = np.concatenate([columns, stored.static_scale]).T
    names = [*stored.schema.columns, *stored.config.static]
    is_large = needs_float64(mean, std)
    if (series := stored.series) is not None:
        is_varied = series.std > 2 * CONSTANT * np.abs(series.mean)
        of_series = needs_float64(series.mean, series.std) & is_varied
        is_large[: series.mean.shape[1]] = of_series.any(0)
    return [names[place] for place in np.flatnonzero(is_large)]


def needs_float64(mean: NDArray[np.float64], std: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Returns which columns are too large for float32, by their means and deviations."""
    is_large: NDArray[np.bool_] = _LEAST_STEPS * np.spacing(np.abs(mean).astype(np.float32)) > std
    return is_large


def load_window_forecaster(
    path: str | os.PathLike[str], device: Device = "cpu"
) -> WindowForecaster:
    """Loads a run or what `Forecaster.save` wrote; computes on the CPU unless `device` is "cuda".

    Raises the errors of `read_forecaster`, and ConfigError if there is no GPU.
    """
    check_device(device)
    stored = read_forecaster(Path(path))
    if device == "cuda":
        stored.network.to(device)
    return WindowForecaster(stored, Path(path).resolve().name)
