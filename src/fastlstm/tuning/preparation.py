"""What `tune` measures of a text before its short runs: speeds, latency and bytes of sizes."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastlstm.errors import Setting, UsageError
from fastlstm.text.config import TrainConfig
from fastlstm.text.size_plan import EMBED_SIZES, expected_bits, step_seconds
from fastlstm.text.task import TextTask
from fastlstm.training.schedule import StopCriterion
from fastlstm.tuning.job import Default, Show, in_turns, names_of, open_axes
from fastlstm.tuning.moves import FIELDS, LAW_AXES, options_of, sizes_around, values_around
from fastlstm.tuning.stages import SPEED_AXES, fastest_settings, sizes_within_limits
from fastlstm.tuning.variants import has_wide_output

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer
    from fastlstm.tuning.job import Job
    from fastlstm.tuning.size_limits import ModelCost
    from fastlstm.tuning.speed_surface import Cell, SpeedSurface
    from fastlstm.tuning.text_job import TextJob
    from fastlstm.tuning.tune import Search

_NUM_PROMISING = 7
"""Changes that are tried, of all that the law can rank."""


def prepare(
    job: TextJob, trainer: Trainer, given: Collection[str], search: Search, show: Show
) -> Default:
    """Returns the default of a run that was set up, and the changes of it to try.

    Raises:
        UsageError: no size keeps the limits, or the axes leave nothing to try.
    """
    task, config = trainer.task, trainer.plan.options
    assert isinstance(task, TextTask)
    assert isinstance(config, TrainConfig)
    axes = open_axes(search.axes, given, FIELDS)
    model = task.model.config
    size = {name: getattr(model, name) for name in ("rnn_size", "num_layers", "embed_size")}
    config = replace(config, **size)
    config, sizes = _within_limits(job, config, task, "size" in axes, search, show)
    values = values_around(config, len(task.loader.ids), has_wide_output(task))
    values = {axis: found for axis, found in values.items() if axis in axes}
    if "size" in axes:
        fit = [size["rnn_size"] for size in sizes if size["refusal"] is None]
        values["size"] = [config.rnn_size, *(size for size in fit if size != config.rnn_size)]
    if not set(axes) & {*SPEED_AXES} and all(len(found) == 1 for found in values.values()):
        raise UsageError(
            f"--axes {','.join(search.axes)} leaves nothing to try: the options given fix it, or"
            " the output matrix is narrow beside the layers; give other ", Setting("axes"),
        )  # fmt: skip
    surface = None
    if task.device.type == "cpu":
        config, surface = _speeds(config, task, axes, values, show)
    default = _tuned_options(config)
    speeds = [] if surface is None else surface.to_list()
    if surface is None or not job.has_law:
        return Default(default, in_turns(values), speeds, sizes)
    changes = in_turns({axis: v for axis, v in values.items() if axis == "output-rank"})
    changes += _promising(values, default, config, len(task.loader.ids), surface)
    rates = [{"lr": value} for value in values.get("lr", [])[1:]]
    rate = 1.0 / surface.seconds(_cell(surface, default, {}))
    return Default(default, changes[:_NUM_PROMISING], speeds, sizes, rates, rate)


def _tuned_options(config: TrainConfig) -> dict[str, Any]:
    """Returns the options that the axes may change, as the default has them."""
    names = ("rnn_size", "num_layers", "embed_size", "batch_size", "seq_length", "optimizer",
             "learning_rate", "threads", "precision")  # fmt: skip
    return names_of(config, names)


def _within_limits(
    job: Job, config: TrainConfig, task: TextTask, is_open: bool, search: Search, show: Show
) -> tuple[TrainConfig, list[dict[str, Any]]]:
    """Returns the configuration with a size that keeps the limits, and the cost of every size."""
    assert config.rnn_size is not None
    wanted = sizes_around(config.rnn_size) if is_open else [config.rnn_size]
    if is_open and search.limits.has_any:
        wanted += [size for size in reversed(EMBED_SIZES) if size < min(wanted)]

    def options(size: int) -> dict[str, Any]:
        embed = config.embed_size if size == config.rnn_size else EMBED_SIZES[size]
        return {"rnn_size": size, "embed_size": embed}

    def cost(size: dict[str, Any]) -> ModelCost:
        model = replace(config, **size).model_config(task.tokenizer.vocab_size, 0.0)
        return search.limits.cost(model)

    sizes = sizes_within_limits(job, [options(size) for size in wanted], cost, search.limits, show)
    fit = [size for size in sizes if size["refusal"] is None]
    best = min(fit, key=lambda size: abs(size["rnn_size"] - (config.rnn_size or 0)))
    return replace(config, rnn_size=best["rnn_size"], embed_size=best["embed_size"]), sizes


def _speeds(
    config: TrainConfig, task: TextTask, axes: list[str], values: dict[str, list[Any]], show: Show
) -> tuple[TrainConfig, SpeedSurface]:
    """Returns the configuration with the fastest threads and precision, and the surface."""
    default = _tuned_options(config)

    def per_token(cell: dict[str, Any]) -> float:
        options = options_of(default, {n: v for n, v in cell.items() if n in values})
        timed = replace(config, **{**options, "precision": cell["precision"]})
        assert timed.seq_length is not None
        tokens = timed.batch_size * timed.accumulate * timed.seq_length
        return step_seconds(timed, task.loader.ids, task.tokenizer) / tokens

    timed_values = {name: found for name, found in values.items() if name != "lr"}
    best, surface = fastest_settings(default, axes, timed_values, per_token, "tokens", show)
    return replace(config, **best), surface


def _cell(surface: SpeedSurface, default: dict[str, Any], changes: dict[str, Any]) -> Cell:
    """Returns the cell of a surface that belongs to some changes of a default."""
    return surface.cell({**changes, **{n: default[n] for n in SPEED_AXES}})


def _promising(
    values: dict[str, list[Any]], default: dict[str, Any], config: TrainConfig, train_tokens: int,
    surface: SpeedSurface,
) -> list[dict[str, Any]]:  # fmt: skip
    """Returns changes of size, batch, sequence length and optimizer, together and single, those
    first of which law and speed promise most."""
    budget_s = StopCriterion.of(config, 1).budget_s
    assert budget_s is not None
    axes = {axis: found for axis, found in values.items() if axis in LAW_AXES}

    def bits(changes: dict[str, Any]) -> float:
        tokens = budget_s / surface.seconds(_cell(surface, default, changes))
        changed = replace(config, **options_of(default, changes))
        return expected_bits(changed, tokens, train_tokens, config.batch_size)

    every = [
        {axis: value for axis, value in zip(axes, cell, strict=True) if value != axes[axis][0]}
        for cell in itertools.product(*axes.values())
    ]
    return sorted(filter(None, every), key=bits)
