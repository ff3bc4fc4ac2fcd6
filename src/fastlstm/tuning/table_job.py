"""The settings of forecasters for `tune`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fastlstm.forecast.config import ForecastConfig
from fastlstm.forecast.model.network import ForecastNetwork
from fastlstm.forecast.plan import HIDDEN_SIZES, PATCHES, longest_segments
from fastlstm.forecast.task import ForecastTask
from fastlstm.forecast.train import train_forecaster
from fastlstm.runs.weight_formats import encode_weights
from fastlstm.system.measurements import calls_per_s
from fastlstm.tuning.job import MIN_STEPS_PER_EPOCH, Changes, Job, Show, Space

if TYPE_CHECKING:
    from fastlstm.forecast.model.network import ForecasterConfig
    from fastlstm.runs.events import Event
    from fastlstm.training.trainer import Trainer
    from fastlstm.tuning.size_limits import ModelCost, SizeLimits
    from fastlstm.tuning.tune import Search

_DROPOUTS = (0.1, 0.0, 0.2)
_LATENCY_S = 0.1
_COMPARED = 2048


class TrialTask(ForecastTask):
    """A forecaster in a search: all are scored on the same windows, and not on the test part."""

    min_scored = max_scored = _COMPARED

    def finish_s(self, unit_s: float) -> float:
        return self.session.report_s()

    def finish(self, trainer: Trainer) -> Event:
        self.publish(self.model.cpu().state_dict(), trainer)
        trainer.best.set_published()
        return {}


class TableJob(Job):
    """Compares forecasters of equal training time by their validation loss.

    No law predicts a longer run of a table (docs/predict.md). The first changes are tried in the
    order of the axes.
    """

    fields = {  # noqa: RUF012
        "size": ("hidden_size", "num_layers"),
        "batch": ("batch_size", "accumulate"),
        "lr": ("learning_rate",),
        "dropout": ("dropout",),
        "input": ("input_size",),
        "patch": ("patch", "tbptt"),
        "normalize": ("normalize",),
        "threads": ("threads",),
        "precision": ("precision",),
    }
    names = {  # noqa: RUF012
        "size": "{} units", "batch": "batch {}", "lr": "learning rate x {:g}",
        "dropout": "dropout {:g}", "input": "{} steps in", "patch": "patches of {}",
        "normalize": "normalize {}", "threads": "threads {}", "precision": "{}",
    }  # fmt: skip
    size, per, more = "hidden_size", "forecast", ("pad_start",)

    def train(self, source: Any, config: ForecastConfig, **options: Any) -> None:
        train_forecaster(source, config, make_task=TrialTask, stop=self.stop, **options)

    def prepare(self, trainer: Trainer, search: Search, show: Show) -> Space:
        task = trainer.task
        assert isinstance(task, ForecastTask)
        network = task.model.config

        def around(config: ForecastConfig) -> dict[str, list[Any]]:
            longest = int(longest_segments(task.dataset.table, task.split).max())
            return values_around(config, task.loader.num_windows, longest - config.horizon)

        _, space = self.space_around(
            task.stored.config, HIDDEN_SIZES,
            lambda each: forecast_cost(
                replace(network, hidden_size=each.hidden_size), search.limits
            ),
            around, search, show,
        )  # fmt: skip
        return space

    def options_of(self, default: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
        options = super().options_of(default, changes)
        if "patch" not in options:
            return options
        # The input must be a multiple of the patch.
        patches = max(1, options["input_size"] // options["patch"])
        return {**options, "input_size": patches * options["patch"]}

    def result(
        self, start: Event, end: Event, options: Mapping[str, Any], space: Space, seconds: float,
        budget_s: float,
    ) -> tuple[float, float]:  # fmt: skip
        return end["best_loss"], end["best_loss"]

    def figure(self, value: float, has_unit: bool = True) -> str:
        return f"{value:.4f}" + " validation loss" * has_unit


def values_around(
    config: ForecastConfig, num_windows: int, longest_input: int
) -> dict[str, list[Any]]:
    """Returns the values of every axis but size, the default first; a batch is at most an eighth of
    the `num_windows` of the training part."""
    batch, length, patch = config.batch_size, config.input_size, config.patch
    assert length is not None
    assert patch is not None
    room = num_windows // MIN_STEPS_PER_EPOCH // config.accumulate
    batches = [n for n in (2 * batch, batch // 2) if 1 <= n <= max(room, batch // 2)]
    inputs = [n // patch * patch for n in (length // 2, 2 * length)]
    patches = [n for n in (patch // 2, 2 * patch) if n in PATCHES and n <= config.horizon]
    kind = config.normalize or "last"
    kinds = [] if config.output == "negative_binomial" else ["last", "standard", "none"]
    return {
        "batch": [batch, *batches], "lr": [1.0, 0.5, 2.0],
        "dropout": [config.dropout, *(d for d in _DROPOUTS if d != config.dropout)],
        "input": [length, *(n for n in inputs if patch <= n <= longest_input and n != length)],
        "patch": [patch, *(n for n in patches if length >= n)],
        "normalize": [
            kind,
            *(k for k in kinds if k != kind and (k != "standard" or not config.tbptt)),
        ],
    }  # fmt: skip


@torch.no_grad()
def forecast_cost(config: ForecasterConfig, limits: SizeLimits) -> ModelCost:
    """Measures a forecaster with random weights, one window at a time in float32."""
    network = ForecastNetwork(config).eval()
    columns = config.num_targets + config.num_past + config.num_future
    window = torch.zeros(1, config.input_size + config.horizon, columns)
    statics = torch.zeros(1, config.num_static) if config.num_static else None
    network(window, statics)

    def latency_s() -> float:
        return 1.0 / calls_per_s(lambda: network(window, statics), _LATENCY_S)

    floats = {n: p.detach().numpy() for n, p in network.named_parameters()}
    return limits.measured(len(encode_weights(floats, limits.weights)), latency_s)
