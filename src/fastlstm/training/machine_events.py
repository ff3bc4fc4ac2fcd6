"""The `machine` event: every 10 s what the run and others use of the machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fastlstm.errors import counted
from fastlstm.system.gpu_usage import gpu_usage
from fastlstm.system.machine_usage import (
    CORE_WAIT,
    LEAST_OTHERS,
    MachineUsage,
    threads_with_cores,
)
from fastlstm.training.task import Watch

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer

INTERVAL_S = 10.0


class MachineEvents:
    """Emits `machine` events of a trainer, between its steps and within evaluations.

    Args:
        trainer: whose run it is.
        run_path: of the run directory, whose disk is looked at; None where there is none.
    """

    def __init__(self, trainer: Trainer, run_path: str | None) -> None:
        self._trainer = trainer
        self._usage = MachineUsage(None if run_path is None else Path(run_path))
        self._due_s = time.monotonic() + INTERVAL_S
        self._is_told = False

    def emit_if_due(self) -> None:
        """Emits an event when the last one is 10 s old."""
        if time.monotonic() < self._due_s:
            return
        self._due_s = time.monotonic() + INTERVAL_S
        trainer = self._trainer
        gpus = gpu_usage() if trainer.plan.device.type == "cuda" else {}
        used = self._usage.read()
        trainer.emit(
            {
                "event": "machine",
                "step": trainer.progress.step,
                "time": round(time.time(), 1),
                **used,
                **gpus,
                "elapsed_s": round(trainer.elapsed_s(), 3),
            }
        )
        self._tell_of_waits(used.get("waiting_threads", 0.0), used.get("others_share", 1.0))

    def _tell_of_waits(self, waiting: float, others_share: float) -> None:
        """Says once that steps wait for threads without a core, where others have the cores."""
        if waiting <= CORE_WAIT or others_share < LEAST_OTHERS or self._is_told:
            return
        self._is_told = True
        threads = torch.get_num_threads()
        waiting = min(waiting, float(threads))  # a process may have other threads that wait
        fewer = threads_with_cores(threads, waiting)
        advice = "end them for full speed"
        advice += f", or give the run --threads {fewer}" if fewer < threads else ""
        verb = "waits" if threads == 1 else "wait"
        text = f"{waiting:.1f} of {counted(threads, 'thread')} {verb} for a core"
        self._trainer.say("warning", f"other processes use the CPU: {text}; {advice}")

    def watching(self, watch: Watch | None) -> Watch:
        """Returns a function for the progress of an evaluation that also emits what is due."""

        def tell(done: int, total: int) -> None:
            self.emit_if_due()
            if watch is not None:
                watch(done, total)

        return tell
