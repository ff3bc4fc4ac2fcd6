"""Where the time of a training step goes, operation by operation, beside the machine's ceilings."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastlstm.errors import StorageError
from fastlstm.ops.custom_op import lstm_flop
from fastlstm.system import environment, hardware
from fastlstm.system.ceilings import measured_ceilings
from fastlstm.system.storage import open_regular

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer

_STEPS, _LONG_S, _TRIES = 3, 2.0, 3
"""Steps that are recorded, fewer where they take this long; recordings until torch returns one."""
_KERNELS = {
    "fastlstm::lstm": "LSTM forward",
    "fastlstm::lstm_backward": "LSTM backward",
    "_ProjectedCrossEntropy": "output and loss forward",
    "_ProjectedCrossEntropyBackward": "output and loss backward",
}
_FLOAT_BYTES = 4
_GZIP = b"\x1f\x8b"
"""A trace that is named .gz is compressed."""


@dataclass(frozen=True)
class OpTime:
    """An operation of a training step.

    Attributes:
        name: of the operation.
        calls: per step.
        seconds: of a step, in the operation itself.
        share: of the time of all operations.
        gflop: floating-point operations of a step in 1e9, or None where they are not counted.
        gbytes: bytes that are read and written at least, in 1e9, or None.
        gflops: 1e9 operations per second, or None.
        roof_share: of what the machine reaches with as many operations per byte, or None.
        bound: "compute" or "memory": which ceiling is the lower one; or None.
    """

    name: str
    calls: float
    seconds: float
    share: float
    gflop: float | None = None
    gbytes: float | None = None
    gflops: float | None = None
    roof_share: float | None = None
    bound: str | None = None


def op_times(trainer: Trainer, trace: Path | None = None) -> list[OpTime]:
    """Records a few training steps with torch's profiler; returns their operations, longest first.
    The `trace` is Chrome's trace JSON; StorageError is raised where it cannot be written."""
    environment.quiet_profiler()
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
    ) as seen:  # of one cycle, without acc_events some versions of torch warn of more
        while steps < _STEPS and time.perf_counter() - began < _LONG_S:
            trainer.take_step()
            steps += 1
    if trace is not None:
        _write_trace(seen, trace)
    return _by_name(seen.key_averages(group_by_input_shape=True), steps, trainer)


def check_trace(trace: Path) -> None:
    """Refuses a file for recorded events that cannot be one, or that is something else already.

    Raises:
        StorageError: it is refused.
    """
    if not trace.parent.is_dir():
        raise StorageError(f"cannot write {trace}: there is no directory {trace.parent}")
    if not os.access(trace.parent, os.W_OK):
        raise StorageError(f"cannot write {trace}: {trace.parent} is not writable")
    if os.path.lexists(trace):
        with open_regular(trace) as (descriptor, size):
            head = os.pread(descriptor, 64, 0)
        if size and not head.startswith(_GZIP) and b"schemaVersion" not in head:
            raise StorageError(f"{trace} is there and is no trace; choose another, or remove it")


def _write_trace(seen: Any, trace: Path) -> None:
    try:
        trace.unlink(missing_ok=True)  # an older one must not pass for this one
        seen.export_chrome_trace(str(trace))
    except (OSError, RuntimeError) as error:
        raise StorageError(f"cannot write {trace}: {error}") from None
    if not trace.is_file():  # torch says why on standard error, or not at all
        Path(f"{trace}.tmp").unlink(missing_ok=True)
        raise StorageError(f"cannot write {trace}; the disk may be full")


def _by_name(events: Any, steps: int, trainer: Trainer) -> list[OpTime]:
    """Returns the operations of a step, with all shapes of one name together."""
    device = trainer.plan.device.type
    ceilings = measured_ceilings(
        trainer.plan.options.precision, trainer.plan.options.threads, device=device
    )
    seconds, calls = dict[str, float](), dict[str, int]()
    flop, moved = dict[str, float](), dict[str, float]()
    for event in events:
        if event.device_type.name != "CPU":
            continue  # a kernel of a GPU, or a span of them: their time is that of operations, too
        key = event.key
        own_us = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        seconds[key] = seconds.get(key, 0.0) + own_us / 1e6
        calls[key] = calls.get(key, 0) + event.count
        work = _work(key, event.input_shapes)
        count = event.flops if work is None else work[0] * event.count
        if count:
            flop[key] = flop.get(key, 0.0) + count
        if work is not None:
            moved[key] = moved.get(key, 0.0) + work[1] * event.count
    twin = "_ProjectedCrossEntropy"  # the backward pass has no shapes, and twice the operations
    if twin in flop:
        flop[f"{twin}Backward"], moved[f"{twin}Backward"] = 2 * flop[twin], 2 * moved[twin]
    total_s = sum(seconds.values()) or 1.0
    found = []
    for key in sorted(seconds, key=lambda name: -seconds[name]):
        own = OpTime(
            _KERNELS.get(key, key), calls[key] / steps, seconds[key] / steps, seconds[key] / total_s
        )
        if seconds[key] > 0.0:
            counted = flop.get(key), moved.get(key)
            found.append(_with_roof(own, counted, steps, ceilings.gemm_gflops, ceilings.copy_gb_s))
    return found


def _work(key: str, shapes: list[list[int]]) -> tuple[float, float] | None:
    """Returns operations and least bytes of one call of our kernels; None for any other.

    A layer's tensors are its input `(T, B, I)`, or the `(V, I)` rows that tokens name, the weights
    `(4H, I)` and `(4H, H)`, and the output `(T, B, H)`; it keeps four gates and a cell per unit.
    The output multiplies `(rows, H)` by `(V, H)`.
    """
    if key in ("fastlstm::lstm", "fastlstm::lstm_backward") and len(shapes) >= 4:
        x, w_ih, w_hh, (T, B, H) = shapes[:4]
        passes = 2 if key.endswith("backward") else 1
        flop = lstm_flop(T, B, x[-1], H, V=x[0] if len(x) == 2 else None)
        values = prod(x) + T * B * 6 * H + prod(w_ih) + prod(w_hh)
        return float(flop * passes), float(_FLOAT_BYTES * values * passes)
    if key == "_ProjectedCrossEntropy" and len(shapes) >= 2:
        rows, weight = shapes[:2]
        values = prod(rows) + prod(weight) + rows[0]
        return 2.0 * prod(rows) * weight[0], float(_FLOAT_BYTES * values)
    return None


def _with_roof(
    op: OpTime, work: tuple[float | None, float | None], steps: int, gflops: float, gb_s: float
) -> OpTime:
    """Returns an operation with its rate and its share of the lower one of two ceilings."""
    flop, moved = work
    if not flop or not op.seconds:
        return op
    gflop = flop / steps / 1e9
    rate, roof, bound, gbytes = gflop / op.seconds, gflops, "compute", None
    if moved:
        gbytes = moved / steps / 1e9
        by_memory = gflop / gbytes * gb_s
        if rate < by_memory < gflops:  # faster than memory: its data come from the caches
            roof, bound = by_memory, "memory"
    return OpTime(
        op.name, op.calls, op.seconds, op.share, gflop, gbytes, rate,
        hardware.ceiling_share(rate, roof), bound if moved else None,
    )  # fmt: skip
