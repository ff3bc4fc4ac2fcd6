"""The GPU decoder on a simulated GPU: its Python runs, its kernels only take their time.

    python benchmarks/gpu_generation.py --simulated
    python benchmarks/serving.py --simulated --clients 1024

`install` replaces CUDA graphs by functions that write any tokens after the seconds that a step took
on an H100 (512 units, fp16, docs/results.md). The CPU time of what surrounds the kernels is that of
a GPU's host; the texts mean nothing. `python benchmarks/simulated_gpu.py serve RUN …` is
`fastlstm serve` with such a GPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from fastlstm.cli.main import main
from fastlstm.system import hardware
from fastlstm.text import gpu_decoder, lm, loading
from fastlstm.text.gpu_decoder import GpuDecoder
from fastlstm.text.gpu_rows import FIELDS, STATUS, STEPS, Rows

STEP_S = {
    **{1: 15e-6, 8: 15e-6, 64: 18e-6, 256: 20e-6, 1024: 27e-6, 4096: 90e-6},
    gpu_decoder.SIZES[-1]: 350e-6,
}
"""Seconds of a step by rows."""
ROOM, NUM_WRITTEN = FIELDS.index("room"), FIELDS.index("num_written")
RUNNING, LENGTH = STATUS.index("running"), STATUS.index("length")
TOKENS = np.random.default_rng(0).integers(0, 90, (STEPS, gpu_decoder.SIZES[-1]), np.int32)


class Event:
    """A time at which the simulated GPU has done its work."""

    busy_until_s = 0.0

    def record(self) -> None:
        self.at_s = max(Event.busy_until_s, time.perf_counter())

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.at_s - time.perf_counter()))

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at_s - self.at_s)


class Recorder:
    """As `training.graphed_step.Recorder`."""

    def __init__(self, device: torch.device) -> None: ...

    def apart(self) -> AbstractContextManager[None]:
        return nullcontext()

    def event(self, *, is_timed: bool) -> Event:
        return Event()

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)


def graph(decoder: GpuDecoder, rows: Rows, size: int, steps: int) -> Callable[[], None]:
    """Returns what stands for a CUDA graph of so many steps: it reads and writes any tokens."""

    def launch() -> None:
        started_s = max(Event.busy_until_s, time.perf_counter())
        Event.busy_until_s = started_s + steps * STEP_S[size]
        status, fields, given = (
            t[:size].numpy() for t in (rows.status, rows.fields, rows.num_given)
        )
        writes = (status == RUNNING) & (given & gpu_decoder._HAS_MORE == 0)
        first = np.maximum((given & (gpu_decoder._HAS_MORE - 1)) - 1, 0)
        count = np.where(writes, np.minimum(np.maximum(steps - first, 0), fields[:, ROOM]), 0)
        step = np.arange(steps)[:, None]
        written = rows.written.view(-1)[: steps * size].numpy().reshape(steps, size)
        is_written = (step >= first) & (step < first + count)
        written[:] = np.where(is_written, TOKENS[:steps, :size], -1)
        fields[:, ROOM] -= count
        fields[:, NUM_WRITTEN] += count
        status[writes & (fields[:, ROOM] <= 0)] = LENGTH

    return launch


def install() -> None:
    """Makes this process believe that it has a GPU for writing texts."""
    own: Any = GpuDecoder.__init__

    def on_the_cpu(
        self: Any, weights: Mapping[str, Any], config: Any, weight_format: str = "fp16"
    ) -> None:
        own(self, weights, config, weight_format, "cpu")

    replaced: dict[Any, dict[str, Any]] = {
        GpuDecoder: {"__init__": on_the_cpu, "_graph": graph},
        gpu_decoder: {"Recorder": Recorder, "CudaKernel": lambda *_: None},
        loading: {"has_gpu": lambda: True, "check_device": lambda _: None},
        lm: {"check_device": lambda _: None},
        hardware: {"check_device": lambda _: None},
    }
    for owner, names in replaced.items():
        for name, value in names.items():
            setattr(owner, name, value)


if __name__ == "__main__":
    install()
    sys.exit(main())
