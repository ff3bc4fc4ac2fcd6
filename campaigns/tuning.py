"""Checks the limits of `fastlstm tune` against measuring again.

usage: python campaigns/tuning.py limits fp32|int8   10 limits of latency, each met or not
"""

from __future__ import annotations

import sys
import time

import numpy as np

from fastlstm.system.machine_usage import MachineUsage
from fastlstm.text.config import ModelConfig
from fastlstm.text.size_plan import EMBED_SIZES
from fastlstm.tuning.size_limits import SizeLimits

_VOCAB = 80


def main() -> None:
    if sys.argv[1:] in (["limits", "fp32"], ["limits", "int8"]):
        limits(sys.argv[2])
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


if __name__ == "__main__":
    main()
