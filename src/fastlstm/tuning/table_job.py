"""Forecasters as `tune` sees them."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.model.network import ForecastNetwork
from fastlstm.forecast.plan import HIDDEN_SIZES, longest_segments
from fastlstm.forecast.size_plan import ENOUGH_STEPS, TRAINING_SHARE
from fastlstm.forecast.step_time import step_seconds
from fastlstm.forecast.task import ForecastTask
from fastlstm.forecast.train import train_forecaster
from fastlstm.forecast.untrained import untrained_forecaster
from fastlstm.runs.weight_formats import encode_weights
from fastlstm.training.schedule import StopCriterion
from fastlstm.tuning import table_moves as moves
from fastlstm.tuning.job import Default, Job, Show, in_turns, names_of, open_axes
from fastlstm.tuning.stages import SPEED_AXES, fastest_settings, sizes_within_limits

if TYPE_CHECKING:
    from fastlstm.forecast.model.config import ForecasterConfig
    from fastlstm.runs.events import Event, Observer
    from fastlstm.training.callbacks import Callback
    from fastlstm.training.trainer import Trainer
    from fastlstm.tuning.halving import Changes
    from fastlstm.tuning.size_limits import ModelCost, SizeLimits
    from fastlstm.tuning.speed_surface import SpeedSurface
    from fastlstm.tuning.tune import Search

_LATENCY_S = 0.1
_COMPARED = 2048


class TrialTask(ForecastTask):
    """A forecaster that is trained to be compared: every one is scored on the same windows.

    The test part is not looked at, and quantiles are calibrated on few windows.
    """

    min_scored = max_scored = _COMPARED

    def finish_s(self, unit_s: float) -> float:
        return self.closing.session.report_s()

    def finish(self, trainer: Trainer) -> Event:
        self.closing.publish(self.model.cpu().state_dict())
        trainer.best.set_published()
        return {}


class TableJob(Job):
    """Forecasters of equal time are compared by the validation loss that they ended at.

    No law says what a longer run of a table gives (docs/predict.md).
    """

    axes = tuple(moves.FIELDS)
    fields = moves.FIELDS
    size, per = "hidden_size", "forecast"

    def train(
        self,
        source: Any,
        config: ForecastConfig,
        *,
        given: Collection[str],
        out: Path,
        observers: Sequence[Observer] = (),
        callbacks: Sequence[Callback] = (),
    ) -> None:
        train_forecaster(
            source, config, out=out, given=given, observers=observers, callbacks=callbacks,
            make_task=TrialTask, stop=self.stop,
        )  # fmt: skip

    def prepare(
        self, trainer: Trainer, given: Collection[str], search: Search, show: Show
    ) -> Default:
        task = trainer.task
        assert isinstance(task, ForecastTask)
        closing, axes = task.closing, open_axes(search.axes, given, self.fields)
        dataset, split, network = closing.dataset, closing.split, task.model.config
        config, sizes = self._sizes(closing.stored.config, network, axes, search.limits, show)
        rows = int(longest_segments(dataset.table, split).max()) - config.horizon
        found = moves.values_around(config, task.loader.num_windows, rows)
        values = {axis: v for axis, v in found.items() if axis in axes}
        if "size" in axes:
            fit = [size["hidden_size"] for size in sizes if size["refusal"] is None]
            values["size"] = [config.hidden_size, *(n for n in fit if n != config.hidden_size)]
        default, speeds = names_of(config, moves.OPTIONS), list[dict[str, Any]]()
        ordered = {axis: values[axis] for axis in moves.FIELDS if axis in values}
        changes = in_turns(ordered)

        def window_s(cell: dict[str, Any]) -> float:
            options = moves.options_of(default, {n: v for n, v in cell.items() if n in values})
            timed = replace(config, **{**options, "precision": cell["precision"]})
            untrained = untrained_forecaster(timed, closing.stored.given, dataset, split)
            return step_seconds(untrained, dataset, split) / (timed.batch_size * timed.accumulate)

        if next(task.model.parameters()).device.type == "cpu":
            timed = {axis: v for axis, v in values.items() if axis in moves.TIMED}
            best, surface = fastest_settings(default, axes, timed, window_s, "windows", show)
            default, speeds = {**default, **best}, surface.to_list("windows")
            every, changes = changes, with_enough_steps(changes, surface, default, config)
            if few := [self.label_of(change) for change in every if change not in changes]:
                show("too few steps", f"not tried: {'; '.join(few)}")
        return Default(default, changes, speeds, sizes)

    def _sizes(
        self, config: ForecastConfig, network: ForecasterConfig, axes: Collection[str],
        limits: SizeLimits, show: Show,
    ) -> tuple[ForecastConfig, list[dict[str, Any]]]:  # fmt: skip
        """Returns the configuration with a size that keeps the limits, and every size's cost."""
        wanted = [config.hidden_size]
        if "size" in axes:
            wanted = moves.sizes_around(config.hidden_size)
            if limits.has_any:
                wanted += [size for size in reversed(HIDDEN_SIZES) if size < min(wanted)]

        def cost(size: dict[str, Any]) -> ModelCost:
            return forecast_cost(replace(network, **size), limits)

        sizes = sizes_within_limits(
            self, [{"hidden_size": size} for size in wanted], cost, limits, show
        )
        fit = [size["hidden_size"] for size in sizes if size["refusal"] is None]
        return replace(config, hidden_size=nearest(fit, config.hidden_size)), sizes

    def options_of(self, default: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
        return moves.options_of(default, changes)

    def label_of(self, changes: Changes) -> str:
        return moves.label_of(changes)

    def result(
        self, start: Event, end: Event, options: Mapping[str, Any], default: Default,
        seconds: float, budget_s: float,
    ) -> tuple[float, float]:  # fmt: skip
        return end["best_loss"], end["best_loss"]

    def told(self, measured: float, expected: float) -> str:
        return self.figure(measured)

    def figure(self, value: float, has_unit: bool = True) -> str:
        return f"{value:.4f}" + " validation loss" * has_unit


def with_enough_steps(
    changes: list[dict[str, Any]], surface: SpeedSurface, default: Mapping[str, Any],
    config: ForecastConfig,
) -> list[dict[str, Any]]:  # fmt: skip
    """Returns the changes without those that leave a budget too few steps: they never pay.

    Args:
        changes: of the default.
        surface: seconds per window.
        default: its options.
        config: of the default.
    """
    budget_s = StopCriterion.of(config, 1).budget_s
    if budget_s is None:
        return changes

    def steps(change: Mapping[str, Any]) -> float:
        cell = surface.cell({**change, **{name: default[name] for name in SPEED_AXES}})
        rows = int(change.get("batch", config.batch_size)) * config.accumulate
        return TRAINING_SHARE * budget_s / (surface.seconds(cell) * rows)

    least = min(ENOUGH_STEPS, steps({}))
    return [change for change in changes if steps(change) >= least]


def nearest(values: Sequence[int], wanted: int) -> int:
    """Returns the value nearest to a wanted one."""
    return min(values, key=lambda value: abs(value - wanted))


@torch.no_grad()
def forecast_cost(config: ForecasterConfig, limits: SizeLimits) -> ModelCost:
    """Measures a forecaster with random weights: one window at a time, float32."""
    network = ForecastNetwork(config).eval()
    columns = config.num_targets + config.num_past + config.num_future
    window = torch.zeros(1, config.input_size + config.horizon, columns)
    statics = torch.zeros(1, config.num_static) if config.num_static else None
    network(window, statics)

    def latency_s() -> float:
        began, count = time.perf_counter(), 0
        while (taken_s := time.perf_counter() - began) < _LATENCY_S or not count:
            network(window, statics)
            count += 1
        return taken_s / count

    floats = {n: p.detach().numpy() for n, p in network.named_parameters()}
    return limits.measured(len(encode_weights(floats, limits.weights)), latency_s)
