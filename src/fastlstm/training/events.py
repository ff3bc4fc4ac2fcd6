"""The events of a run, whatever it trains, and the times and rates in them."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch

from fastlstm.errors import counted
from fastlstm.runs.events import Event
from fastlstm.system import hardware
from fastlstm.system.gpu_usage import gpu_usage
from fastlstm.system.hardware import machine_name, peak_memory_bytes
from fastlstm.system.machine_usage import CORE_WAIT, LEAST_OTHERS, MachineUsage
from fastlstm.training.checkpoint import Checkpoint, reading
from fastlstm.training.plan import TrainingPlan
from fastlstm.training.task import Task, Watch

if TYPE_CHECKING:
    from fastlstm.training.trainer import Trainer

INTERVAL_S = 10.0
"""Seconds between `phase` events, and between `machine` events."""
_LOG_INTERVAL_S = 1.0
_OPTIONS = ("batch_size", "accumulate", "optimizer", "learning_rate", "precision", "seed")


def start_event(
    task: Task, plan: TrainingPlan, run_path: str | None, checkpoint: Checkpoint | None
) -> Event:
    """Returns what is known before the first step, or before the first one after `checkpoint`."""
    resumed_s = None
    if checkpoint is not None:
        with reading(checkpoint):
            resumed_s = float(checkpoint.meta["progress"]["elapsed_s"])
    return {
        "event": "start",
        "time": round(time.time(), 3),
        "task": task.name,
        "unit": task.unit,
        "run": run_path,
        "device": str(plan.device),
        "machine": machine_name(plan.device.type),
        "num_parameters": sum(p.numel() for p in task.model.parameters()),
        "flop_per_unit": task.flop_per_unit,
        "ceiling_gflops": plan.ceiling_gflops,
        **({"ceiling_how": plan.ceiling_how} if plan.ceiling_how else {}),
        "end": plan.stop_criterion.text,
        **{name: getattr(plan.options, name) for name in _OPTIONS},
        "threads": torch.get_num_threads(),
        **(gpu_usage() if plan.device.type == "cuda" else {}),
        **({"processes": _processes(plan)} if plan.world.size > 1 else {}),
        "resumed_from": None if checkpoint is None else checkpoint.step,
        "resumed_s": resumed_s,
    }


def _processes(plan: TrainingPlan) -> Event:
    world, options = plan.world, plan.options
    # Without --threads the number depends on the machine.
    is_same = options.threads is not None or world.num_machines == 1
    return {
        "num": world.size,
        "machines": world.num_machines,
        "backend": "nccl" if plan.device.type == "cuda" else "gloo",
        "threads": torch.get_num_threads() if is_same else None,
        "sync_every": options.sync_every,
        "wire": options.wire,
    }


def step_event(trainer: Trainer, rate: float, evaluations_left: int) -> Event:
    """Returns what the steps since the last `step` event did; `rate` is the learning rate."""
    progress, task, meter = trainer.progress, trainer.task, trainer.meter
    stop_criterion, elapsed_s = trainer.plan.stop_criterion, trainer.elapsed_s()
    if stop_criterion.budget_s is not None:
        eta_s = max(stop_criterion.budget_s - elapsed_s, 0.0)
    else:
        steps_left = (stop_criterion.total_steps or 0) - progress.step
        eta_s = meter.seconds_per_step * steps_left + meter.evaluation_s * evaluations_left
    rates = meter.take(task.loader.wait_s)
    return {
        "event": "step",
        "step": progress.step,
        "epoch": progress.step / task.loader.steps_per_epoch,
        "units": progress.tokens,
        "progress": trainer.done(),
        "lr": rate,
        **rates,
        **task.step_metrics(rates["loss"]),
        "elapsed_s": elapsed_s,
        "eta_s": eta_s,
        **({"rank_s": trainer.world.seconds} if trainer.world.size > 1 else {}),
    }


def end_event(trainer: Trainer, reason: str) -> Event:
    """Returns what the whole run did."""
    progress = trainer.progress
    return {
        "event": "end",
        "task": trainer.task.name,
        "reason": reason,
        "step": progress.step,
        "units": progress.tokens,
        "elapsed_s": trainer.elapsed_s(),
        "train_s": progress.train_s,
        "spent_s": dict(progress.spent),
        "best_step": progress.best_step,
        "best_loss": progress.best_loss,
        "peak_memory_bytes": peak_memory_bytes(trainer.plan.device),
        "run": trainer.run_path,
        **trainer.task.totals(progress),
    }


class PhaseTimes:
    """The seconds of each phase of training since the last `phase` event.

    On a GPU an update runs into the next step, which then counts a part of the update's time.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.begin()

    def begin(self) -> None:
        self._since, self._before = time.monotonic(), self._counters()

    def is_due(self) -> bool:
        return time.monotonic() - self._since >= INTERVAL_S

    def take(self) -> dict[str, float]:
        """Returns the seconds of each phase since the last call, and of all else as `other`."""
        wall_s = time.monotonic() - self._since
        before, now = self._before, self._counters()
        spent = {name: max(now[name] - before[name], 0.0) for name in now}
        self.begin()
        return {**spent, "other": max(wall_s - sum(spent.values()), 0.0)}

    def event(self) -> Event:
        return {"event": "phase", "step": self._trainer.progress.step, "seconds": self.take()}

    def _counters(self) -> dict[str, float]:
        trainer = self._trainer
        spent = trainer.progress.spent
        return {
            "input_wait": trainer.task.loader.wait_s,
            **trainer.stepper.seconds,
            "evaluation": spent.get("evaluations", 0.0),
            "checkpoint": spent.get("saving", 0.0),
        }


class MachineEvents:
    """Emits `machine` events between steps and within evaluations."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._usage = MachineUsage()
        self._due_s = time.monotonic() + INTERVAL_S
        self._is_told = False

    def emit_if_due(self) -> None:
        if time.monotonic() < self._due_s:
            return
        self._due_s = time.monotonic() + INTERVAL_S
        trainer = self._trainer
        gpus = gpu_usage() if trainer.plan.device.type == "cuda" else {}
        used = self._usage.read()
        now = {"time": round(time.time(), 1), "elapsed_s": round(trainer.elapsed_s(), 3)}
        trainer.emit({"event": "machine", "step": trainer.progress.step, **now, **used, **gpus})
        self._tell_of_waits(used.get("waiting_threads", 0.0), used.get("others_share", 1.0))

    def _tell_of_waits(self, waiting: float, others_share: float) -> None:
        """Warns once if threads wait for cores that other processes use."""
        if waiting <= CORE_WAIT or others_share < LEAST_OTHERS or self._is_told:
            return
        self._is_told = True
        threads = torch.get_num_threads()
        waiting = min(waiting, float(threads))  # other threads of the process may wait too
        fewer = max(1, threads - math.ceil(waiting))
        advice = "end those processes for full speed"
        advice += f", or give the run --threads {fewer}" if fewer < threads else ""
        verb = "waits" if threads == 1 else "wait"
        text = f"{waiting:.1f} of {counted(threads, 'thread')} {verb} for a core"
        self._trainer.say("warning", f"other processes use the CPU: {text}; {advice}")

    def watching(self, watch: Watch | None) -> Watch:
        """Returns a watch of an evaluation that emits due events and calls `watch`."""

        def tell(done: int, total: int) -> None:
            self.emit_if_due()
            if watch is not None:
                watch(done, total)

        return tell


class ThroughputMeter:
    """Collects the loss and speed of the steps between two `step` events.

    Attributes:
        evaluation_s: seconds of the newest evaluation, 0 before the first.
        save_s: seconds of the newest checkpoint.
        seconds_per_step: moving mean, 0 before the first step.
        is_ceiling_wrong: whether steps were faster than the ceiling, which is ignored then.
    """

    def __init__(self, task: Task, ceiling_gflops: float) -> None:
        self._task, self._ceiling_gflops = task, ceiling_gflops
        self.evaluation_s, self.save_s, self.seconds_per_step = 0.0, 0.5, 0.0
        self._unit_s, self._wait_s, self.is_ceiling_wrong = 0.0, 0.0, False
        self._clear()

    def _clear(self) -> None:
        self._loss = self._norm = self._seconds = 0.0
        self._units = self._steps = 0
        self._since = time.perf_counter()

    @property
    def unit_s(self) -> float:
        """Returns the seconds of scoring a validation unit; an estimate before an evaluation."""
        if self._unit_s:
            return self._unit_s
        return self._task.forward_share * self.seconds_per_step / self._task.step_units

    def add_step(self, loss: float, norm: float, units: int, seconds: float) -> None:
        self._loss += loss * units
        self._norm += norm
        self._units += units
        self._steps += 1
        self._seconds += seconds
        mean = self.seconds_per_step
        self.seconds_per_step = seconds if not mean else 0.9 * mean + 0.1 * seconds

    def add_evaluation(self, seconds: float, unit_s: float) -> None:
        """Records an evaluation, with callbacks, and the seconds of scoring a unit."""
        self.evaluation_s, self._unit_s = seconds, unit_s

    def log_due(self, every: int | None, step: int) -> bool:
        """Returns whether to emit a `step` event: each `every` steps, or once a second."""
        if every is not None:
            return step % every == 0
        return time.perf_counter() - self._since >= _LOG_INTERVAL_S

    def take(self, wait_s: float) -> dict[str, Any]:
        """Returns the figures since the last call; `wait_s` is the present `Loader.wait_s`."""
        units, seconds = max(self._units, 1), max(self._seconds, 1e-9)
        gflops = units / seconds * self._task.flop_per_unit / 1e9
        share = hardware.ceiling_share(gflops, self._ceiling_gflops)
        if share is None and self._ceiling_gflops:
            self._ceiling_gflops, self.is_ceiling_wrong = 0.0, True
        rates = {
            "loss": self._loss / units,
            "grad_norm": self._norm / max(self._steps, 1),
            "units_per_s": units / seconds,
            "gflops": gflops,
            "ceiling_share": share,
            # Skipped steps wait too, but their seconds are not counted.
            "input_wait_share": min(max(wait_s - self._wait_s, 0.0) / seconds, 1.0),
        }
        self._wait_s = wait_s
        self._clear()
        return rates
