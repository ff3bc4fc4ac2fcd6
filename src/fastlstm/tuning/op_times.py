"""The time of a training step by operation, from torch's profiler."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastlstm.errors import StorageError
from fastlstm.ops.custom_op import lstm_flop
from fastlstm.system import environment, hardware
from fastlstm.system.storage import is_utf8, open_regular

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer

_STEPS, _LONG_S, _TRIES = 3, 2.0, 3
"""Steps to record, and seconds after which no further step is recorded; tries to record."""
_KERNELS = {
    "fastlstm::lstm": "LSTM forward",
    "fastlstm::lstm_backward": "LSTM backward",
    "_ProjectedCrossEntropy": "output and loss forward",
    "_ProjectedCrossEntropyBackward": "output and loss backward",
}
_GZIP = b"\x1f\x8b"
"""The first bytes of a compressed trace, whose name ends in .gz."""


@dataclass(frozen=True)
class OpTime:
    """An operation of a training step.

    Attributes:
        calls, seconds: per step; seconds without those of the operations that it calls.
        share: share of the seconds of all operations.
        gflops: 1e9 floating-point operations a second; None if not counted.
        ceiling_share: `gflops` over the measured ceiling of the machine, or None.
    """

    name: str
    calls: float
    seconds: float
    share: float
    gflops: float | None = None
    ceiling_share: float | None = None


def op_times(trainer: Trainer, trace: Path | None = None) -> list[OpTime]:
    """Records a few training steps; returns their operations, longest first. Writes the `trace` as
    Chrome's trace JSON, or raises StorageError."""
    environment.quiet("profiler")
    for _ in range(_TRIES):  # on a busy machine torch's profiler sometimes returns nothing
        if found := _recorded(trainer, trace):
            return found
    return []


def _recorded(trainer: Trainer, trace: Path | None) -> list[OpTime]:
    steps, began = 0, time.perf_counter()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if trainer.plan.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(
        activities=activities, record_shapes=True, with_flops=True, acc_events=True
    ) as seen:  # without acc_events some versions of torch warn
        while steps < _STEPS and time.perf_counter() - began < _LONG_S:
            trainer.take_step()
            steps += 1
    if trace is not None:
        _write_trace(seen, trace)
    events = seen.key_averages(group_by_input_shape=True)
    return _by_name(events, steps, trainer.plan.device.type, trainer.plan.ceiling_gflops)


def check_trace(trace: Path) -> None:
    """Raises StorageError for a path that is not writable, or holds something else than a trace."""
    if not is_utf8(trace):
        raise StorageError(f"cannot write {trace}: the name is not UTF-8; give another")
    if not trace.parent.is_dir():
        raise StorageError(f"cannot write {trace}: there is no directory {trace.parent}")
    if not os.access(trace.parent, os.W_OK):
        raise StorageError(f"cannot write {trace}: {trace.parent} is not writable")
    if os.path.lexists(trace):
        with open_regular(trace) as (descriptor, size):
            head = os.pread(descriptor, 64, 0)
        if size and not head.startswith(_GZIP) and b"schemaVersion" not in head:
            raise StorageError(f"{trace} exists and is no trace; choose another, or remove it")


def _write_trace(seen: Any, trace: Path) -> None:
    try:
        trace.unlink(missing_ok=True)  # an older trace must not pass for this one
        seen.export_chrome_trace(str(trace))
    except (OSError, RuntimeError) as error:
        raise StorageError(f"cannot write {trace}: {error}") from None
    if not trace.is_file():  # torch prints the reason on standard error, if at all
        Path(f"{trace}.tmp").unlink(missing_ok=True)
        raise StorageError(f"cannot write {trace}; the disk may be full")


def _by_name(events: Any, steps: int, device: str, ceiling_gflops: float) -> list[OpTime]:
    """Returns the operations of a step; adds up all shapes of an operation."""
    seconds, calls, flop = Counter[str](), Counter[str](), Counter[str]()
    for event in events:
        own_us = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        # The time of a GPU kernel is in its operation too.
        if event.device_type.name == "CPU" and own_us > 0.0:
            seconds[event.key] += own_us / 1e6
            calls[event.key] += event.count
            flop[event.key] += event.flops or event.count * _flop(event.key, event.input_shapes)
    projection = "_ProjectedCrossEntropy"  # backward has no shapes, and twice the work
    flop[f"{projection}Backward"] = 2 * flop[projection]
    found, total_s = list[OpTime](), sum(seconds.values())
    for name, own_s in seconds.most_common():
        rate = flop[name] / own_s / 1e9 or None
        of_ceiling = None if rate is None else hardware.ceiling_share(rate, ceiling_gflops)
        times = calls[name] / steps, own_s / steps, own_s / total_s
        found.append(OpTime(_KERNELS.get(name, name), *times, rate, of_ceiling))
    return found


def _flop(name: str, shapes: list[list[int]]) -> int:
    """Returns the floating-point operations of one call of this project's kernels, else 0.

    A layer has an input `(T, B, I)` or a table `(V, I)` of its rows, two weights, of which the
    second is `(4H, H)`, and the output `(T, B, D * H)`; the output layer multiplies `(rows, H)` by
    `(V, H)`.
    """
    if name in ("fastlstm::lstm", "fastlstm::lstm_backward") and len(shapes) >= 4:
        rows, (_, H), (T, B, columns) = shapes[0], *shapes[2:4]
        flop = lstm_flop(T, B, rows[-1], H, V=rows[0] if len(rows) == 2 else None) * (columns // H)
        return 2 * flop if name.endswith("backward") else flop
    if name == "_ProjectedCrossEntropy" and len(shapes) >= 2:
        return 2 * prod(shapes[0]) * shapes[1][0]
    return 0
