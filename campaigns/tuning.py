"""Checks the first two stages of `fastlstm tune` against measuring everything.

usage: python campaigns/tuning.py limits fp32|int8   10 limits of latency, each met or not
       python campaigns/tuning.py speed TEXT         the speed surface against all its cells
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastlstm.system import hardware
from fastlstm.system.machine_usage import MachineUsage
from fastlstm.text.config import ModelConfig, TrainConfig
from fastlstm.text.data.tokenizer import CharTokenizer
from fastlstm.text.size_plan import EMBED_SIZES, step_seconds
from fastlstm.tuning.size_limits import SizeLimits
from fastlstm.tuning.speed_surface import SpeedSurface

_VOCAB = 80
_ROUNDS = 5
"""Timings of a cell of the exhaustive search; the fastest counts."""


def main() -> None:
    if sys.argv[1:] in (["limits", "fp32"], ["limits", "int8"]):
        limits(sys.argv[2])
    elif sys.argv[1:2] == ["speed"] and len(sys.argv) == 3:
        speed(Path(sys.argv[2]))
    else:
        sys.exit(__doc__)


def model_of(size: int) -> ModelConfig:
    return ModelConfig(vocab_size=_VOCAB, embed_size=EMBED_SIZES[size], rnn_size=size)


def limits(weights: str) -> None:
    """Chooses the largest size for each of 10 limits, then measures it again."""
    chosen: list[tuple[float, int]] = []
    slowest_s, usage = 0.0, MachineUsage()
    ends = [SizeLimits(weights=weights).cost(model_of(size)).latency_s for size in (128, 768)]
    for limit in np.geomspace(2.0 * ends[0], ends[1], 10):
        allowed = SizeLimits(max_latency_s=float(limit), weights=weights)
        fit = []
        for size in EMBED_SIZES:
            began = time.perf_counter()
            if allowed.refusal(allowed.cost(model_of(size))) is None:
                fit.append(size)
            else:
                slowest_s = max(slowest_s, time.perf_counter() - began)
        if fit:
            chosen.append((float(limit), max(fit)))
    met = 0
    for limit, size in chosen:
        latency = SizeLimits(weights=weights).cost(model_of(size)).latency_s
        met += latency <= limit
        print(f"{weights} limit {1e6 * limit:.1f} us: {size} units, {1e6 * latency:.1f} us")
    print(f"met in {met} of {len(chosen)}; the slowest refusal took {slowest_s:.2f} s;"
          f" others used {usage.read().get('others_share', 0.0):.0%} of the cores")  # fmt: skip


def speed(path: Path) -> None:
    """Compares the cell that the surface chooses with the fastest of all cells."""
    hardware.keep_freed_memory()  # as every command does that trains
    text = path.read_text(encoding="utf-8")
    tokenizer = CharTokenizer("".join(sorted(set(text))))
    ids = tokenizer.encode(text)
    config = TrainConfig(rnn_size=256, embed_size=128, precision="fp32", learning_rate=0.01)
    axes: dict[str, list[Any]] = {
        "threads": sorted({hardware.cores(), 1}, reverse=True), "precision": ["fp32", "bf16"],
        "batch_size": [32, 16, 64], "seq_length": [128, 64, 256],
    }  # fmt: skip

    def per_token(cell: dict[str, Any]) -> float:
        options = {name: value for name, value in cell.items() if name != "threads"}
        torch.set_num_threads(cell["threads"])
        timed = TrainConfig(**{**vars(config), **options})
        return step_seconds(timed, ids, tokenizer) / (cell["batch_size"] * cell["seq_length"])

    per_token({name: values[0] for name, values in axes.items()})  # what torch loads at first
    began = time.perf_counter()
    surface = SpeedSurface(axes, per_token)
    found = surface.fastest()
    surface_s = time.perf_counter() - began
    began = time.perf_counter()
    all_cells = [dict(zip(axes, cell, strict=True)) for cell in itertools.product(*axes.values())]
    times = [min(per_token(cell) for _ in range(_ROUNDS)) for cell in all_cells]
    exhaustive_s = time.perf_counter() - began
    best = min(times)
    own = times[all_cells.index(found)]
    print(f"{len(surface.timed)} of {len(all_cells)} cells timed, {surface_s:.1f} s of"
          f" {exhaustive_s:.1f} s: {100 * surface_s / exhaustive_s:.1f} %")  # fmt: skip
    print(f"found {found}: {100 * (own / best - 1):+.1f} % of the fastest,"
          f" {all_cells[times.index(best)]}")  # fmt: skip


if __name__ == "__main__":
    main()
