"""How long a training step of a forecaster takes."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from fastlstm.forecast.closing import Closing
from fastlstm.forecast.plan import training_loader
from fastlstm.forecast.table_schema import apply_schema
from fastlstm.forecast.task import ForecastTask
from fastlstm.training.device import random_numbers_kept
from fastlstm.training.plan import TrainingPlan
from fastlstm.training.precision import allow_tf32
from fastlstm.training.schedule import StopCriterion
from fastlstm.training.session import RunSession
from fastlstm.training.step_time import fastest_step_s, ignore
from fastlstm.training.trainer import Trainer

if TYPE_CHECKING:
    from fastlstm.forecast.data.dataset import SeriesDataset
    from fastlstm.forecast.data.splits import Split
    from fastlstm.forecast.files import StoredForecaster


CPU = torch.device("cpu")


def step_seconds(
    stored: StoredForecaster, dataset: SeriesDataset, split: Split, device: torch.device = CPU
) -> float:
    """Returns the seconds of the fastest of a few training steps.

    The forecaster is untrained, with a precision that is not auto. The network is thrown away;
    random numbers are left alone.

    Raises:
        torch.cuda.OutOfMemoryError: not even one window at a time fits.
    """
    config = stored.config
    allow_tf32(config.precision)
    with random_numbers_kept(device):
        network = copy.deepcopy(stored.network).to(device)
        inputs = apply_schema(dataset, stored)
        loader = training_loader(config, network.config, dataset.table, split, None)
        sizes = network.config
        valid = split.windows(dataset.table, "valid", sizes.input_size, sizes.horizon)
        closing = Closing(RunSession(None, []), stored, dataset, split, inputs, valid, None)
        task = ForecastTask(config, network, inputs, loader, valid, device, closing)
        plan = TrainingPlan(config, StopCriterion.of(config, loader.steps_per_epoch), device)
        return fastest_step_s(Trainer(task, plan, emit=ignore))
