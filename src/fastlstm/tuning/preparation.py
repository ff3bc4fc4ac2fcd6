"""What `tune` measures before its short runs: speeds of settings, latency and bytes of sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fastlstm.errors import UsageError, counted
from fastlstm.ops.backends.onednn import bf16_instructions
from fastlstm.report.terminal import short_bytes
from fastlstm.system import hardware
from fastlstm.text.config import TrainConfig
from fastlstm.text.quality_law import STEP_WORTH, relative_bits
from fastlstm.text.size_plan import EMBED_SIZES, step_seconds
from fastlstm.text.task import TextTask
from fastlstm.training.schedule import StopCriterion
from fastlstm.tuning.moves import Default, open_axes, options_of, sizes_around, values_around
from fastlstm.tuning.speed_surface import SpeedSurface

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer
    from fastlstm.tuning.tune import Search

Show = Callable[[str, str], None]


def prepare(trainer: Trainer, given: Collection[str], search: Search, show: Show) -> Default:
    """Returns the default of a run that was set up, and the changes of it to try.

    Raises:
        UsageError: no size keeps the limits.
    """
    task, config = trainer.task, trainer.plan.options
    assert isinstance(task, TextTask)
    assert isinstance(config, TrainConfig)
    axes = open_axes(search.axes, given)
    model = task.model.config
    config = replace(config, rnn_size=model.rnn_size, embed_size=model.embed_size)
    config, sizes = _within_limits(config, task, "size" in axes, search, show)
    values = {axis: v for axis, v in values_around(config, len(task.loader.ids)).items()
              if axis in axes}  # fmt: skip
    if "size" in axes:
        fit = [size["rnn_size"] for size in sizes if size["refusal"] is None]
        values["size"] = [config.rnn_size, *(size for size in fit if size != config.rnn_size)]
    surface = None
    if task.device.type == "cpu":
        config, surface = _speeds(config, task, axes, values, show)
    single = [{axis: value} for axis, found in values.items() for value in found[1:]]
    default = Default(
        _tuned_options(config), _ordered(single, config, len(task.loader.ids), surface),
        [] if surface is None else surface.to_list(), sizes,
    )  # fmt: skip
    return default


def _tuned_options(config: TrainConfig) -> dict[str, Any]:
    """Returns the options that the axes may change, as the default has them."""
    names = ("rnn_size", "embed_size", "batch_size", "seq_length", "optimizer", "learning_rate",
             "threads", "precision")  # fmt: skip
    return {name: getattr(config, name) for name in names}


def _within_limits(
    config: TrainConfig, task: TextTask, is_open: bool, search: Search, show: Show
) -> tuple[TrainConfig, list[dict[str, Any]]]:
    """Returns the configuration with a size that keeps the limits, and the cost of every size."""
    assert config.rnn_size is not None
    wanted = sizes_around(config.rnn_size) if is_open else [config.rnn_size]
    if is_open and search.limits.has_any:
        wanted += [size for size in reversed(EMBED_SIZES) if size < min(wanted)]
    sizes = list[dict[str, Any]]()
    for size in wanted:
        embed = config.embed_size if size == config.rnn_size else EMBED_SIZES[size]
        sized = replace(config, rnn_size=size, embed_size=embed)
        cost = search.limits.cost(sized.model_config(task.tokenizer.vocab_size, 0.0))
        refusal = search.limits.refusal(cost)
        sizes.append({
            "rnn_size": size, "embed_size": embed, "latency_s": cost.latency_s,
            "num_bytes": cost.num_bytes, "refusal": refusal,
        })  # fmt: skip
        about = f"{1e6 * cost.latency_s:.1f} us per token, {short_bytes(cost.num_bytes)}"
        show(f"{size} units", f"refused: {refusal}" if refusal else about)
    fit = [size for size in sizes if size["refusal"] is None]
    if not fit:
        smallest = min(sizes, key=lambda size: float(size["latency_s"]))
        raise UsageError(
            f"no size keeps the limits; the fastest has {smallest['rnn_size']} units:"
            f" {smallest['refusal']}"
        )
    best = min(fit, key=lambda size: abs(size["rnn_size"] - (config.rnn_size or 0)))
    return replace(config, rnn_size=best["rnn_size"], embed_size=best["embed_size"]), sizes


def _speeds(
    config: TrainConfig, task: TextTask, axes: list[str], values: dict[str, list[Any]], show: Show
) -> tuple[TrainConfig, SpeedSurface]:
    """Returns the configuration with the fastest threads and precision, and the surface."""
    cores, threads = hardware.cores(), config.threads or torch.get_num_threads()
    grid: dict[str, list[Any]] = {"threads": [threads], "precision": [config.precision]}
    if "threads" in axes:
        grid["threads"] += sorted({1, max(1, cores // 2), cores} - {threads})
    if "precision" in axes and bf16_instructions() is not None:
        grid["precision"] += ["fp32" if config.precision == "bf16" else "bf16"]
    grid |= {name: found for name, found in values.items() if name != "lr"}
    default = _tuned_options(config)

    def per_token(cell: dict[str, Any]) -> float:
        options = options_of(default, {n: v for n, v in cell.items() if n in values})
        timed = replace(config, **{**options, "precision": cell["precision"]})
        before = torch.get_num_threads()
        torch.set_num_threads(cell["threads"])
        try:
            seconds = step_seconds(timed, task.loader.ids, task.tokenizer)
        finally:
            torch.set_num_threads(before)
        assert timed.seq_length is not None
        return seconds / (timed.batch_size * timed.accumulate * timed.seq_length)

    began = time.perf_counter()
    surface = SpeedSurface(grid, per_token)
    best = surface.fastest(("threads", "precision"))
    taken_s = time.perf_counter() - began
    rate = 1.0 / surface.seconds(tuple(best.values()))
    show(
        "speed",
        f"{counted(best['threads'], 'thread')}, {best['precision']}: {rate:,.0f} tokens/s"
        f" ({counted(len(surface.timed), 'setting')} timed in {taken_s:.1f} s)",
    )
    return replace(config, threads=best["threads"], precision=best["precision"]), surface


def _ordered(
    single: list[dict[str, Any]], config: TrainConfig, train_tokens: int,
    surface: SpeedSurface | None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Returns the single changes, those first of which law and speed promise most."""
    budget_s = StopCriterion.of(config, 1).budget_s
    if surface is None or budget_s is None:
        return single
    default, base_s = _tuned_options(config), surface.seconds(surface.base)

    def bits(changes: dict[str, Any]) -> float:
        ((axis, value),) = changes.items()
        options = options_of(default, changes)
        tokens = budget_s / (base_s * surface.factors.get(axis, {}).get(value, 1.0))
        steps = tokens / (options["batch_size"] * config.accumulate * options["seq_length"])
        known = options["optimizer"] if options["optimizer"] in STEP_WORTH else "adamw"
        return relative_bits(options["rnn_size"], tokens, steps, known, train_tokens)

    return sorted(single, key=bits)
