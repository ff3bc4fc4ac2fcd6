"""The first two stages of `tune`: which sizes keep the limits, how fast each setting is."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fastlstm.errors import UsageError, counted
from fastlstm.report.terminal import short_bytes
from fastlstm.system import hardware
from fastlstm.tuning.speed_surface import SpeedSurface

if TYPE_CHECKING:
    from fastlstm.tuning.job import Job, Show
    from fastlstm.tuning.size_limits import ModelCost, SizeLimits

SPEED_AXES = ("threads", "precision")
"""Axes that are chosen by speed alone."""


def sizes_within_limits(
    job: Job,
    wanted: Sequence[dict[str, Any]],
    cost: Callable[[dict[str, Any]], ModelCost],
    limits: SizeLimits,
    show: Show,
) -> list[dict[str, Any]]:
    """Returns every size with its latency and bytes, and `refusal`: why it is over a limit.

    Args:
        job: what is tuned.
        wanted: the options of every size.
        cost: measures a size.
        limits: to keep.
        show: gets every size.

    Raises:
        UsageError: no size keeps the limits.
    """
    sizes = list[dict[str, Any]]()
    for options in wanted:
        measured = cost(options)
        refusal = limits.refusal(measured, job.per)
        sizes.append({
            **options, "latency_s": measured.latency_s, "latency_high_s": measured.high_s,
            "num_bytes": measured.num_bytes, "refusal": refusal,
        })  # fmt: skip
        limit = limits.max_latency_s
        within = "" if limit is None else f", limit {1e6 * limit:.1f} us"
        about = f"{measured.latency_text(job.per)}{within}, {short_bytes(measured.num_bytes)}"
        show(f"{options[job.size]} units", f"refused: {refusal}" if refusal else about)
    if all(size["refusal"] for size in sizes):
        smallest = min(sizes, key=lambda size: float(size["latency_s"]))
        raise UsageError(
            f"no size keeps the limits; the fastest has {smallest[job.size]} units:"
            f" {smallest['refusal']}"
        )
    return sizes


def fastest_settings(
    default: Mapping[str, Any],
    axes: Collection[str],
    values: Mapping[str, Sequence[Any]],
    unit_s: Callable[[dict[str, Any]], float],
    unit: str,
    show: Show,
) -> tuple[dict[str, Any], SpeedSurface]:
    """Returns the fastest threads and precision of a default, and the speed surface.

    Args:
        default: its options.
        axes: that are open.
        values: to time of the axes whose values change the time of a step.
        unit_s: seconds per unit of a step with some changes of the default and a precision.
        unit: that steps are counted in.
        show: gets the result.
    """
    cores, threads = hardware.cores(), default["threads"] or torch.get_num_threads()
    precision = default["precision"]
    grid: dict[str, list[Any]] = {"threads": [threads], "precision": [precision]}
    if "threads" in axes:
        grid["threads"] += sorted({1, max(1, cores // 2), cores} - {threads})
    if "precision" in axes and hardware.may_gain_by_bf16():
        grid["precision"] += ["fp32" if precision == "bf16" else "bf16"]
    grid |= {name: list(found) for name, found in values.items()}

    def timed(cell: dict[str, Any]) -> float:
        before = torch.get_num_threads()
        torch.set_num_threads(cell["threads"])
        try:
            return unit_s({n: v for n, v in cell.items() if n != "threads"})
        finally:
            torch.set_num_threads(before)

    began = time.perf_counter()
    surface = SpeedSurface(grid, timed)
    best = surface.fastest(SPEED_AXES)
    taken_s = time.perf_counter() - began
    rate = 1.0 / surface.seconds(tuple(best.values()))
    show(
        "speed",
        f"{counted(best['threads'], 'thread')}, {best['precision']}: {rate:,.0f} {unit}/s"
        f" ({counted(len(surface.timed), 'setting')} timed in {taken_s:.1f} s)",
    )
    return {name: best[name] for name in SPEED_AXES}, surface
